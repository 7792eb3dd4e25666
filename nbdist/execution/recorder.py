"""Recorder of a run: it collects the records of the ranks into the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.execution.batches import Batches
from nbdist.execution.result import Run
from nbdist.records import (
    Checked,
    Compiled,
    Display,
    FitBegun,
    Metrics,
    Note,
    Opened,
    Planned,
    Rows,
    StepBegun,
)

if TYPE_CHECKING:
    from nbdist.records import AnyEvent, Plan, RecoveryRecord


_MOST_EARLY = 64
"""Largest number of tables that wait for the record that a training loop has begun.

A rank may report its first steps before the first rank reports the beginning.
"""


class Recorder:
    """Builder of a `Run` from records.

    Args:
        number: the number of the cell.
        is_step: True for a step cell. The history then contains its steps, and not only epochs. The
            history of a training loop also contains its steps.

    Attributes:
        opened: the names that the checkpoint contains; None before the first save.
        begun: the batch and the replicas of a step cell, or of a training loop.
    """

    def __init__(self, number: int, *, is_step: bool) -> None:
        self.opened: Opened | None = None
        self.begun: StepBegun | None = None
        self._number = number
        self._is_step = is_step
        self._reports: list[Metrics | Rows] = []
        self._early: list[Rows] = []
        self._batches = Batches()
        self._is_fit = False
        self._results: dict[int, str] = {}
        self._checked: Checked | None = None
        self._plan: Plan | None = None
        self._compiled: Compiled | None = None
        self._notes: list[Note] = []
        self._recoveries: list[RecoveryRecord] = []

    def keep(self, record: AnyEvent) -> None:
        """Add a record to the result. Records of other types are ignored."""
        if isinstance(record, Metrics):
            self._reports.append(record)
        elif isinstance(record, Rows):
            self._keep_rows(record)
        elif isinstance(record, Display) and record.result:
            self._results[record.rank] = str(record.data.get("text/plain", ""))
        elif isinstance(record, StepBegun):
            self.begun = record
            self._reports += self._early
            self._early = []
        elif isinstance(record, FitBegun):
            self._is_fit = True
            for rows in self._early:
                self._batches.add(rows)
            self._early = []
        elif isinstance(record, Opened):
            self.opened = record
        else:
            self._keep_remark(record)

    def _keep_remark(self, record: AnyEvent) -> None:
        if isinstance(record, Checked):
            self._checked = record
        elif isinstance(record, Planned):
            self._plan = record.plan
        elif isinstance(record, Compiled):
            self._compiled = self._compiled or record
        elif isinstance(record, Note):
            self._notes.append(record)

    def _keep_rows(self, rows: Rows) -> None:
        is_step = self._is_step or self.begun is not None
        if rows.values and rows.columns.counts(is_step):
            self._reports.append(rows)
        elif rows.values and rows.columns.counts(is_step=True):
            if self._is_fit:
                self._batches.add(rows)
            elif len(self._early) < _MOST_EARLY:
                self._early.append(rows)

    def recovered(self, recovery: RecoveryRecord) -> None:
        """Add a recovery. Earlier reports of steps after `recovery.step` are superseded."""
        self._recoveries.append(recovery)

    def run(self) -> Run:
        """Return the result so far."""
        return Run(
            self._number,
            tuple(self._reports),
            dict(self._results),
            self.begun,
            self._checked,
            tuple(self._notes),
            tuple(self._recoveries),
            self._plan,
            self._compiled,
            self._batches.all(),
        )
