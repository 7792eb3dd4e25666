"""A run in progress: its storage, its findings, and its stop requests."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from nbdist.cells.hyperparameters import hyperparameters
from nbdist.execution.alerts import RunAlerts
from nbdist.records import (
    SIGNAL_STEPS,
    Finding,
    Media,
    Metrics,
    Rows,
    RunState,
    RunWorker,
    run_name,
)
from nbdist.telemetry.diagnostics import Pace
from nbdist.telemetry.frontend_request import notebook_path, this_request
from nbdist.telemetry.run_reader import StoredRun, prune
from nbdist.telemetry.run_state import RunChanges, RunFindings
from nbdist.telemetry.run_writer import EVENTS_FOLDER, RunDirectory, new_id
from nbdist.telemetry.tail import Tail
from nbdist.utils.processes import BEAT_S, this_process
from nbdist.utils.signals import interrupt_held
from nbdist.views import formatting
from nbdist.views.run.cell_output import run_surface
from nbdist.views.run.live_display import RunView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.records import (
        AnyEvent,
        CellRequest,
        RecoveryRecord,
        RunKind,
        RunStatus,
        StepOptions,
        WorkerState,
    )
    from nbdist.settings import Settings
    from nbdist.telemetry.receiver import Subscriber

FLUSH_INTERVAL_S = 0.05
STATE_INTERVAL_S = 0.5

_pruned: set[Path] = set()
"""Folders whose removed runs were reported in this session."""


class LiveRun(Protocol):
    """A run in progress.

    Attributes:
        id: the id of the run; empty if it is not stored.
    """

    id: str

    @property
    def state(self) -> RunState | None:
        """The state of the run; None for a cell that nbdist runs again."""
        ...

    @property
    def subscribers(self) -> tuple[Subscriber, ...]:
        """Functions that store the records of the cell. The receiver's thread calls them."""
        ...

    def placed(self, request: CellRequest) -> CellRequest:
        """Return the cell with the folder for the files that the ranks write."""
        ...

    def tick(self) -> None:
        """Write new records. Call it many times per second."""
        ...

    def stops_requested(self) -> int:
        """Return the number of stop requests from browsers."""
        ...

    def stacks_requested(self) -> set[int]:
        """Return the ranks whose stacks browsers have requested since the last call."""
        ...

    def stopping(self, *, requested: bool = True) -> None:
        """Record that nbdist has asked the ranks to stop, or has withdrawn the request."""
        ...

    def lost(self, ranks: Iterable[int]) -> None:
        """Record that ranks died."""
        ...

    def recovering(self, reason: str) -> None:
        """Record that nbdist replaces ranks, with the reason. No records arrive meanwhile."""
        ...

    def recovered(self, recovery: RecoveryRecord, pids: Mapping[int, int]) -> None:
        """Record that the run continues. `pids` are the process ids of all ranks."""
        ...

    def show(self, text: str) -> None:
        """Store text of the cell's output. It may also arrive after the end of the run."""
        ...

    def close(self) -> None:
        """Close the run after the last output of the cell. May be called more than once."""
        ...

    def leave(self) -> None:
        """Close the run in this process. Another process continues to store it."""
        ...

    def end(self, status: RunStatus, error: str = "") -> tuple[str, ...]:
        """Store the end of the run.

        Returns:
            Messages for the user: the first finding, and remarks about the storage.
        """
        ...


class StoredLiveRun:
    """A run in its own directory. nbdist reports disk errors and continues the run.

    Args:
        directory: the directory of the run.
        kept_runs: the number of runs to keep. The end of this run deletes the oldest ones.
        step: options of a step cell; None for other cells.
        reported: True if another process has already stored reports of the run.
        alert_command: the command that receives alerts about the run; empty for none.
    """

    def __init__(
        self,
        directory: RunDirectory,
        kept_runs: int,
        step: StepOptions | None = None,
        *,
        reported: bool = False,
        alert_command: str = "",
    ) -> None:
        self.id = directory.state.id
        self._directory = directory
        self._kept_runs = kept_runs
        self._changes = RunChanges(directory.state, reported=reported)
        self._findings = RunFindings(directory.state, step)
        self._alerts = RunAlerts(alert_command)
        self._is_recovering = False
        self._left = False
        self._unstored: RunState | None = None
        self._shown: list[str] = []
        self._flushed_at = self._updated_at = self._beaten_at = 0.0

    @property
    def state(self) -> RunState:
        return self._unstored or self._directory.state

    @property
    def subscribers(self) -> tuple[Subscriber, ...]:
        return self._directory.take, self._changes.receive, self._findings.receive

    def placed(self, request: CellRequest) -> CellRequest:
        """Return the cell with the folder for traces. TensorBoard reads it."""
        if request.step is None or not request.step.options.profile:
            return request
        folder = str(self._directory.path / EVENTS_FOLDER)
        step = replace(request.step.options, profile_folder=folder)
        return request.with_options(step=step)

    def tick(self) -> None:
        now = time.monotonic()
        if not self._is_recovering and now - self._flushed_at >= FLUSH_INTERVAL_S:
            self._flush()
            self._flushed_at = now
        if now - self._updated_at < STATE_INTERVAL_S:
            return
        self._updated_at = now
        if self.state.program and now - self._beaten_at >= BEAT_S:
            self._beaten_at = now
            self._directory.beat()
        self._findings.look_if_due(now)
        self._update()

    def _update(self) -> None:
        """Write the state if it has changed."""
        found, pace = self._findings.found, self._findings.pace
        changes = self._changes.take(found, self._losses(), pace)
        state = self._directory.state
        changed = any(getattr(state, name) != value for name, value in changes.items())
        if changed or self._directory.is_stale:
            self._directory.update(**changes)
        self._alerts.look(self._directory.state)

    def _look(self) -> None:
        self._findings.look()
        self._update()

    def _losses(self) -> tuple[Finding, ...]:
        """Return findings about reports that were lost or not written."""
        losses = []
        if dropped := self._changes.dropped:
            rows = formatting.count(dropped, "report")
            text = f"{rows} were lost: the buffer of a rank was full"
            losses.append(Finding(topic="dropped", text=text, value=dropped))
        if self._directory.fault:
            losses.append(Finding(topic="disk", text=self._directory.fault))
        return tuple(losses)

    def stops_requested(self) -> int:
        return self._directory.stops_requested()

    def stacks_requested(self) -> set[int]:
        return self._directory.stacks.take_requests()

    def stopping(self, *, requested: bool = True) -> None:
        self._changes.change(status="stopping" if requested else "running")
        self._look()

    def lost(self, ranks: Iterable[int]) -> None:
        self._changes.lost(ranks)

    def recovering(self, reason: str) -> None:
        """Keep new rows in memory until `recovered` determines which rows they replace.

        The earlier rows are written first: another process may have to continue the recovery.
        """
        self._flush()
        self._is_recovering = True
        self._findings.forget()
        self._changes.reported = True
        self._changes.change(recovering=reason)
        self._update()

    def recovered(self, recovery: RecoveryRecord, pids: Mapping[int, int]) -> None:
        self._changes.replaced(pids)
        self._changes.change(
            recoveries=(*self._directory.state.recoveries, recovery), recovering=""
        )
        self._update()
        self._is_recovering = False
        self._alerts.recovered(self._directory.state, recovery)

    def show(self, text: str) -> None:
        self._shown.append(text)

    def _flush(self) -> None:
        self._directory.flush()
        self._flush_shown()

    def _flush_shown(self) -> None:
        if self._shown:
            self._directory.show("".join(self._shown))
            self._shown.clear()

    def close(self) -> None:
        if self._left:
            return
        fault_before = self._directory.fault
        self._flush_shown()
        if not self._changes.reported:
            self._directory.discard()
        elif self._directory.fault != fault_before:
            self._look()

    def leave(self) -> None:
        self._left = True
        self._flush_shown()
        self._directory.close()
        self._look()

    def end(self, status: RunStatus, error: str = "") -> tuple[str, ...]:
        if not self._changes.reported:
            unnamed = replace(self._directory.state, id="")  # `close` deletes the directory
            self._unstored = replace(unnamed, status=status, error=error, ended=time.time())
            return ()
        self._flush_shown()
        self._directory.close()
        self._changes.change(status=status, error=error, ended=time.time(), recovering="")
        self._look()
        self._alerts.ended(self._directory.state)
        gone = prune(self._directory.path.parent, self._kept_runs, spared=self.id)
        removed = f"removed {formatting.count(len(gone), 'old run')}, keeping "
        kept = f"{removed}{self._kept_runs} (the setting NBDIST_KEPT_RUNS)"
        folder = self._directory.path.parent
        is_first = bool(gone) and folder not in _pruned
        _pruned.update([folder] if gone else [])
        losses = (loss.text for loss in self._losses())
        return (*self._findings.summary(), *losses, *((kept,) if is_first else ()))


class NullRun:
    """A run that is not stored.

    Args:
        reason: the message at its end.
        state: the state of the run; None for a cell that nbdist runs again.
    """

    def __init__(self, reason: str, state: RunState | None = None) -> None:
        self.id = ""
        self.state = state
        self._reason = reason
        self._reported = False
        self._changes = RunChanges(state, reported=False) if state else None

    def placed(self, request: CellRequest) -> CellRequest:
        return request

    @property
    def subscribers(self) -> tuple[Subscriber, ...]:
        return (self._receive,)

    def _receive(self, record: AnyEvent) -> None:
        self._reported |= isinstance(record, Rows | Metrics | Media)
        if self._changes is not None:
            self._changes.receive(record)

    def tick(self) -> None: ...

    def stops_requested(self) -> int:
        return 0

    def stacks_requested(self) -> set[int]:
        return set()

    def stopping(self, *, requested: bool = True) -> None: ...

    def lost(self, ranks: Iterable[int]) -> None: ...

    def recovering(self, reason: str) -> None: ...

    def recovered(self, recovery: RecoveryRecord, pids: Mapping[int, int]) -> None:
        del pids
        if self.state is not None:
            self.state = replace(self.state, recoveries=(*self.state.recoveries, recovery))

    def show(self, text: str) -> None: ...

    def close(self) -> None: ...

    def leave(self) -> None: ...

    def end(self, status: RunStatus, error: str = "") -> tuple[str, ...]:
        if self.state is not None and self._changes is not None:
            self._changes.change(status=status, error=error, ended=time.time())
            self.state = replace(self.state, **self._changes.take((), (), Pace()))
        return (self._reason,) if self._reported else ()


@contextlib.contextmanager
def begun(
    request: CellRequest,
    header: str,
    cells: Sequence[str],
    workers: Sequence[WorkerState],
    settings: Settings,
    seed: int | None = None,
) -> Iterator[LiveRun]:
    """Return a context manager for `begin`. It closes the run at its end."""
    with contextlib.ExitStack() as closing:
        with interrupt_held():
            run = begin(request, header, cells, workers, settings, seed)
            closing.callback(run.close)
        yield run


def begin(
    request: CellRequest,
    header: str,
    cells: Sequence[str],
    workers: Sequence[WorkerState],
    settings: Settings,
    seed: int | None = None,
    *,
    program: str = "",
    job: str = "",
    job_folder: str = "",
) -> LiveRun:
    """Begin to store a run.

    Args:
        request: the cell.
        header: the line of the magic, or of the program.
        cells: all cells of the cluster, including this one, in percent format.
        workers: the workers that run the cell.
        settings: the folder and the number of stored runs.
        seed: the seed of the workers.
        program: file name of the exported program that has the cell; empty in a notebook.
        job: id of the submitted job that runs the program; else empty.
        job_folder: folder of this job.

    Returns:
        The run. It is not stored if telemetry is off, or if its directory cannot be created.
    """
    began = time.time()
    kind: RunKind = "step" if request.step is not None else ""
    versions = dict(
        sorted({k: v for worker in workers for k, v in worker.versions.items()}.items())
    )
    asked = this_request()
    state = RunState(
        id=new_id(began),
        number=request.number,
        label=request.label,
        header=header,
        name=request.options.name or run_name(request.label, kind, began, program),
        kind=kind,
        strategy=request.strategy,
        framework=", ".join(f"{k} {v}" for k, v in versions.items() if k != "python"),
        status="running",
        began=began,
        workers=tuple(map(_run_worker, workers)),
        versions=versions,
        writer=this_process(),
        stoppable=request.step is not None and not program,
        program=program,
        job=job,
        job_folder=job_folder,
        request=asked.id,
        cell=asked.cell,
        seed=seed,
        cell_seed=request.options.seed,
        hyperparameters=hyperparameters(request),
        notebook=notebook_path(),
        signal_steps=0 if request.options.watch is None else SIGNAL_STEPS,
    )
    if not settings.telemetry:
        reason = "this run is not stored: telemetry is off (the setting NBDIST_TELEMETRY)"
        return NullRun(reason, replace(state, id=""))
    try:
        directory = RunDirectory.create(
            settings.runs_path, state, "\n\n".join(cells), settings.media_bytes
        )
    except OSError as error:
        return NullRun(f"this run is not stored: {error}", replace(state, id=""))
    return StoredLiveRun(
        directory,
        settings.kept_runs,
        data_step(request),
        alert_command=settings.alert_command,
    )


def data_step(request: CellRequest) -> StepOptions | None:
    """Return the options of a step cell; None for other cells."""
    return request.step.options if request.step is not None else None


def shown(run: LiveRun, settings: Settings) -> RunView:
    """Return the view of the run in the cell's output."""
    path = settings.runs_path / run.id  # not checked: it may have been deleted meanwhile
    return RunView(run_surface(run.id, lambda: Tail(StoredRun(path)), settings.view))


def _run_worker(worker: WorkerState) -> RunWorker:
    return RunWorker(
        rank=worker.rank,
        host=worker.host,
        pid=worker.pid,
        devices=formatting.devices(worker.devices),
    )
