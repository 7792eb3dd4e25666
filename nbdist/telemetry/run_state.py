"""State of an active run, computed from the records of its ranks."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from nbdist.records import (
    CellEnded,
    Compiled,
    Finding,
    FitBegun,
    Media,
    Metrics,
    Note,
    PlanCheck,
    Planned,
    Rows,
    StepBegun,
    StepFigures,
    run_name,
)
from nbdist.telemetry.diagnostics import Diagnostics, Pace
from nbdist.utils.error_text import described

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.records import (
        AnyEvent,
        Plan,
        RankStatus,
        RunKind,
        RunState,
        RunWorker,
        StepOptions,
    )

_LOOK_SHARE = 0.005
"""The largest share of a core for diagnostics. With many ranks, they run less often."""

_NOTED = {"batch", "checkpoint", "compiled", "media", "nan", "strategy", "watch"}
"""Topics of findings that ranks report, which diagnostics do not find again."""

_STATUS: dict[str, RankStatus] = {"ok": "finished", "error": "failed", "interrupted": "interrupted"}


class RunChanges:
    """Changes of a run's state that are not written yet. Thread-safe.

    Args:
        state: state of the run.
        reported: True if the run already has reports.

    Attributes:
        reported: True if the run has reports, so that its directory is kept.
        dropped: number of rows that engines have dropped.
    """

    def __init__(self, state: RunState, *, reported: bool) -> None:
        self.reported = reported
        self.dropped = 0
        self._lock = threading.Lock()
        self._workers = Roster(state.workers)
        self._plan = PlanComparison(state.plan)
        self._hyperparameters = state.hyperparameters
        self._notes = {note.text: note for note in state.findings if note.topic in _NOTED}
        self._changes: dict[str, object] = {}
        self._is_step = state.kind == "step"
        self._is_program = bool(state.program)
        self._default_name = partial(
            run_name, state.label, began=state.began, program=state.program
        )
        self._is_named = state.name != self._default_name(state.kind)

    def receive(self, record: AnyEvent) -> None:
        """Store the changes from a record."""
        with self._lock:
            if isinstance(record, Rows | Metrics | Media):
                self.reported = True
                self.dropped += record.dropped if isinstance(record, Rows) else 0
            elif isinstance(record, StepBegun):
                self._change(
                    kind="step" if self._is_step else "loop",
                    replicas=record.replicas,
                    batch=record.batch,
                    samples=record.samples,
                    epochs=record.epochs,
                    steps=record.steps,
                    split=record.sharding,
                )
                self._add(record.hyperparameters)
            elif isinstance(record, FitBegun):
                self._change(
                    kind="fit", epochs=record.epochs, steps=record.steps, split=record.sharding
                )
                self._add(record.hyperparameters)
            elif isinstance(record, (Planned, Compiled)):
                self._plan.note(record)
            elif isinstance(record, Note):
                finding = Finding(topic=record.topic, text=record.text, warning=record.warning)
                self._notes[record.text] = finding
            elif isinstance(record, CellEnded):
                self._workers.ended(record)

    def change(self, **changes: object) -> None:
        """Change fields of the state."""
        with self._lock:
            self._changes |= changes

    def lost(self, ranks: Iterable[int]) -> None:
        """Mark ranks as dead."""
        with self._lock:
            self._workers.lost(ranks)

    def replaced(self, pids: Mapping[int, int]) -> None:
        """Mark ranks as running in these processes, and the others as dead."""
        with self._lock:
            self._workers.replaced(pids)

    def take(
        self, found: Iterable[Finding], losses: Iterable[Finding], pace: Pace
    ) -> dict[str, object]:
        """Return the fields to write.

        Args:
            found: the findings of diagnostics.
            losses: reports that are not stored.
            pace: the pace of the last steps.
        """
        with self._lock:
            changes, self._changes = self._changes, {}
            changes["workers"] = self._workers.workers
            changes["findings"] = (*found, *self._notes.values(), *losses)
            changes["plan"] = self._plan.check(pace)
        return changes

    def _change(self, kind: RunKind, **changes: object) -> None:
        self.reported = True
        self._changes["kind"] = kind
        self._changes["stoppable"] = not self._is_program
        if not self._is_named:
            self._changes["name"] = self._default_name(kind)
        self._changes |= changes

    def _add(self, hyperparameters: Mapping[str, float | str]) -> None:
        self._hyperparameters = {**self._hyperparameters, **hyperparameters}
        self._changes["hyperparameters"] = self._hyperparameters


class RunFindings:
    """Diagnostics of a run, computed at a bounded share of CPU time.

    Args:
        state: state of the run.
        step: options of a step cell; None for other cells.

    Attributes:
        found: findings of the last computation.
    """

    def __init__(self, state: RunState, step: StepOptions | None = None) -> None:
        self.found: tuple[Finding, ...] = ()
        self._host_of = {worker.rank: worker.host for worker in state.workers}
        self._strategy = state.strategy
        self._batch = state.batch
        self._step = step
        self._diagnostics = self._new()
        self._look_at = 0.0

    @property
    def pace(self) -> Pace:
        """The pace of the last steps."""
        return self._diagnostics.pace

    def receive(self, record: AnyEvent) -> None:
        """Store the times of steps."""
        if isinstance(record, Rows):
            self._diagnostics.take(record)
        elif isinstance(record, StepBegun) and not self._batch:  # equal on all ranks
            self._batch = record.batch
            self._diagnostics = self._new()

    def _new(self) -> Diagnostics:
        return Diagnostics(self._host_of, self._strategy, self._batch, self._step)

    def forget(self) -> None:
        """Discard the times of steps, because the ranks restart."""
        self._diagnostics.forget()

    def look(self) -> None:
        """Compute the findings."""
        self.found = self._diagnostics.findings()

    def look_if_due(self, now: float) -> None:
        """Compute the findings, unless the last computation is too recent.

        Args:
            now: current time of `time.monotonic`.
        """
        if now >= self._look_at:
            began = time.thread_time()
            self.look()
            self._look_at = now + (time.thread_time() - began) / _LOOK_SHARE

    def summary(self) -> tuple[str, ...]:
        """Return the first finding in one line, for the end of the run. Empty without findings."""
        return tuple(finding.text for finding in self.found[:1])


class Roster:
    """Ranks of one run. Not thread-safe.

    Args:
        workers: ranks at the start of the run.
    """

    def __init__(self, workers: Iterable[RunWorker]) -> None:
        self._workers = {worker.rank: worker for worker in workers}

    @property
    def workers(self) -> tuple[RunWorker, ...]:
        """Current state of each rank."""
        return tuple(self._workers.values())

    def ended(self, record: CellEnded) -> None:
        """Store the end of the cell on a rank."""
        failed = record.failure if record.status == "error" else None
        error = described(failed.ename, failed.evalue) if failed else ""
        self._set(record.rank, status=_STATUS[record.status], said=error)

    def lost(self, ranks: Iterable[int]) -> None:
        """Mark ranks as dead."""
        for rank in ranks:
            self._set(rank, status="dead")

    def replaced(self, pids: Mapping[int, int]) -> None:
        """Mark ranks as running in these processes, and the others as dead."""
        for rank in self._workers:
            if rank in pids:
                self._set(rank, status="running", said="", pid=pids[rank])
            else:
                self._set(rank, status="dead")

    def _set(self, rank: int, **changes: object) -> None:
        self._workers[rank] = msgspec.structs.replace(self._workers[rank], **changes)


class PlanComparison:
    """Planned figures of a step next to the measured ones.

    Args:
        stored: figures that another process has stored.
    """

    def __init__(self, stored: PlanCheck | None) -> None:
        self._check = stored

    def note(self, record: Planned | Compiled) -> None:
        """Store the plan and its first executable. Later executables are of other batches."""
        if isinstance(record, Planned):
            self._check = None if record.only else _of_plan(record.plan)
        elif record.arguments and self._check and self._check.measured.arguments is None:
            memory = record.arguments + record.temporaries
            self._measure(arguments=record.arguments, memory=memory)

    def check(self, pace: Pace) -> PlanCheck | None:
        """Return the figures. None if there is no plan.

        Args:
            pace: pace of the last steps. Its missing figures stay unchanged.
        """
        if pace.step_s is not None:
            self._measure(step_s=pace.step_s)
        if pace.collectives is not None:
            self._measure(collectives=pace.collectives)
        return self._check

    def _measure(self, **figures: float) -> None:
        if self._check is not None:
            self._check = replace(self._check, measured=replace(self._check.measured, **figures))


def _of_plan(plan: Plan) -> PlanCheck:
    time, memory = plan.time, plan.memory
    planned = StepFigures(
        step_s=time.step,
        collectives=time.exposed / time.step if time.step else 0.0,
        arguments=memory.arguments,
        memory=memory.needed,
    )
    return PlanCheck(title=plan.title, planned=planned, measured=StepFigures())
