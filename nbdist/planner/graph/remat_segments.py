"""Where a forward pass is cut into stretches that the backward pass makes again, one at a time.

What goes into each stretch is kept, and in the backward pass one stretch at a time is whole: the
best cuts keep little and leave no stretch long (arXiv:1604.06174, section 4.3).
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

POINTS = 128
"""Places that are looked at: of as many parts of the forward pass the best of each."""

LIMITS = 17
"""Lengths that a stretch may have, from half of all down, each shorter by the root of two."""


def stretches(waiting: Sequence[int], crossing: Sequence[int]) -> tuple[int, ...]:
    """The places after which a stretch ends; the last stretch, up to the turn, has none.

    Args:
        waiting: bytes that each place makes and the backward pass needs.
        crossing: bytes that the forward pass still needs after each place.

    Returns:
        Places in their order; none where keeping everything takes least.
    """
    sums = list(accumulate(waiting))
    if not sums or not sums[-1]:
        return ()
    total, points = sums[-1], list(_points(sums, crossing))
    best: tuple[float, tuple[int, ...]] = (total, ())
    for number in range(LIMITS):
        limit = total / 2 ** (1 + number / 2)
        found = _cut(points, sums, crossing, limit)
        if found is not None:
            longest = max(b - a for a, b in pairwise([0, *(sums[p] for p in found), total]))
            best = min(best, (longest + sum(crossing[p] for p in found), found))
    return best[1]


def _points(sums: list[int], crossing: Sequence[int]) -> Iterator[int]:
    """Of each part of the forward pass the place after which least is needed."""
    parts: dict[int, int] = {}
    for place, done in enumerate(sums[:-1]):
        part = done * POINTS // sums[-1]
        if part not in parts or crossing[place] < crossing[parts[part]]:
            parts[part] = place
    yield from parts.values()


def _cut(
    points: list[int], sums: list[int], crossing: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """The ends that keep least with no stretch longer than that; None where there are none."""
    lengths = [0, *(sums[point] for point in points), sums[-1]]
    costs = [0, *(crossing[point] for point in points), 0]
    least: list[float] = [0.0]
    came: list[int] = [0]
    start = 0
    for place in range(1, len(lengths)):
        while lengths[place] - lengths[start] > limit and start < place:
            start += 1
        if start == place:
            return None
        before = min(range(start, place), key=least.__getitem__)
        least.append(least[before] + costs[place])
        came.append(before)
    ends = []
    place = came[-1]
    while place:
        ends.append(points[place - 1])
        place = came[place]
    return tuple(reversed(ends))
