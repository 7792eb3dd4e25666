"""Reports of steps, gathered into rows until the probe sends them."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

from nbdist.records import PLACE, Columns, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.runtime.memory import MemoryGauge

ROOM_ROWS = 100_000
"""Rows of a rank that may wait for a notebook that does not take them in; further ones are lost."""


class _Sheet:
    def __init__(self) -> None:
        self.values = array("d")
        self.dropped = 0


class Sheets:
    """The rows of one rank that have not been sent. For any thread.

    Args:
        rank: whose rows they are.
        gauge: measures the memory, for a row of its own beside the others.
    """

    def __init__(self, rank: int, gauge: MemoryGauge) -> None:
        self._rank = rank
        self._gauge = gauge
        self._lock = threading.Lock()
        self._open: dict[tuple[int, Columns], _Sheet] = {}
        self._rows = 0

    def add(self, cell: int, columns: Columns, row: tuple[float, ...]) -> bool:
        """Keep a row, or count it as dropped; never waits.

        Args:
            cell: the cell's number.
            columns: what the row holds.
            row: as long as `columns.names`, without the rank.

        Returns:
            Whether nothing was waiting to be sent before.
        """
        key = cell, columns
        with self._lock:
            if (sheet := self._open.get(key)) is None:
                sheet = self._open[key] = _Sheet()
            if self._rows >= ROOM_ROWS:
                sheet.dropped += 1
                return False
            sheet.values.append(self._rank)
            sheet.values.extend(row)
            self._rows += 1
            return self._rows == 1

    def __bool__(self) -> bool:
        return self._rows > 0

    def take(self) -> Iterator[Rows]:
        """All rows, which are forgotten here, and now and then one of the memory."""
        with self._lock:
            taken, self._open = self._open, {}
            self._rows = 0
        for (cell, columns), sheet in taken.items():
            yield Rows(
                rank=self._rank,
                cell=cell,
                columns=columns,
                values=sheet.values.tobytes(),
                dropped=sheet.dropped,
            )
        if taken and self._gauge.is_due():
            (cell, columns), sheet = next(iter(taken.items()))
            last = sheet.values[-len(columns.names) :][: len(PLACE)]
            yield self._memory(cell, last)

    def _memory(self, cell: int, place: array[float]) -> Rows:
        measured = self._gauge.read()
        values = array("d", [*place, *measured.values()])
        columns = Columns(measures=tuple(measured))
        return Rows(rank=self._rank, cell=cell, columns=columns, values=values.tobytes())
