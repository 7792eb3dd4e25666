"""A run while it is under way: what is kept of it, what is worth saying of it, and its Stop."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from nbdist.execution.null_run import NullRun
from nbdist.records import (
    CellEnded,
    Compiled,
    Finding,
    FitBegun,
    Metrics,
    Note,
    Planned,
    Rows,
    RunState,
    RunWorker,
    StepBegun,
)
from nbdist.telemetry.diagnostics import Diagnostics
from nbdist.telemetry.frontend_request import this_request
from nbdist.telemetry.plan_check import PlanComparison
from nbdist.telemetry.run_reader import StoredRun, prune
from nbdist.telemetry.run_writer import EVENTS_FOLDER, RunDirectory, new_id
from nbdist.telemetry.tail import Tail
from nbdist.telemetry.worker_table import Roster
from nbdist.utils.processes import this_process
from nbdist.utils.signals import interrupt_held
from nbdist.views import formatting
from nbdist.views.run.display_choice import run_surface
from nbdist.views.run.live_display import RunView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.records import (
        AnyEvent,
        CellRequest,
        FindingTopic,
        RecoveryRecord,
        RunStatus,
        WorkerState,
    )
    from nbdist.settings import Settings

FLUSH_INTERVAL_S = 0.05
STATE_INTERVAL_S = 0.5
LOOKING = 0.005
"""Of a core, what looking for findings takes at most: of many ranks it is done less often."""

_NOTED = {"batch", "checkpoint", "compiled", "nan", "strategy"}
"""Topics of findings that ranks have told, which nobody finds again."""


class LiveRun(Protocol):
    """A run that is under way. `hear` is called on the receiver's thread.

    Attributes:
        id: names it; empty where it is not kept.
    """

    id: str

    def placed(self, request: CellRequest) -> CellRequest:
        """The cell, told where the ranks' own files go."""
        ...

    def hear(self, record: AnyEvent) -> None:
        """Take in what a rank says in this cell."""
        ...

    def tick(self) -> tuple[str, ...]:
        """What was heard reaches who watches; to be called many times a second.

        Returns:
            What the user should know now, line by line; each is said once.
        """
        ...

    def stops_requested(self) -> int:
        """How often somebody who watches has asked for its end."""
        ...

    def stopping(self) -> None:
        """Its end has been asked of the ranks."""
        ...

    def lost(self, ranks: Iterable[int]) -> None:
        """These ranks died."""
        ...

    def recovering(self, reason: str) -> None:
        """Ranks are being replaced, for this reason; nothing is heard meanwhile."""
        ...

    def recovered(self, recovery: RecoveryRecord, pids: Mapping[int, int]) -> None:
        """They were, and the run goes on; `pids` are all ranks' now."""
        ...

    def show(self, text: str) -> None:
        """Keep what the cell shows as text, for those who come later; also after the end."""
        ...

    def close(self) -> None:
        """The cell shows nothing more. May be called more than once."""
        ...

    def leave(self) -> None:
        """It goes on, and another process keeps it."""
        ...

    def end(self, status: RunStatus, error: str = "") -> tuple[str, ...]:
        """It is over.

        Returns:
            What the user should know of how it was kept, line by line.
        """
        ...


class StoredLiveRun:
    """A run in a directory of its own. What goes wrong with the disk is said, and stops nothing.

    Args:
        directory: where it is kept.
        kept_runs: how many runs are kept; the oldest ones go at the end of this.
        reported: there are reports of it: it was opened again.
    """

    def __init__(self, directory: RunDirectory, kept_runs: int, *, reported: bool = False) -> None:
        self.id = directory.state.id
        self._directory = directory
        self._kept_runs = kept_runs
        self._lock = threading.Lock()
        self._roster = Roster(directory.state.workers)
        self._changes: dict[str, object] = {}
        resumed = directory.state.findings
        self._notes = {finding.text: finding for finding in resumed if finding.topic in _NOTED}
        self._diagnostics = self._new_diagnostics(directory.state.batch)
        self._found: tuple[Finding, ...] = ()
        self._plan_comparison = PlanComparison(directory.state.plan)
        self._look_at = 0.0
        self._said: set[FindingTopic] = set()
        self._reported = reported
        self._is_recovering = False
        self._left = False
        self._shown: list[str] = []
        self._dropped = 0
        self._flushed_at = self._updated_at = 0.0

    def placed(self, request: CellRequest) -> CellRequest:
        """Traces go where TensorBoard looks for them, one folder for each rank."""
        if request.step is None or not request.step.options.profile:
            return request
        folder = str(self._directory.path / EVENTS_FOLDER)
        step = msgspec.structs.replace(request.step.options, profile_folder=folder)
        return request.with_options(step=step)

    def _new_diagnostics(self, batch: int) -> Diagnostics:
        host_of = {worker.rank: worker.host for worker in self._roster.workers}
        return Diagnostics(host_of, self._directory.state.strategy, batch)

    def hear(self, record: AnyEvent) -> None:
        self._directory.take(record)
        if isinstance(record, Rows):
            self._diagnostics.take(record)
            self._reported = True
            self._dropped += record.dropped
        else:
            with self._lock:
                self._note(record)

    def _note(self, record: AnyEvent) -> None:
        if isinstance(record, StepBegun):
            if "batch" not in self._changes and not self._directory.state.batch:
                self._diagnostics = self._new_diagnostics(record.batch)  # all ranks say the same
            self._change(
                replicas=record.replicas,
                batch=record.batch,
                samples=record.samples,
                epochs=record.epochs,
                steps=record.steps,
                split=record.sharding,
            )
        elif isinstance(record, (Planned, Compiled)):
            self._plan_comparison.note(record)
            if isinstance(record, Planned):
                self._directory.plan(record.plan)
        elif isinstance(record, FitBegun):
            self._change(epochs=record.epochs, steps=record.steps)
        elif isinstance(record, Metrics):
            self._reported = True
        elif isinstance(record, Note):
            finding = Finding(topic=record.topic, text=record.text, warning=record.warning)
            self._notes[record.text] = finding
        elif isinstance(record, CellEnded):
            self._roster.ended(record)

    def _change(self, **changes: object) -> None:
        self._reported = True
        self._changes |= changes

    def tick(self) -> tuple[str, ...]:
        now = time.monotonic()
        if not self._is_recovering and now - self._flushed_at >= FLUSH_INTERVAL_S:
            self._flush()
            self._flushed_at = now
        if now - self._updated_at < STATE_INTERVAL_S:
            return ()
        self._updated_at = now
        if now >= self._look_at:
            self._look(now)
        self._update(self._found)
        fresh = [finding for finding in self._found if finding.topic not in self._said]
        self._said.update(finding.topic for finding in fresh)
        return tuple(finding.text for finding in fresh)

    def _look(self, now: float) -> None:
        began = time.thread_time()
        self._found = self._diagnostics.findings()
        self._look_at = now + (time.thread_time() - began) / LOOKING

    def _update(self, found: tuple[Finding, ...]) -> None:
        """Write the state where it has changed."""
        with self._lock:
            changes, self._changes = self._changes, {}
            changes["workers"] = self._roster.workers
            changes["findings"] = (*found, *self._notes.values(), *self._losses())
            changes["plan"] = self._plan_comparison.check(self._diagnostics.pace)
        state = self._directory.state
        changed = any(getattr(state, name) != value for name, value in changes.items())
        if changed or self._directory.is_stale:
            self._directory.update(**changes)

    def _losses(self) -> tuple[Finding, ...]:
        """What of the reports is not in the directory."""
        losses = []
        if self._dropped:
            rows = formatting.count(self._dropped, "report")
            text = f"{rows} found no room on the way to the notebook and are lost"
            losses.append(Finding(topic="dropped", text=text, value=self._dropped))
        if self._directory.fault:
            losses.append(Finding(topic="disk", text=self._directory.fault))
        return tuple(losses)

    def stops_requested(self) -> int:
        return self._directory.stops_requested()

    def stopping(self) -> None:
        with self._lock:
            self._changes["status"] = "stopping"
        self._update(self._diagnostics.findings())

    def lost(self, ranks: Iterable[int]) -> None:
        with self._lock:
            self._roster.lost(ranks)

    def recovering(self, reason: str) -> None:
        """Rows that are taken from now on stay here until `recovered` says which ones they replace.

        Those before are needed by whoever goes on with a recovery that this process does not end.
        """
        self._flush()
        self._is_recovering = True
        self._diagnostics.forget()
        with self._lock:
            self._change(recovering=reason)
        self._update(self._found)

    def recovered(self, recovery: RecoveryRecord, pids: Mapping[int, int]) -> None:
        with self._lock:
            self._roster.replaced(pids)
            self._change(recoveries=(*self._directory.state.recoveries, recovery), recovering="")
        self._update(self._found)
        self._is_recovering = False

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
        told = self._directory.fault
        self._flush_shown()
        if not self._reported:
            self._directory.discard()
        elif self._directory.fault != told:
            self._update(self._diagnostics.findings())

    def leave(self) -> None:
        self._left = True
        self._flush_shown()
        self._directory.close()
        self._update(self._diagnostics.findings())

    def end(self, status: RunStatus, error: str = "") -> tuple[str, ...]:
        if not self._reported:
            return ()
        self._flush_shown()
        self._directory.close()
        with self._lock:
            self._changes |= {
                "status": status,
                "error": error,
                "ended": time.time(),
                "recovering": "",
            }
        self._update(self._diagnostics.findings())
        gone = prune(self._directory.path.parent, self._kept_runs, spared=self.id)
        removed = f"removed {formatting.count(len(gone), 'old run')}, keeping "
        kept = f"{removed}{self._kept_runs} (the setting NBDIST_KEPT_RUNS)"
        return (*(loss.text for loss in self._losses()), *((kept,) if gone else ()))


@contextlib.contextmanager
def begun(
    request: CellRequest,
    header: str,
    cells: Sequence[str],
    workers: Sequence[WorkerState],
    settings: Settings,
    seed: int | None = None,
) -> Iterator[LiveRun]:
    """What `begin` begins; of a run that nobody comes to follow nothing is left."""
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
) -> LiveRun:
    """Begin to keep a cell.

    Args:
        request: the cell.
        header: the magic's line.
        cells: all cells of the cluster so far, this one too, each in percent format.
        workers: those that run it.
        settings: where runs are kept, and how many.
        seed: that the workers started with.
    """
    began = time.time()
    versions = dict(
        sorted({k: v for worker in workers for k, v in worker.versions.items()}.items())
    )
    asked = this_request()
    state = RunState(
        id=new_id(began),
        number=request.number,
        label=request.label,
        header=header,
        strategy=request.strategy,
        framework=", ".join(f"{k} {v}" for k, v in versions.items() if k != "python"),
        status="running",
        began=began,
        workers=tuple(map(_run_worker, workers)),
        versions=versions,
        writer=this_process(),
        stoppable=request.step is not None,
        request=asked.id,
        cell=asked.cell,
        seed=seed,
        cell_seed=request.options.seed,
    )
    try:
        directory = RunDirectory.create(settings.runs_path, state, "\n\n".join(cells))
    except OSError as error:
        return NullRun(f"this run is not kept: {error}")
    return StoredLiveRun(directory, settings.kept_runs)


def shown(run: LiveRun, settings: Settings) -> RunView:
    """What shows the run in the cell's output."""
    path = settings.runs_path / run.id  # not looked for: it may have been deleted meanwhile
    return RunView(run_surface(run.id, lambda: Tail(StoredRun(path)), settings.view))


def _run_worker(worker: WorkerState) -> RunWorker:
    return RunWorker(
        rank=worker.rank,
        host=worker.host,
        pid=worker.pid,
        devices=formatting.devices(worker.devices),
    )
