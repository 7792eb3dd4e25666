"""Confidence bounds of medians."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbdist.telemetry.confidence import ALPHA, lower_bound


@pytest.mark.parametrize(("number", "below"), [(20, 0), (25, 1), (50, 8)])
def test_the_bound_is_an_order_statistic(number: int, below: int) -> None:
    values = [float(x) for x in np.random.default_rng(0).permutation(number)]
    assert lower_bound(values) == below
    chance = sum(math.comb(number, k) for k in range(below + 1)) / 2**number
    assert chance <= ALPHA < chance + math.comb(number, below + 1) / 2**number


@pytest.mark.parametrize("values", [[], [1.0] * 19])
def test_few_values_have_no_bound(values: list[float]) -> None:
    assert lower_bound(values) == -math.inf


@pytest.mark.parametrize("values", [[2.0] * 50, [2.0 + 1e-15 * i for i in range(50)]])
def test_the_bound_of_equal_values_is_their_value(values: list[float]) -> None:
    assert lower_bound(values) == pytest.approx(2)


def test_values_that_follow_each_other_alike_count_less() -> None:
    assert lower_bound([1.0] * 5 + [2.0] * 45) == -math.inf
    assert lower_bound([1.0, *[2.0] * 9] * 5) == 2.0
    assert lower_bound([2.0] * 49 + [1.0]) == 2.0


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_bound_of_noise_rarely_exceeds_its_median(correlation: float) -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(size=(500, 50))
    for step in range(1, 50):
        noise[:, step] += correlation * noise[:, step - 1]
    assert max(map(lower_bound, noise.tolist())) < 0
