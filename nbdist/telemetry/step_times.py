"""Recent times of the ranks' steps, from their reports."""

from __future__ import annotations

import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import PLACE

if TYPE_CHECKING:
    from nbdist.records import Columns, Rows


KEPT_ROWS = 100
"""Number of rows of a table that are kept, if so many were received."""

KEPT_MESSAGES = 2
"""Number of messages that are kept.

With short steps, one message contains more than `KEPT_ROWS` rows. The last messages of two ranks
may then have no step in common.
"""

LONGEST_ROWS = 400
"""Number of rows kept of a long message, for example one that was delayed."""

_TIMES = ("step_s", "input_s", "collective_s")
_EPOCH, _STEP, _AT = PLACE.index("epoch"), PLACE.index("step"), PLACE.index("time_s")

Place = tuple[float, float]
"""Epoch and step."""


MOST_S = 1e10
"""Upper limit of a valid time in seconds."""


class Times(msgspec.Struct):
    """Recent seconds of a rank per step, for each measure with a report.

    Attributes:
        at_s: seconds from the start of the run to the last row.
    """

    step_s: dict[Place, float]
    input_s: dict[Place, float]
    collective_s: dict[Place, float]
    at_s: float = 0.0


class Recent:
    """Last rows with times of every rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: dict[int, dict[Columns, _Tail]] = {}

    def take(self, rows: Rows) -> None:
        """Store the end of a message without decoding it."""
        with self._lock:
            tails = self._tails.setdefault(rows.rank, {})
            if (tail := tails.get(rows.columns)) is None:
                tail = tails[rows.columns] = _Tail(rows.columns)
            tail.add(rows.values)

    def forget(self) -> None:
        """Discard all rows."""
        with self._lock:
            self._tails.clear()

    def times(self) -> dict[int, Times]:
        """Return the times by rank. Values that are NaN, negative or above `MOST_S` are omitted."""
        with self._lock:
            kept = {r: [(t, t.data()) for t in tails.values()] for r, tails in self._tails.items()}
        return {rank: _times(tails) for rank, tails in sorted(kept.items())}


class _Tail:
    """End of one table of one rank."""

    def __init__(self, columns: Columns) -> None:
        names = columns.names
        self.measured = [(name, names.index(name)) for name in _TIMES if name in columns.measures]
        self.row = struct.Struct(f"<{len(names)}d")
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self.at_s = 0.0

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
        """Add the seconds of each measure by place. Works by column, much faster than by row."""
        columns = list(zip(*self.row.iter_unpack(data), strict=True))
        if not columns:
            return
        places = list(zip(columns[_EPOCH], columns[_STEP], strict=True))
        self.at_s = max((at_s for at_s in columns[_AT] if 0 <= at_s < MOST_S), default=0.0)
        for name, column in self.measured:
            seconds = zip(places, columns[column], strict=True)
            found[name].update([pair for pair in seconds if 0 <= pair[1] < MOST_S])


def _times(tails: list[tuple[_Tail, bytes]]) -> Times:
    found: dict[str, dict[Place, float]] = {name: {} for name in _TIMES}
    for tail, data in tails:
        tail.add_to(found, data)
    return Times(**found, at_s=max((tail.at_s for tail, _ in tails), default=0.0))
