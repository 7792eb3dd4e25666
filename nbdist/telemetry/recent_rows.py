"""The last rows of every rank: kept as they came, decoded when somebody asks."""

from __future__ import annotations

import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import PLACE

if TYPE_CHECKING:
    from nbdist.records import Columns, Rows

KEPT_ROWS = 40
"""How many rows of a table are kept at least, once there are so many."""

KEPT_MESSAGES = 2
"""Messages that are kept at least: of short steps one holds more rows than `KEPT_ROWS`, and the
last ones of two ranks need not have a step in common."""

LONGEST_ROWS = 400
"""Of a longer message, as one that had to wait, only the end is kept."""

_TIMES = ("step_s", "input_s", "collective_s")
_EPOCH, _STEP = PLACE.index("epoch"), PLACE.index("step")

Place = tuple[float, float]
"""Epoch and step."""


MOST_S = 1e10
"""What takes longer is no time that was measured."""


class Times(msgspec.Struct):
    """A rank's recent seconds by step, for every measure where it was reported."""

    step_s: dict[Place, float]
    input_s: dict[Place, float]
    collective_s: dict[Place, float]


class Recent:
    """The last rows of every rank that hold times. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: dict[int, dict[Columns, _Tail]] = {}

    def take(self, rows: Rows) -> None:
        """Keep the end of a message; nothing of it is decoded."""
        with self._lock:
            tails = self._tails.setdefault(rows.rank, {})
            if (tail := tails.get(rows.columns)) is None:
                tail = tails[rows.columns] = _Tail(rows.columns)
            tail.add(rows.values)

    def forget(self) -> None:
        """As if nothing had been taken."""
        with self._lock:
            self._tails.clear()

    def times(self) -> dict[int, Times]:
        """By rank; numbers that are no seconds (NaN, negative, or of centuries) are left out."""
        with self._lock:
            kept = {r: [(t, t.data()) for t in tails.values()] for r, tails in self._tails.items()}
        return {rank: _times(tails) for rank, tails in sorted(kept.items())}


class _Tail:
    """The end of one table of one rank."""

    def __init__(self, columns: Columns) -> None:
        names = columns.names
        self.measured = [(name, names.index(name)) for name in _TIMES if name in columns.measures]
        self.row = struct.Struct(f"<{len(names)}d")
        self._messages: deque[bytes] = deque()
        self._bytes = 0

    def add(self, values: bytes) -> None:
        if not self.measured:
            return
        whole = len(values) - len(values) % self.row.size
        end = values[max(0, whole - LONGEST_ROWS * self.row.size) : whole]
        self._messages.append(end)
        self._bytes += len(end)
        enough = KEPT_ROWS * self.row.size
        while (
            len(self._messages) > KEPT_MESSAGES and self._bytes - len(self._messages[0]) >= enough
        ):
            self._bytes -= len(self._messages.popleft())

    def data(self) -> bytes:
        return b"".join(self._messages)

    def add_to(self, found: dict[str, dict[Place, float]], data: bytes) -> None:
        """The seconds of each measure by place; by columns, which is much faster than by rows."""
        columns = list(zip(*self.row.iter_unpack(data), strict=True))
        if not columns:
            return
        places = list(zip(columns[_EPOCH], columns[_STEP], strict=True))
        for name, column in self.measured:
            seconds = zip(places, columns[column], strict=True)
            found[name].update([pair for pair in seconds if 0 <= pair[1] < MOST_S])


def _times(tails: list[tuple[_Tail, bytes]]) -> Times:
    found: dict[str, dict[Place, float]] = {name: {} for name in _TIMES}
    for tail, data in tails:
        tail.add_to(found, data)
    return Times(**found)
