"""Differences between the reports of ranks, as messages."""

from __future__ import annotations

import pytest

from nbdist.cells.rank_comparison import differing_generators


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        ({0: {"random": 1, "NumPy": 2}, 1: {"random": 1, "NumPy": 2}}, []),
        ({0: {"random": 1}, 1: {"random": 1, "TensorFlow": 5}}, []),
        (
            {0: {"random": 1, "NumPy": 2}, 1: {"random": 1, "NumPy": 3}},
            ["rank 1 drew other random numbers than rank 0 (NumPy)."],
        ),
        (
            {0: {"random": 1, "NumPy": 2}, 1: {"random": 4}, 2: {"NumPy": 3}},
            ["rank 1-2 drew", "(NumPy, random)", "np.random.default_rng(rank)"],
        ),
    ],
)
def test_generators_that_differ_from_rank_0_are_named(
    digests: dict[int, dict[str, int]], words: list[str]
) -> None:
    found = differing_generators(digests)
    assert bool(found) == bool(words)
    assert all(word in found for word in words)
