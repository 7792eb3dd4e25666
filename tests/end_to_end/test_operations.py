"""Random sequences of cells, stops, interrupts and failures keep the ranks in step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import clusters
from tests.operations import Operator

if TYPE_CHECKING:
    from nbdist.records import StrategyName

FRAMEWORKS: dict[StrategyName, str] = {"mirrored": "tensorflow", "pjrt": "jax"}


@pytest.mark.parametrize(
    ("strategy", "hosts", "seed", "count"),
    [
        pytest.param("mirrored", 2, 1, 10, marks=pytest.mark.full),
        ("pjrt", 2, 2, 10),
        pytest.param("mirrored", 4, 3, 250, marks=pytest.mark.full),
        pytest.param("pjrt", 4, 4, 250, marks=pytest.mark.full),
    ],
)
def test_random_operations_keep_the_ranks_in_step(
    strategy: StrategyName, hosts: int, seed: int, count: int
) -> None:
    """The log of a failure lists the operations, and the seed reproduces them."""
    with clusters.cluster(hosts=hosts, framework=FRAMEWORKS[strategy]) as cluster:
        Operator(cluster, strategy, seed).operate(count)
