"""Reports that were heard before: a rank that loses its connection says its last ones again."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nbdist.records import PLACE, Metrics, Rows
from nbdist.telemetry.tables import FLOAT_BYTES, as_rows

if TYPE_CHECKING:
    from nbdist.records import AnyEvent, Columns

_TIME = PLACE.index("time_s")


class _Source(NamedTuple):
    """Whose times never go back: an epoch's report may come after rows of later steps."""

    rank: int
    columns: Columns
    of_steps: bool


class Repeats:
    """Lets through what is new, in each rank's own order."""

    def __init__(self) -> None:
        self._heard: dict[_Source, float] = {}

    def note(self, rows: Rows) -> None:
        """Rows of one rank that are kept, all of steps or all of epochs; at least one."""
        last = rows.last()
        self._heard[_Source(last.rank, rows.columns, last.step >= 0)] = last.time_s

    def fresh(self, record: AnyEvent) -> AnyEvent | None:
        """What of it is new; None where nothing is."""
        if not isinstance(record, Rows | Metrics):
            return record
        rows = as_rows(record)
        source = _Source(record.rank, rows.columns, isinstance(record, Rows))
        values = self._beyond(rows, self._heard.get(source, -1.0))
        if not values:
            return record if isinstance(record, Rows) and not rows.values else None
        row_bytes = FLOAT_BYTES * len(rows.columns.names)
        self._heard[source] = _time(values, len(values) - row_bytes)
        if isinstance(record, Rows) and len(values) < len(record.values):
            return msgspec.structs.replace(record, values=values, dropped=0)
        return record

    def _beyond(self, rows: Rows, time_s: float) -> bytes:
        """The rows that are later."""
        row_bytes = FLOAT_BYTES * len(rows.columns.names)
        start = 0
        while start < len(rows.values) and _time(rows.values, start) <= time_s:
            start += row_bytes
        return rows.values[start:]


def _time(values: bytes, offset: int) -> float:
    (seconds,) = struct.unpack_from("<d", values, offset + FLOAT_BYTES * _TIME)
    return float(seconds)
