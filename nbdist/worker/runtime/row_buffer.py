"""Reports of steps, collected into rows until the reporter sends them."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

from nbdist.records import PLACE, Columns, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.runtime.memory import MemoryGauge

ROOM_ROWS = 100_000
"""Most rows of a rank that may wait to be sent; further rows are dropped."""


class _TableBuffer:
    def __init__(self) -> None:
        self.values = array("d")
        self.dropped = 0


class RowBuffer:
    """Rows of one rank that have not been sent. Thread-safe.

    Args:
        rank: rank of the rows.
        gauge: measures the memory, for rows of its own.
    """

    def __init__(self, rank: int, gauge: MemoryGauge) -> None:
        self._rank = rank
        self._gauge = gauge
        self._lock = threading.Lock()
        self._open: dict[tuple[int, Columns], _TableBuffer] = {}
        self._rows = 0

    def add(self, cell: int, columns: Columns, row: tuple[float, ...]) -> bool:
        """Store a row, or count it as dropped if it contains metrics; never waits.

        Args:
            cell: number of the cell.
            columns: columns of the row.
            row: values, as many as `columns.names` without the rank.

        Returns:
            True if the buffer was empty before.
        """
        key = cell, columns
        with self._lock:
            if (table_buffer := self._open.get(key)) is None:
                table_buffer = self._open[key] = _TableBuffer()
            if self._rows >= ROOM_ROWS:
                table_buffer.dropped += bool(columns.own or columns.shared)
                return False
            table_buffer.values.append(self._rank)
            table_buffer.values.extend(row)
            self._rows += 1
            return self._rows == 1

    def __bool__(self) -> bool:
        return self._rows > 0

    def take(self) -> Iterator[Rows]:
        """Remove and yield all rows and, when a measurement is due, one row of the memory."""
        with self._lock:
            taken, self._open = self._open, {}
            self._rows = 0
        for (cell, columns), table_buffer in taken.items():
            yield Rows(
                rank=self._rank,
                cell=cell,
                columns=columns,
                values=table_buffer.values.tobytes(),
                dropped=table_buffer.dropped,
            )
        if taken and self._gauge.is_due():
            (cell, columns), table_buffer = next(iter(taken.items()))
            last = table_buffer.values[-len(columns.names) :][: len(PLACE)]
            yield self._memory(cell, last)

    def _memory(self, cell: int, place: array[float]) -> Rows:
        measured = self._gauge.read()
        values = array("d", [*place, *measured.values()])
        columns = Columns(measures=tuple(measured))
        return Rows(rank=self._rank, cell=cell, columns=columns, values=values.tobytes())
