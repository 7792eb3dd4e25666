"""Segments of a forward pass that the backward pass recomputes, one at a time.

The inputs of each segment are kept, and the backward pass holds one segment at a time. The best
ends of segments keep little and leave no segment long (arXiv:1604.06174, section 4.3).
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

POINTS = 128
"""Number of candidate ends: the best position in each of as many parts of the forward pass."""

LIMITS = 17
"""Number of tried segment lengths, from half of all down, each shorter by the root of two."""


def segments(waiting: Sequence[int], crossing: Sequence[int]) -> tuple[int, ...]:
    """Return the positions after which a segment ends; the last segment is not listed.

    Args:
        waiting: bytes that each position makes and the backward pass needs.
        crossing: bytes that the forward pass still needs after each position.

    Returns:
        Positions in order; empty if keeping everything takes least memory.
    """
    sums = list(accumulate(waiting))
    if not sums or not sums[-1]:
        return ()
    total, points = sums[-1], list(_points(sums, crossing))
    best: tuple[float, tuple[int, ...]] = (total, ())
    for number in range(LIMITS):
        limit = total / 2 ** (1 + number / 2)
        found = _ends(points, sums, crossing, limit)
        if found is not None:
            longest = max(b - a for a, b in pairwise([0, *(sums[p] for p in found), total]))
            best = min(best, (longest + sum(crossing[p] for p in found), found))
    return best[1]


def _points(sums: list[int], crossing: Sequence[int]) -> Iterator[int]:
    """Yield, for each part of the forward pass, the position after which least is needed."""
    parts: dict[int, int] = {}
    for place, done in enumerate(sums[:-1]):
        part = done * POINTS // sums[-1]
        if part not in parts or crossing[place] < crossing[parts[part]]:
            parts[part] = place
    yield from parts.values()


def _ends(
    points: list[int], sums: list[int], crossing: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """Return the ends that keep least with no segment above the limit; None if there are none."""
    lengths = [0, *(sums[point] for point in points), sums[-1]]
    costs = [0, *(crossing[point] for point in points), 0]
    least: list[float] = [0.0]
    previous: list[int] = [0]
    start = 0
    for place in range(1, len(lengths)):
        while lengths[place] - lengths[start] > limit and start < place:
            start += 1
        if start == place:
            return None
        before = min(range(start, place), key=least.__getitem__)
        least.append(least[before] + costs[place])
        previous.append(before)
    ends = []
    place = previous[-1]
    while place:
        ends.append(points[place - 1])
        place = previous[place]
    return tuple(reversed(ends))
