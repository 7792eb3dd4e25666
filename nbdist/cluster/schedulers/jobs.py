"""Submission, state and cancellation of jobs through ipyparallel's launchers.

Each host of a job runs `dial_in.py`. ipyparallel provides the commands that submit and cancel jobs.
This module provides the content of the script and the state of the job.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ipyparallel.cluster import launcher as launchers

from nbdist.cluster.forkserver.logs import log_file, read_tail
from nbdist.cluster.schedulers.dialects import HOPELESS, SCHEDULERS, seconds
from nbdist.errors import NoResponseError, StartError
from nbdist.records import JobState
from nbdist.utils.processes import wait_or_kill

if TYPE_CHECKING:
    from nbdist.records import Batch, Launcher

COMMAND_S = 30.0
"""Time for a scheduler to respond."""

_END_S = 2.0
LOG_LINES = 5
"""Lines of a log that errors show."""

_JOB_VARIABLES = re.compile(
    r"SLURM_(?!CONF$|JWT$|CLUSTERS$)|PBS_(JOB|ARRAY|NODE|TASK|ENV|O_)|SGE_(JOB|TASK|O_)|LSB_"
)
"""Variables of a job in which the notebook itself runs. They must not reach the jobs it submits."""

_RANK_VARIABLES = re.compile(r"OMPI_COMM_|PMIX?_|SLURM_PROCID$")
"""Rank variables of such a job. mpiexec needs its other variables to find the hosts."""

_FORGOTTEN = re.compile(
    r"(?i)invalid job id|unknown job|jobs? .*(does|do) not exist|job .*not found"
)
"""Messages of schedulers about a job that ended some time ago."""

SUBMITTED = JobState(word="submitted", waits=True)
"""State of a job before the scheduler has responded."""

_NOTHING = {"N/A", "None", "Unknown", "(null)", ""}


class Job(abc.ABC):
    """Job of a cluster. Each of its hosts runs `dial_in.py`.

    Args:
        batch: the options for the scheduler.
        number: the number of the job in the cluster.
        places: the place of each host's rank.
        folder: the cluster's folder, which the hosts share with this machine.

    Attributes:
        number: the number of the job in the cluster.
        places: the place of each host's rank.
    """

    title: str
    """Display name of the kind of job."""

    has_successors = False
    """True if a running job replaces lost hosts."""

    def __init__(self, batch: Batch, number: int, places: tuple[int, ...], folder: Path) -> None:
        self.number = number
        self.places = places
        self._batch = batch
        self._folder = folder
        self._id = ""

    def __str__(self) -> str:
        return f"{self.title} {self._id}".rstrip()

    @abc.abstractmethod
    def submit(self, ticket: Path) -> None:
        """Submit the job.

        Args:
            ticket: the file with the ticket that the hosts read.

        Raises:
            StartError: the scheduler refuses the job, or is not available.
        """

    @abc.abstractmethod
    def state(self) -> JobState:
        """Query the state of the job.

        Raises:
            StartError: the scheduler does not respond.
        """

    @abc.abstractmethod
    def ending(self) -> list[str]:
        """Return the command that cancels the job; empty if none does. It is safe to repeat."""

    def end(self) -> list[str]:
        """End the job directly, or return the command that cancels it (`ending`)."""
        return self.ending()

    def log_tail(self) -> str:
        """Return the last lines of output of the hosts; empty if there are none."""
        return read_tail(self._folder, f"job-{self.number}", LOG_LINES)

    @property
    def _log(self) -> Path:
        return log_file(self._folder, f"job-{self.number}")

    def _command(self, ticket: Path) -> list[str]:
        own = self._batch.python
        python = str(Path(own).expanduser()) if own else sys.executable
        return [python, "-m", "nbdist.cluster.schedulers.dial_in", str(ticket)]


class BatchJob(Job):
    """Job of one of `SCHEDULERS`."""

    def __init__(self, batch: Batch, number: int, places: tuple[int, ...], folder: Path) -> None:
        super().__init__(batch, number, places, folder)
        self._scheduler = SCHEDULERS[batch.launcher]
        self.title = self._scheduler.title
        self._delete: list[str] = []

    def submit(self, ticket: Path) -> None:
        program, *args = self._command(ticket)
        file = f"job-{self.number}.sh"
        launcher = self._scheduler.launcher(
            work_dir=str(self._folder),
            profile_dir=str(self._folder),
            batch_file_name=file,
            batch_template=self._scheduler.template,
            output_file=str(self._log),
            namespace={"options": "\n".join(self._lines()), "name": self._name},
            program=[program],
            program_args=args,
            log=logging.getLogger("nbdist.ipyparallel"),
            **self._scheduler.traits,
        )
        self._delete = list(launcher.delete_command)
        # ipyparallel's `start` drops the error output, and builds a shell command for LSF.
        launcher.write_batch_script(len(self.places))
        script = self._folder / file
        command = list(launcher.submit_command)
        try:
            if self._batch.launcher == "lsf":
                output = run_command(command, input=script.read_text())
            else:
                output = run_command([*command, str(script)])
            self._id = launcher.parse_job_id(output)
        except launchers.LauncherError as error:
            raise StartError(f"{self.title}s cannot be submitted: {error}") from None

    @property
    def _name(self) -> str:
        """Unique name, by which a job can be cancelled before it has an id."""
        return f"nbdist-{self._folder.name}-{self.number}"

    def _lines(self) -> list[str]:
        """Return the scheduler's lines of the script."""
        asked, time = self._scheduler, self._batch.time
        if time and self._batch.launcher == "lsf":  # LSF expects minutes
            time = str(-(-seconds(time) // 60))
        given = (
            (asked.queue, self._batch.queue),
            (asked.time, time),
            (asked.gpus, self._batch.gpus),
        )
        words = [word.format(value) for word, value in given if value]
        return [f"{asked.mark}{word}" for word in (*self._parts(), *words, *self._batch.options)]

    def _parts(self) -> tuple[str, ...]:
        """Return the options of an array job with one part for each host."""
        count = len(self.places)
        if self._batch.launcher == "pbs":
            array = (f"-{'J' if _is_pbs_pro() else 't'} 1-{count}",) if count > 1 else ()
            return "-N nbdist", "-j oe", f"-o {self._log}", *array
        if self._batch.launcher == "sge":
            return "-N nbdist", "-S /bin/sh", "-j y", f"-o {self._log}", f"-t 1-{count}"
        if self._batch.launcher == "lsf":
            return f"-J nbdist[1-{count}]", f"-o {self._log}"
        return ()

    def state(self) -> JobState:
        return state_of(self._batch.launcher, self._id) if self._id else SUBMITTED

    def ending(self) -> list[str]:
        if self._batch.launcher == "slurm" and not _is_missing("scancel"):
            return ["scancel", f"--name={self._name}"]
        return [*self._delete, self._id] if self._id else []


class MpiJob(Job):
    """`mpiexec` on this machine, which starts `dial_in.py` on the hosts, without a queue."""

    title = "mpiexec"

    def __init__(self, batch: Batch, number: int, places: tuple[int, ...], folder: Path) -> None:
        super().__init__(batch, number, places, folder)
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, ticket: Path) -> None:
        launcher = launchers.MPILauncher(
            mpi_args=[word for line in self._batch.options for word in shlex.split(line)],
            program=self._command(ticket),
            work_dir=str(self._folder),
            profile_dir=str(self._folder),
        )
        launcher.n = len(self.places)
        if _is_missing(launcher.mpi_cmd[0]):
            raise StartError(f"{launcher.mpi_cmd[0]} is not installed here")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                launcher.find_args(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={n: value for n, value in os.environ.items() if not _RANK_VARIABLES.match(n)},
                start_new_session=True,
            )

    def state(self) -> JobState:
        if self._process is None:
            return SUBMITTED
        code = self._process.poll()
        word = "running" if code is None else f"ended with exit code {code}"
        return JobState(word=word, over=code is not None)

    def ending(self) -> list[str]:
        return []  # it is a child of the rendezvous process and ends with it

    def end(self) -> list[str]:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            wait_or_kill(self._process, _END_S)
        return []


def state_of(launcher: Launcher, job: str) -> JobState:
    """Query the state of a job by its id, from one of `SCHEDULERS`.

    Raises:
        StartError: the scheduler does not respond.
    """
    scheduler = SCHEDULERS[launcher]
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        output = run_command([word.format(id=job, user=user) for word in scheduler.look])
    except StartError as error:
        if _FORGOTTEN.search(str(error)):
            return JobState(word="", detail=str(error), over=True)
        raise
    found = re.findall(scheduler.word.format(id=re.escape(job)), output)
    if not found:
        return JobState(word="", over=scheduler.is_silent_of_old)
    alive = [word for word in found if word not in scheduler.over]
    reason, detail = _reason(output) if launcher == "slurm" else ("", "")
    restarts = re.search(r"\bRestarts=(\d+)", output)  # Slurm's
    is_over = not alive or reason in HOPELESS or all(w in scheduler.hopeless for w in alive)
    return JobState(
        word=", ".join(dict.fromkeys(scheduler.words.get(w, w) for w in alive or found)),
        detail=detail,
        waits=not is_over and any(word in scheduler.waiting for word in alive),
        over=is_over,
        restarts=int(restarts[1]) if restarts else 0,
    )


def _reason(output: str) -> tuple[str, str]:
    """Return Slurm's reason, and the reason in words with the expected start time."""
    found = dict(re.findall(r"(Reason|StartTime)=(\S*)", output))
    reason, begins = found.get("Reason", ""), found.get("StartTime", "")
    parts = [reason.replace("_", " ")] if reason not in _NOTHING else []
    if "JobState=PENDING" in output and begins not in _NOTHING:
        parts.append(f"expected start {begins.replace('T', ' ')}")
    return reason, ", ".join(parts)


def _is_missing(program: str) -> bool:
    return shutil.which(program) is None


@functools.cache
def _is_pbs_pro() -> bool:
    """Return True if PBS is PBS Pro. Torque has another option for arrays."""
    with contextlib.suppress(StartError):
        return "pbs" in run_command(["qstat", "--version"]).lower()
    return False


def variables_of_submitter() -> dict[str, str]:
    """Return this process's variables without those of a job in which it runs itself."""
    own = (_JOB_VARIABLES, _RANK_VARIABLES)
    return {n: v for n, v in os.environ.items() if not any(form.match(n) for form in own)}


def run_command(
    command: list[str],
    input: str | None = None,  # noqa: A002 - as subprocess
    *,
    folder: Path | None = None,
    variables: dict[str, str] | None = None,
) -> str:
    """Run a command of the scheduler, and return its output.

    Args:
        command: the words.
        input: text on its standard input.
        folder: working directory; None for that of this process.
        variables: environment variables; None for `variables_of_submitter`.

    Raises:
        StartError: the command is not installed, or fails.
        NoResponseError: the command does not end in time.
    """
    if _is_missing(command[0]):
        raise StartError(f"{command[0]} is not installed here")
    try:
        done = subprocess.run(
            command,
            input=input or "",
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
            env=variables_of_submitter() if variables is None else variables,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoResponseError(f"{command[0]} did not end within {COMMAND_S:g} s") from None
    if done.returncode:
        raise StartError(
            done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}"
        )
    return done.stdout
