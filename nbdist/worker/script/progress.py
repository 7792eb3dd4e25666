"""Output of an exported program: epochs and remarks as lines, and the values of all steps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nbdist.records import PLACE, Metrics, Note, StepBegun, Stopping

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import AnyEvent, Columns
    from nbdist.worker.runtime.rank_reporter import Recipient


class Progress:
    """Recipient of the records of a rank. Rank 0 writes lines, and each rank keeps its values.

    Args:
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        history: values that the steps reported, by name. A value that belongs to this rank alone,
            as under the mirrored strategy, is that of its replicas.
        on_stopping: takes the last step that this rank may begin when the program stops.
        stream: also takes the records, for the run of the program; None if it stores none.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.history: dict[str, list[float]] = {}
        self.on_stopping: Callable[[Stopping], None] = lambda _record: None
        self.stream: Recipient | None = None
        self._rank = rank
        self._world_size = world_size

    def begin(self) -> None:
        """Begin a run: forget the values of the run before."""
        self.history = {}

    def send(self, record: AnyEvent, *, urgent: bool = False) -> None:
        if self.stream is not None:
            self.stream.send(record, urgent=urgent)
        if isinstance(record, Stopping):
            self.on_stopping(record)
        if self._rank:
            return
        if isinstance(record, Note):
            _write(f"nbdist: {record.text}")
        elif isinstance(record, StepBegun):
            count = f"{record.replicas} replica{'s' * (record.replicas > 1)}"
            _write(f"nbdist: {record.batch} samples a batch on {count}, {record.sharding}")
        elif isinstance(record, Metrics):
            self._write_metrics(record)

    def report(self, cell: int, columns: Columns, row: tuple[float, ...]) -> None:
        if self.stream is not None:
            self.stream.report(cell, columns, row)
        names = *columns.own, *columns.shared
        places = len(PLACE) - 1 + len(columns.measures)  # a row begins without the rank
        for name, value in zip(names, row[places:], strict=True):
            self.history.setdefault(name, []).append(value)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()
        sys.stdout.flush()

    def recent(self) -> list[bytes]:
        self.flush()
        return []  # a program that is started again stores a run of its own

    def close(self) -> None:
        sys.stdout.flush()

    def _write_metrics(self, record: Metrics) -> None:
        own = {name: value for name, value in record.own.items() if name not in record.shared}
        words = [f"{name} {value:.6g}" for name, value in {**own, **record.shared}.items()]
        head = f"epoch {record.epoch}" if record.epoch >= 0 else "report"
        beside = " (rank 0)" if own and self._world_size > 1 else ""
        _write("  ".join([head, *words]) + beside)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
