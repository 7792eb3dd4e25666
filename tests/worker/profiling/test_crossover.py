"""Size from which another device is faster."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given

from nbdist.records import Way
from nbdist.worker.profiling.crossover import _crossed

SECONDS = st.floats(1e-6, 1.0)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8))
def test_crossover_is_between_neighbouring_sizes(seconds: list[tuple[float, float]]) -> None:
    ways = [Way(2**i, home, away) for i, (home, away) in enumerate(seconds)]
    crossed = _crossed(ways)
    if ways[-1].there_s * 1.1 >= ways[-1].home_s:
        assert crossed is None
        return
    slower = [way.size for way in ways if way.there_s * 1.1 >= way.home_s]
    assert crossed is not None
    if slower:
        assert slower[-1] <= crossed <= 2 * slower[-1]
    else:
        assert crossed == ways[0].size


def test_crossover_is_the_intersection_of_both_lines() -> None:
    """A product takes n^3 at home and one second elsewhere: the lines meet at one second."""
    ways = [Way(size, home_s=(size / 100) ** 3, there_s=1.0) for size in (10, 64, 200, 800)]
    crossed = _crossed(ways)
    assert crossed is not None
    assert math.isclose(crossed, 100, rel_tol=1e-9)
