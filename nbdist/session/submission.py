"""Submitted jobs: exported programs that a launcher runs."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import StartError, UsageError
from nbdist.execution.following import show_run
from nbdist.execution.saved_runs import Runs, SavedRun
from nbdist.jobs import submission
from nbdist.session.exporting import export
from nbdist.settings import Settings
from nbdist.telemetry import run_reader
from nbdist.views.run.job import JobPicture
from nbdist.views.surface import new_surface

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from nbdist.execution.module_sync import ModuleSync
    from nbdist.execution.replay_journal import Journal
    from nbdist.records import ClusterRequest, ProgramJob, ProgramLaunch, ProgramStatus
    from nbdist.telemetry.run_reader import StoredRun

_POLL_S = 0.2
_QUERY_S = 2.0
"""Seconds between two questions to Slurm."""

_DOWN_S = 300.0
"""Seconds without an answer of Slurm after which nbdist raises its error."""

_CLOCKS_S = 3600.0
"""Assumed largest difference in seconds between the clocks of this machine and of the hosts."""

_SHOWN_LINES = 20
"""Lines of the output of a failed job that nbdist shows."""


class SubmittedJob:
    """Exported program that a launcher runs. It continues when the notebook's kernel ends.

    Its properties ask the scheduler and read the disk each time.

    Args:
        folder: Folder of the program.

    Attributes:
        folder: Folder of the program.

    Raises:
        UsageError: No job was submitted from the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._job = submission.read(folder)
        self._asked_at = 0.0
        self._failed_at = 0.0
        self._state = submission.State("queued")

    @property
    def state(self) -> ProgramStatus:
        """Status: `queued`, `running`, `finished`, `stopped`, `failed` or `unknown`.

        `stopped` means cancelled, or ended by SIGTERM. Slurm no longer knows old jobs: `unknown`.

        Raises:
            StartError: Slurm does not respond.
        """
        return self._query().status

    @property
    def runs(self) -> Runs:
        """The runs of the job that have values, newest first."""
        return Runs([SavedRun(run) for run in self._stored()])

    @property
    def run(self) -> SavedRun:
        """The newest run of the job.

        Raises:
            UsageError: It has no run with values, or the program stores no runs.
        """
        for run in self._stored():
            return SavedRun(run)
        raise UsageError(f"{self} has no run with values: job.logs() returns its output")

    def logs(self) -> str:
        """Return the output of all ranks so far, also that before `resume`."""
        return submission.output(self._newest(), self.folder)

    def cancel(self) -> None:
        """Send SIGTERM to the program. With `--checkpoint`, it saves its state and ends.

        Raises:
            StartError: Slurm does not respond.
            UsageError: The program was started on another host.
        """
        submission.cancel(self._newest(), self.folder)

    def resume(self) -> None:
        """Start the program again after its end, with the same launcher, arguments and variables.

        With `--checkpoint`, it continues from its newest checkpoint. The variables of
        `%dist_start --env` are those of the submission, and all others those of this notebook.

        Raises:
            UsageError: The job is queued or running, its folder was deleted, or another notebook
                resumes it.
            StartError: Slurm refuses the job or does not respond, or the program cannot be started.
                The job keeps its state.
        """
        self._job = submission.resume(self.folder)
        self._asked_at, self._state = 0.0, submission.State("queued")

    def wait(self, timeout_s: float | None = None) -> ProgramStatus:
        """Wait until the job has ended.

        Args:
            timeout_s: Limit in seconds. Default: no limit.

        Returns:
            The status. It is `queued` or `running` after the limit.

        Raises:
            StartError: Slurm has not responded for five minutes.
        """
        self._asked_at = 0.0  # another notebook may have resumed the job
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_ended() and (until is None or time.monotonic() < until):
            time.sleep(_POLL_S)
        return self._state.status

    def follow(self) -> None:
        """Show the state of the job and its runs until it ends.

        An interrupt ends the view, not the job. The output of a failed job is shown.

        Raises:
            StartError: Slurm has not responded for five minutes.
        """
        try:
            self._follow()
        except KeyboardInterrupt:
            sys.stdout.write(
                f"nbdist: the view has ended, and {self} goes on: nbdist.job({str(self.folder)!r})"
                ".follow() shows it again\n"
            )

    def _follow(self) -> None:
        self._asked_at = 0.0
        surface, shown = new_surface(), ""
        seen: set[str] = set()
        while True:
            has_ended = self._has_ended()
            if (text := f"nbdist: {self._described()}") != shown:
                surface.show(JobPicture(text))
                shown = text
            waits = self._state.status == "queued"  # perhaps for hours: nothing to read
            fresh = [] if waits else [run for run in self._stored() if run.id not in seen]
            if fresh:
                seen.add(fresh[-1].id)
                show_run(fresh[-1], Settings.from_environment(), self._has_ended)
            elif has_ended:
                break
            else:
                time.sleep(_POLL_S)
        if self._state.status == "failed":
            lines = self.logs().splitlines(keepends=True)[-_SHOWN_LINES:]
            sys.stderr.write("".join(lines))

    def _has_ended(self) -> bool:
        """Return True if the job has ended. It asks at most every 2 s."""
        if time.monotonic() - self._asked_at > _QUERY_S:
            try:
                self._query()
            except StartError as error:  # Slurm may be down for a moment
                self._asked_at = time.monotonic()
                self._failed_at = self._failed_at or self._asked_at
                if self._asked_at - self._failed_at > _DOWN_S:
                    raise
                self._state = submission.State(self._state.status, str(error))
        return self._state.is_over

    def _query(self) -> submission.State:
        self._state = submission.state_of(self._newest(), self.folder)
        self._asked_at, self._failed_at = time.monotonic(), 0.0
        return self._state

    def _newest(self) -> ProgramJob:
        """Return the job. Another notebook may have resumed it; the folder may be deleted."""
        with contextlib.suppress(UsageError):
            self._job = submission.read(self.folder)
        return self._job

    def _described(self) -> str:
        status, detail = self._state
        return f"{self}: {status}" + (f" ({detail})" if detail else "")

    def _stored(self) -> list[StoredRun]:
        """Return the runs of the job that have values, newest first."""
        earliest = self._job.submitted - _CLOCKS_S
        found = []
        for run in run_reader.stored_runs(Path(self._job.runs)):
            with contextlib.suppress(OSError):  # deleted meanwhile
                state = run.state()
                if state.began < earliest:
                    break
                if state.job == self._job.id and next(iter(run.tables()), None) is not None:
                    found.append(run)
        return found

    def __str__(self) -> str:
        return f"{submission.title(self._job)} in {self.folder.name}/"

    def __repr__(self) -> str:
        """Describe the job by its state; by the last known one if Slurm does not respond."""
        with contextlib.suppress(StartError):
            self._query()
        return f"<nbdist {self._described()}>"


def job(folder: str | os.PathLike[str]) -> SubmittedJob:
    """Return the job that was submitted from a folder, also by another notebook.

    Args:
        folder: Folder of `%dist_submit`.

    Returns:
        The job: `state`, `logs()`, `cancel()`, `resume()`, `wait()`, `follow()`, `run` and `runs`.

    Raises:
        UsageError: No job was submitted from the folder.
    """
    return SubmittedJob(Path(folder).expanduser().absolute())


def submit(
    path: str,
    cluster: ClusterRequest,
    journal: Journal,
    modules: ModuleSync,
    *,
    launch: ProgramLaunch = "local",
    arguments: Sequence[str] = (),
    **training: Any,
) -> SubmittedJob:
    """Export a training, and start it. See `Cluster.submit`.

    Args:
        path: see `export`, also for `cluster` and `journal`.
        cluster: request of the cluster.
        journal: the cells.
        modules: the user's own modules on the workers.
        launch: launcher of the program.
        arguments: arguments of the program.
        **training: further arguments of `export`.

    Raises:
        UsageError: see `Cluster.submit`.
        StartError: see `Cluster.submit`.
    """
    launcher = launch if isinstance(launch, str) else launch.launcher
    if launcher not in submission.LAUNCHERS:
        choices = ", ".join(submission.LAUNCHERS)
        raise UsageError(
            f"nbdist cannot submit to {launcher}: choose from {choices}, or write its files with "
            "%dist_export and start them"
        )
    submission.check(launcher, [host.name for host in cluster.hosts])
    runs = Settings.from_environment().runs_path
    exported = export(path, cluster, journal, modules, launch=launch, **training)
    for text in exported.remarks:
        sys.stdout.write(f"nbdist: {text}\n")
    folder = Path(path).expanduser().absolute()
    try:
        submission.start(folder, launcher, arguments, dict(cluster.env), runs)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return SubmittedJob(folder)
