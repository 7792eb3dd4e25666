"""Names of machine types and slices, as providers spell them."""

from __future__ import annotations

import pytest

from nbdist.errors import PlanError
from nbdist.planner.hardware.lookup import find
from nbdist.planner.hardware.machine_types import MACHINE_TYPES, slice_named
from nbdist.planner.hardware.topology import describe, parse

SLICES = {
    "v5p-128": ("TPU v5p", [4, 4, 4]),
    "v5p-2048": ("TPU v5p", [8, 8, 16]),
    "v4-8": ("TPU v4", [2, 2]),
    "v3-32": ("TPU v3", [4, 4]),
    "v5litepod-16": ("TPU v5e", [4, 4]),
    "v5e-16": ("TPU v5e", [4, 4]),
    "v6e-256": ("TPU v6e", [16, 16]),
    "tpu7x-128": ("TPU v7", [4, 4, 4]),
}
"""Chip of each slice, and the lengths of its axes of several chips."""


@pytest.mark.parametrize("name", MACHINE_TYPES)
def test_machine_type_is_a_host_of_its_devices(name: str) -> None:
    found, two = parse(name), parse(f"2 x {name}")
    expected = MACHINE_TYPES[name]
    assert find(expected.chip) is found.chip
    assert found.devices == expected.devices
    assert two.devices == 2 * expected.devices
    assert two.levels[-1].name == "network"


def test_network_of_a_machine_type_is_that_of_its_host() -> None:
    assert parse("2 x p4d.24xlarge").levels[-1].bytes_per_s == 4 * 100e9 / 8 / 8
    assert parse("2 x A3-highgpu-8g").levels[-1].bytes_per_s == 4 * 200e9 / 8 / 8
    assert parse("2 x p4d.24xlarge, 10 Gbps").levels[-1].bytes_per_s == 10e9 / 8 / 8


@pytest.mark.parametrize("name", SLICES)
def test_slice_has_the_chips_of_its_name(name: str) -> None:
    chip, sizes = SLICES[name]
    found = parse(name)
    assert found.chip.name == chip
    assert sorted(level.size for level in found.levels) == sizes
    assert "slice" in describe(parse(f"2 x {name}"))


def test_number_of_chips_without_a_shape_is_refused() -> None:
    with pytest.raises(PlanError, match=r"TPU v5e has no slices of 7 chips .*v5e-7.*v5e:16x16"):
        parse("v5e-7")
    assert slice_named("h100-8") is None
