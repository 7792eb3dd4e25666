"""A run that another process has started: its stored part, and its continuation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import UsageError
from nbdist.execution.live_run import NullRun, StoredLiveRun, data_step
from nbdist.execution.result import Run
from nbdist.execution.saved_runs import SavedRun, step_begun
from nbdist.records import PLACE, FitBegun, Rows, StepBegun
from nbdist.telemetry.frontend_request import this_request
from nbdist.telemetry.run_reader import find
from nbdist.telemetry.run_writer import RunDirectory
from nbdist.utils.processes import this_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.execution.live_run import LiveRun
    from nbdist.records import RecoveryRecord, RunningCell, RunState, Table
    from nbdist.settings import Settings
    from nbdist.telemetry.run_reader import StoredRun

_STEP = PLACE.index("step")


@dataclass(frozen=True)
class ResumedRun:
    """Stored part of a run.

    Attributes:
        live: the run. This process continues to store it.
        reports: rows in their order. Each item contains steps or epochs of one rank.
        begun: the batch and the number of steps; None for a cell without steps.
        stopping: True if a stop was requested.
        age_s: time since the start of the run, in seconds.
        recoveries: the recoveries so far.
    """

    live: LiveRun
    reports: tuple[Rows, ...] = ()
    begun: StepBegun | FitBegun | None = None
    stopping: bool = False
    age_s: float = 0.0
    recoveries: tuple[RecoveryRecord, ...] = ()


def reopen(cell: RunningCell, settings: Settings) -> ResumedRun:
    """Continue to store a run.

    Args:
        cell: the cell of the run.
        settings: the number of runs to store.
    """
    if not cell.run:
        return ResumedRun(NullRun("this run is not stored"))
    try:
        run = find(Path(cell.runs), cell.run)
        state, tables = run.written_state(), run.tables()
        reported = [table for table in tables if not table.columns.system]
        reports = tuple(rows for table in reported for rows in _rows(run, table))
        asked = this_request()
        place = {"request": asked.id, "cell": asked.cell} if asked.id else {}
        directory = RunDirectory(run.path, state, tables, settings.media_bytes)
        directory.update(writer=this_process(), **place)
    except (UsageError, OSError, msgspec.DecodeError) as error:
        return ResumedRun(NullRun(f"this run is no longer stored: {error}"))
    live = StoredLiveRun(
        directory,
        settings.kept_runs,
        data_step(cell.request),
        reported=bool(reported or state.replicas),
        alert_command=settings.alert_command,
    )
    stopping, age_s = state.status == "stopping", time.time() - state.began
    return ResumedRun(live, reports, _begun(state), stopping, age_s, state.recoveries)


def _rows(run: StoredRun, table: Table) -> Iterator[Rows]:
    """Yield the rows of a table, by rank, and separately for steps and epochs."""
    array = run.array(table)
    for rank in sorted({int(rank) for rank in array[:, 0]}):
        own = array[array[:, 0] == rank]
        for chosen in (own[own[:, _STEP] >= 0], own[own[:, _STEP] < 0]):
            if len(chosen):
                yield Rows(rank=rank, cell=0, columns=table.columns, values=chosen.tobytes())


def _begun(state: RunState) -> StepBegun | FitBegun | None:
    if state.epochs and not state.replicas:
        return FitBegun(rank=0, cell=state.number, epochs=state.epochs, steps=state.steps)
    return step_begun(state)


def run_of(cell: RunningCell | None) -> Run:
    """Return the stored run of a cell that has ended."""
    if cell is None or not cell.run:
        return Run(0)
    try:
        return SavedRun(find(Path(cell.runs), cell.run)).run
    except (UsageError, OSError, msgspec.DecodeError):
        return Run(cell.request.number)
