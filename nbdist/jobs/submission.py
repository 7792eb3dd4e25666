"""Start, state, output and end of a submitted program.

A supervisor process on this machine runs it, or Slurm does. The file `job.json` beside the program
describes the job, so that another notebook finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from nbdist.cluster.schedulers import jobs
from nbdist.cluster.schedulers.dialects import SCHEDULERS
from nbdist.errors import NoResponseError, StartError, UsageError
from nbdist.jobs.launch_files import job_name
from nbdist.jobs.supervisor import EXIT_STATUS, GO, OUTPUT, PROGRAM
from nbdist.records import (
    JOB_FOLDER_VARIABLE,
    JOB_VARIABLE,
    RANK_VARIABLE,
    ProgramJob,
    ProgramLauncher,
    Writer,
)
from nbdist.utils.files import read_file, replace_file
from nbdist.utils.processes import CONTINUES, is_gone, is_here, is_silent, process_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.records import ProgramStatus, RunState

_FILE, _LOCK = "job.json", "job.lock"
_SUPERVISOR = "nbdist.jobs.supervisor"
_COMMANDS: dict[ProgramLauncher, tuple[str, ...]] = {
    "local": ("sh", "run.sh"),
    "mpi": ("sh", "mpirun.sh"),
    "ssh": ("bash", "hosts.sh", "--"),
    "slurm": ("sbatch", "--parsable", "--job-name={name}", "train.sbatch"),
}
LAUNCHERS = tuple(_COMMANDS)
_NEEDED: dict[ProgramLauncher, str] = {"mpi": "mpirun", "ssh": "ssh", "slurm": "sbatch"}
_LEFT_OUT = {
    RANK_VARIABLE,
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TF_CONFIG",
    "JOB_COMPLETION_INDEX",
    "MPLBACKEND",
    "PAGER",
    "GIT_PAGER",
    "CLICOLOR",
    "FORCE_COLOR",
}
"""Variables that would make the program a rank of another job, and those of a kernel."""

_OF_JUPYTER = "JPY_"

_STOPPED = {128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
_START_S = 120.0
"""Longest wait for the start of a supervisor, whose Python may be on a slow shared disk."""

_MOST_BYTES = 1 << 24
_SHOWN = 200
"""Characters of a scheduler's answer that an error shows."""

_OUTCOMES: dict[str, ProgramStatus] = {"COMPLETED": "finished", "CANCELLED": "stopped"}
"""Status of ended jobs by Slurm's word. All others have failed."""


class State(NamedTuple):
    """State of a submitted program.

    Attributes:
        status: its status.
        detail: the scheduler's reason, the exit status, or another remark; may be empty.
    """

    status: ProgramStatus
    detail: str = ""

    @property
    def is_over(self) -> bool:
        """True if the program has ended."""
        return self.status not in ("queued", "running")


def check(launcher: ProgramLauncher, hosts: Sequence[str]) -> None:
    """Check that a launcher can start programs.

    Args:
        launcher: the launcher.
        hosts: ssh names of the hosts, empty for this machine.

    Raises:
        UsageError: its command is not installed, or the hosts have no names.
    """
    needed = _NEEDED.get(launcher)
    if needed is not None and shutil.which(needed) is None:
        raise UsageError(f"--launcher {launcher}: {needed} is not installed here")
    if launcher == "ssh" and not all(hosts):
        raise UsageError("--launcher ssh needs the names of hosts: %dist_start gpu1 gpu2")


def start(
    folder: Path,
    launcher: ProgramLauncher,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    runs: Path,
) -> ProgramJob:
    """Start an exported program.

    Args:
        folder: folder of the program and its launch file.
        launcher: the launcher.
        arguments: arguments of the program.
        variables: further environment variables.
        runs: folder for its runs.

    Returns:
        The job. The folder contains it as `job.json`.

    Raises:
        OSError: a process cannot be started, or `job.json` cannot be written.
        StartError: Slurm refuses the job, or does not respond.
    """
    job = ProgramJob(
        id=secrets.token_hex(6),
        launcher=launcher,
        number="",
        process=None,
        submitted=time.time(),
        runs=str(runs),
        arguments=tuple(arguments),
        variables=dict(variables),
    )
    return _started(job, folder)


def resume(folder: Path) -> ProgramJob:
    """Start an ended program again, with the launcher, arguments and variables of its job.

    The job keeps its state if the start fails.

    Args:
        folder: folder of the program, its launch file and its job.

    Returns:
        The job. The folder contains it as `job.json`.

    Raises:
        OSError: see `start`.
        StartError: see `start`.
        UsageError: the job has not ended, its folder was deleted, its launcher is not installed, or
            another process resumes it.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} was deleted: submit the training again")
    with _locked(folder):
        job = read(folder)
        if not (state := state_of(job, folder)).is_over:
            raise UsageError(f"the {title(job)} is {state.status}: wait for its end, or cancel it")
        if state.status == "unknown" and job.launcher != "slurm":  # it may still run
            raise UsageError(
                f"the {title(job)} may still run ({state.detail}): submit the training again, or "
                f"make sure that it has ended, remove {folder / PROGRAM}, and start its launch file"
            )
        check(job.launcher, ())
        return _started(job, folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let only one process resume the job of a folder.

    Raises:
        UsageError: another process resumes it.
    """
    with (folder / _LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another notebook resumes the job in {folder}: nbdist.job returns it"
            ) from None
        except OSError:  # the shared disk has no locks
            pass
        yield


def _started(job: ProgramJob, folder: Path) -> ProgramJob:
    """Start the program of a job, and store the job."""
    env = _environment(job, folder)
    name = f"{job_name(folder.name)}-{job.id}"
    command = [*(word.format(name=name) for word in _COMMANDS[job.launcher]), *job.arguments]
    if job.launcher != "slurm":
        with tempfile.TemporaryFile() as errors:  # the supervisor keeps it open
            return _supervised(job, command, folder, env, errors)
    begun = replace(job, number=_queued(command, name, folder, env))
    try:
        _store(begun, folder)
    except BaseException:
        with contextlib.suppress(StartError):
            cancel(begun, folder)
        raise
    return begun


def _store(job: ProgramJob, folder: Path) -> None:
    mode = 0o600 if job.variables else 0o644  # they may contain keys
    replace_file(folder / _FILE, msgspec.json.encode(job), mode)


def _environment(job: ProgramJob, folder: Path) -> dict[str, str]:
    """Return the environment variables of a program: those of this process and of the job."""
    own, here = job.variables, Path(sys.executable).parent
    outer = {
        name: value
        for name, value in jobs.variables_of_submitter().items()
        if name not in _LEFT_OUT and not name.startswith(_OF_JUPYTER)
    }
    return {
        **outer,
        **own,
        "PATH": f"{here}{os.pathsep}{own.get('PATH') or os.environ.get('PATH', os.defpath)}",
        "PYTHON": sys.executable,
        "NBDIST_RUNS_FOLDER": job.runs,
        JOB_VARIABLE: job.id,
        JOB_FOLDER_VARIABLE: str(folder),
    }


def _queued(command: Sequence[str], name: str, folder: Path, env: dict[str, str]) -> str:
    """Submit a job of this name to Slurm, and return its number.

    Raises:
        StartError: see `start`. If Slurm does not respond, nbdist cancels the job by its name.
    """
    try:
        answer = jobs.run_command([*command], folder=folder, variables=env).strip()
        number = answer.partition(";")[0]
        if not number.isdecimal():
            raise NoResponseError(f"sbatch printed no number of a job: {answer[:_SHOWN]!r}")
    except (NoResponseError, KeyboardInterrupt) as error:  # Slurm may have queued the job
        undo = ["scancel", f"--name={name}"]
        outcome = f"nbdist has cancelled the job {name} in case Slurm has queued it"
        try:
            jobs.run_command(undo)
        except StartError:
            outcome = f"if Slurm has queued the job, `{' '.join(undo)}` cancels it"
        if isinstance(error, KeyboardInterrupt):
            raise
        raise StartError(f"{error}: {outcome}") from None
    return number


def _supervised(
    job: ProgramJob,
    command: Sequence[str],
    folder: Path,
    env: dict[str, str],
    errors: IO[bytes],
) -> ProgramJob:
    """Start a command under a supervisor process, and store the job with that process.

    The supervisor waits until the job is stored. It confirms the start of the program. Its
    tracebacks go to `errors`.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until it can pass it on
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", _SUPERVISOR, *command],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    threading.Thread(target=supervisor.wait, daemon=True).start()  # leaves no zombie
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    begun = replace(job, process=process_of(supervisor.pid))
    try:
        with supervisor.stdout:
            with contextlib.suppress(BrokenPipeError), supervisor.stdin as request:
                _store(begun, folder)
                request.write(GO)
            if (reason := _why_not_started(supervisor, errors)) is not None:
                raise StartError(f"`{' '.join(command)}` cannot be started in {folder}: {reason}")
    except BaseException:
        supervisor.terminate()
        raise
    return begun


def _why_not_started(supervisor: subprocess.Popen[bytes], errors: IO[bytes]) -> str | None:
    """Wait for the answer of a supervisor. Return the reason if it has not started the program."""
    answer = supervisor.stdout
    assert answer is not None
    with selectors.DefaultSelector() as selector:
        selector.register(answer, selectors.EVENT_READ)
        if not selector.select(_START_S):
            supervisor.kill()  # after SIGTERM, it would start the program first
            return f"the supervisor has not started it within {_START_S:g} s"
    if answer.readline() == GO:
        return None
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "the supervisor was killed")


def read(folder: Path) -> ProgramJob:
    """Return the job of a folder.

    Raises:
        UsageError: no job was submitted from it, or `job.json` cannot be read.
    """
    return _read(folder, Path.read_bytes)


def _read(folder: Path, read_bytes: Callable[[Path], bytes]) -> ProgramJob:
    path = folder / _FILE
    try:
        return msgspec.json.decode(read_bytes(path), type=ProgramJob)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder} contains no submitted job: name the folder of %dist_submit"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def _read_own(path: Path) -> bytes:
    """Return the content of a file that only this user can change.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it cannot be read, it or its folder is a link, or another user could choose its
            content.
    """
    try:
        return read_file(path, _MOST_BYTES, own=True)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def state_of(job: ProgramJob, folder: Path) -> State:
    """Return the state of a job.

    Raises:
        StartError: Slurm does not respond.
    """
    return _slurm_state(job) if job.launcher == "slurm" else _process_state(job, folder)


def _process_state(job: ProgramJob, folder: Path) -> State:
    assert job.process is not None
    process = _signalled(job, folder)  # first: the exit status is written before the end
    with contextlib.suppress(OSError, ValueError):
        code = int((folder / EXIT_STATUS).read_text())
        if code == CONTINUES:
            return State("stopped", "it can continue from its checkpoint")
        if code in _STOPPED:
            return State("stopped")
        return State("failed", f"exit status {code}") if code else State("finished")
    if process is None and not folder.is_dir():
        return State("unknown", "its folder was deleted")
    if process is None:
        return State("failed", "its process was killed")
    if not is_here(process):
        return _remote_state(process, folder)
    return State("running", "" if process == job.process else "its supervisor was killed")


def _signalled(
    job: ProgramJob, folder: Path, read_bytes: Callable[[Path], bytes] = Path.read_bytes
) -> Writer | None:
    """Return the process that takes signals for a program: its supervisor, or else its own.

    None if both have ended.
    """
    assert job.process is not None
    if not is_gone(job.process):
        return job.process
    with contextlib.suppress(OSError, msgspec.DecodeError):
        program = msgspec.json.decode(read_bytes(folder / PROGRAM), type=Writer)
        return None if is_gone(program) else program
    return None


def _remote_state(supervisor: Writer, folder: Path) -> State:
    """Return the state of a job without an exit status, whose supervisor is on another host."""
    with contextlib.suppress(OSError):
        if not is_silent(folder / PROGRAM):
            return State("running", f"on {supervisor.host}")
    return State("unknown", f"it was started on {supervisor.host}, which does not respond")


def _slurm_state(job: ProgramJob) -> State:
    found = jobs.state_of("slurm", job.number)
    word = found.word if found.word or not found.over else _accounted(job.number)
    if word in SCHEDULERS["slurm"].waiting:  # also if it waits forever
        return State("queued", found.detail)
    if not found.over:
        return State("running", found.detail)
    if not word:
        return State("unknown", "Slurm no longer knows the job")
    status = _OUTCOMES.get(word, "failed")
    return State(status, word if status == "failed" else "")


def _accounted(number: str) -> str:
    """Return the state of a job that Slurm keeps only in its accounting; empty if in none."""
    command = ["sacct", "--jobs", number, "--allocations", "--noheader", "--format", "State%20"]
    with contextlib.suppress(StartError):
        return jobs.run_command(command).strip().partition(" ")[0]
    return ""


def cancel(job: ProgramJob, folder: Path) -> None:
    """Send SIGTERM to a program. With `--checkpoint`, it saves its state and ends.

    Raises:
        StartError: Slurm does not respond.
        UsageError: the program was started on another host.
    """
    _cancellation(job, folder, Path.read_bytes)()


def _cancellation(
    job: ProgramJob, folder: Path, read_bytes: Callable[[Path], bytes]
) -> Callable[[], object]:
    """Return the function that sends SIGTERM to a program. See `cancel` for errors."""
    if job.launcher == "slurm":
        return partial(jobs.run_command, ["scancel", job.number])
    assert job.process is not None
    if not is_here(job.process):
        raise UsageError(f"the job was started on {job.process.host}: cancel it there")
    return partial(_terminate, _signalled(job, folder, read_bytes))


def _terminate(process: Writer | None) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process.pid, signal.SIGTERM)


def cancellation_of(run: RunState) -> Callable[[], object]:
    """Return the function that cancels the job of a run, as `cancel` does.

    Other users may have written the run, so the files of the job must be this user's own.

    Raises:
        UsageError: the run belongs to no job, the program was started on another host, or another
            user owns the job or can change its files.
    """
    if not run.job_folder:
        raise UsageError("the program is no submitted job: stop it where it was started")
    folder = Path(run.job_folder)
    job = _read(folder, _read_own)
    if job.id != run.job:
        raise UsageError(f"{folder} contains another job")
    return _cancellation(job, folder, _read_own)


def output(job: ProgramJob, folder: Path) -> str:
    """Return the output of the program so far, of all ranks and all starts."""
    pattern = f"*-{job.id}-*.log" if job.launcher == "slurm" else OUTPUT
    paths = sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name))
    return "".join(path.read_text(errors="replace") for path in paths)


def title(job: ProgramJob) -> str:
    """Return the name of a job: `Slurm job 4711`, `local job`."""
    return f"Slurm job {job.number}" if job.launcher == "slurm" else f"{job.launcher} job"
