"""Overlapping operations of devices as times that add up."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.worker.profiling.trace import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.worker.profiling.trace import Span


def own_seconds(spans: Sequence[Span]) -> list[float]:
    """Of each span the seconds that are its own, so that a device's add up to what they cover.

    Where several overlap on a device, the time is that of the first kind in `KINDS`, as in
    `traces.attributed`; of one kind it is that of the one which began last, the inmost.
    """
    by_device: dict[int, list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        by_device[span.device].append(index)
    own = [0.0] * len(spans)
    for indices in by_device.values():
        _share(spans, indices, own)
    return own


def _share(spans: Sequence[Span], indices: list[int], own: list[float]) -> None:
    """Go through the moments at which a span of a device begins or ends."""
    begins = sorted(indices, key=lambda index: spans[index].begin_s)
    moments = sorted({t for i in indices for t in (spans[i].begin_s, spans[i].end_s)})
    active: list[tuple[int, float, int]] = []
    waiting = iter((*begins, -1))
    following = next(waiting)
    for now, then in itertools.pairwise(moments):
        while following >= 0 and spans[following].begin_s <= now:
            span = spans[following]
            heapq.heappush(active, (KINDS.index(span.kind), -span.begin_s, following))
            following = next(waiting)
        while active and spans[active[0][2]].end_s <= now:
            heapq.heappop(active)
        if active:
            own[active[0][2]] += then - now
