"""Sizes of topologies, and matrix sizes from which a transfer pays."""

from __future__ import annotations

import math

import pytest

from nbdist.records import Chip, Crossing, Level, Topology, Way

CHIP = Chip(name="C", platform="gpu", memory_bytes=1, flops={}, bytes_per_s=1.0, source="")


def test_devices_are_the_product_of_all_levels() -> None:
    levels = tuple(Level(name="", size=size, latency_s=0, bytes_per_s=1) for size in (4, 3, 1, 2))
    assert Topology(chip=CHIP, levels=levels).devices == 24
    assert Topology(chip=CHIP, levels=()).devices == 1


@pytest.mark.parametrize(("there_s", "pays"), [(1.0, False), (0.91, False), (0.9, True)])
def test_a_transfer_pays_if_it_saves_a_tenth(there_s: float, pays: bool) -> None:
    assert Way(size=8, home_s=1.0, there_s=there_s).pays is pays


def test_the_crossing_is_in_bytes_of_a_float32_matrix() -> None:
    assert Crossing(ways=(), size=100.0, home="cpu", there="gpu").nbytes == 40_000
    assert Crossing(ways=(), size=None, home="cpu", there="gpu").nbytes == math.inf
