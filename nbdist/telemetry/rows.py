"""Rows of reports as reports, one by one."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from nbdist.records import PLACE, Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Rows


def unpacked(rows: Rows) -> Iterator[Metrics]:
    """Every row's metrics; what nbdist measured is left out."""
    columns = rows.columns
    first_own = len(PLACE) + len(columns.measures)
    first_shared = first_own + len(columns.own)
    for values in struct.iter_unpack(f"<{len(columns.names)}d", rows.values):
        rank, epoch, step, time_s = values[: len(PLACE)]
        yield Metrics(
            rank=int(rank),
            cell=rows.cell,
            epoch=int(epoch),
            step=int(step),
            time_s=time_s,
            own=dict(zip(columns.own, values[first_own:first_shared], strict=True)),
            shared=dict(zip(columns.shared, values[first_shared:], strict=True)),
        )
