"""Confidence that medians exceed limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbdist.telemetry.confidence import ALPHA, exceeds


@pytest.mark.parametrize(("number", "above"), [(20, 20), (25, 24), (50, 42)])
def test_enough_values_must_be_above_the_limit(number: int, above: int) -> None:
    def spread(below: int) -> list[float]:
        """Return as many values below 1, with equal distances."""
        places = np.linspace(1, number - 2, below).astype(int)
        values = np.full(number, 2.0)
        values[places] = 0.0
        return values.tolist()

    assert exceeds(spread(number - above), 1.0)
    assert not exceeds(spread(number - above + 1), 1.0)
    chance = sum(math.comb(number, k) for k in range(above, number + 1)) / 2**number
    assert chance <= ALPHA < chance + math.comb(number, above - 1) / 2**number


@pytest.mark.parametrize("values", [[], [2.0], [2.0, 2.0], [2.0] * 19])
def test_few_values_give_no_confidence(values: list[float]) -> None:
    assert not exceeds(values, 1.0)


def test_equal_values_exceed_smaller_limits_only() -> None:
    assert exceeds([2.0] * 50, 1.999)
    assert not exceeds([2.0] * 50, 2.0)


def test_values_above_the_limit_that_follow_each_other_count_less() -> None:
    assert not exceeds([1.0] * 5 + [2.0] * 45, 1.5)
    assert exceeds([1.0, *[2.0] * 9] * 5, 1.5)
    assert exceeds([2.0] * 49 + [1.0], 1.5)


def test_slow_changes_far_above_the_limit_count_fully() -> None:
    """A rank sleeps 30 ms a step. The load of its machine changes the time a little."""
    wave = 0.03 + 0.002 * np.sin(np.arange(50) / 8)
    assert exceeds(wave.tolist(), 0.005)
    assert not exceeds(wave.tolist(), 0.029)


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_noise_rarely_exceeds_its_median(correlation: float) -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(size=(500, 50))
    for step in range(1, 50):
        noise[:, step] += correlation * noise[:, step - 1]
    assert not any(exceeds(values, 0.0) for values in noise.tolist())
