"""Levels of links of hosts, racks and slices of TPUs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.planner.hardware.links import (
    Nics,
    check_shape,
    fills_racks,
    network_level,
    of_hosts,
    of_slices,
    shape_for,
    usual_nics,
    written,
)
from nbdist.planner.hardware.machine import Host, Torus

if TYPE_CHECKING:
    from nbdist.records import Level

HOST = Host(
    devices=8,
    link="Link",
    latency_s=1e-6,
    bytes_per_s=100e9,
    nics=2,
    nic_bytes_per_s=25e9,
    pcie_bytes_per_s=20e9,
    network_latency_s=1e-5,
    source="a test",
    usual="a test",
)
RACKED = msgspec.structs.replace(HOST, rack=4)
FLAT = Torus(shapes=((1, 1), (2, 2), (2, 4), (4, 4)), longest=(4, 4), cube=0, source="a test")
CUBES = Torus(shapes=((2, 2, 1), (2, 2, 2)), longest=(8, 8, 12), cube=4, source="a test")


def sizes(levels: tuple[Level, ...]) -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in levels]


@pytest.mark.parametrize(
    ("host", "hosts", "levels"),
    [
        (HOST, 1, [("host", 8)]),
        (HOST, 3, [("host", 8), ("network", 3)]),
        (RACKED, 1, [("host", 8)]),
        (RACKED, 3, [("host", 8), ("rack", 3)]),
        (RACKED, 4, [("host", 8), ("rack", 4)]),
        (RACKED, 12, [("host", 8), ("rack", 4), ("network", 3)]),
    ],
)
def test_levels_are_host_rack_and_network(
    host: Host, hosts: int, levels: list[tuple[str, int]]
) -> None:
    found = of_hosts(host, hosts, 8, usual_nics(host))
    assert sizes(found) == levels
    for level in found:
        inside = level.name != "network"
        rates = (HOST.latency_s, HOST.bytes_per_s) if inside else (HOST.network_latency_s, 6.25e9)
        assert (level.latency_s, level.bytes_per_s) == rates
        assert (level.alone_bytes_per_s is None) == inside


def test_hosts_must_fill_racks() -> None:
    assert [hosts for hosts in range(1, 10) if fills_racks(RACKED, hosts)] == [1, 2, 3, 4, 8]
    with pytest.raises(PlanError, match=r"^6 hosts do not fill racks of 4: take 4 or 8$"):
        of_hosts(RACKED, 6, 8, usual_nics(RACKED))


@pytest.mark.parametrize(
    ("nics", "devices", "shared", "alone"),
    [
        (Nics(count=2, each_bytes_per_s=25e9), 8, 6.25e9, 20e9),  # the link to the NIC limits
        (Nics(count=2, each_bytes_per_s=10e9), 8, 2.5e9, 10e9),
        (Nics(count=8, each_bytes_per_s=25e9), 2, 20e9, 20e9),  # the NICs are faster than one link
        (Nics(count=1, each_bytes_per_s=10e9), 1, 10e9, 10e9),
    ],
)
def test_devices_share_network_interfaces(
    nics: Nics, devices: int, shared: float, alone: float
) -> None:
    level = network_level("network", 3, HOST, devices, nics)
    assert (level.bytes_per_s, level.alone_bytes_per_s) == (shared, alone)


def test_closed_rings_are_innermost() -> None:
    found = of_slices(HOST, FLAT, (2, 4), 1, usual_nics(HOST))
    assert [(level.name, level.size, level.wraps) for level in found] == [
        ("Link y", 4, True),
        ("Link x", 2, False),
    ]
    assert all(level.ring for level in found)
    both = of_slices(HOST, FLAT, (4, 4), 1, usual_nics(HOST))
    assert sizes(both) == [("Link x", 4), ("Link y", 4)]


def test_axes_of_one_chip_are_no_levels() -> None:
    assert sizes(of_slices(HOST, CUBES, (2, 2, 1), 1, usual_nics(HOST))) == [
        ("Link x", 2),
        ("Link y", 2),
    ]
    assert sizes(of_slices(HOST, FLAT, (1, 1), 1, usual_nics(HOST))) == [("Link x", 1)]


@pytest.mark.parametrize(
    ("shape", "closed"),
    [((4, 4, 4), True), ((4, 8, 12), True), ((2, 2, 2), False), ((2, 4, 4), False)],
)
def test_cubes_close_rings(shape: tuple[int, ...], closed: bool) -> None:
    found = of_slices(HOST, CUBES, shape, 1, usual_nics(HOST))
    assert [level.wraps for level in found] == [closed] * 3


def test_network_between_slices_is_outermost_and_shared_by_a_host() -> None:
    """A small slice has fewer chips than a host."""
    large = of_slices(HOST, FLAT, (4, 4), 3, usual_nics(HOST))[-1]
    small = of_slices(HOST, FLAT, (2, 2), 3, usual_nics(HOST))[-1]
    assert (large.name, large.size) == (small.name, small.size) == ("DCN", 3)
    assert (large.bytes_per_s, small.bytes_per_s) == (50e9 / 8, 50e9 / 4)


@pytest.mark.parametrize(
    ("torus", "shape", "found"),
    [
        (FLAT, (2, 4), (2, 4)),
        (FLAT, (4, 2), (2, 4)),
        (CUBES, (2, 2, 1), (2, 2, 1)),
        (CUBES, (8, 4, 4), (8, 4, 4)),
        (CUBES, (12, 8, 8), (12, 8, 8)),
    ],
)
def test_published_shapes_are_accepted(
    torus: Torus, shape: tuple[int, ...], found: tuple[int, ...]
) -> None:
    assert check_shape("X", shape, torus) == found


FLAT_SHAPES = "its slices are 1x1, 2x2, 2x4, 4x4"
CUBE_SHAPES = "its slices are 2x2x1, 2x2x2, and multiples of 4 up to 8x8x12"


@pytest.mark.parametrize(
    ("torus", "shape", "message"),
    [
        (FLAT, (2,), f"X has 2 axes, and 2 has 1: {FLAT_SHAPES}"),
        (FLAT, (8, 8), f"X has no slices of 8x8: {FLAT_SHAPES}"),
        (FLAT, (0, 4), f"X has no slices of 0x4: {FLAT_SHAPES}"),
        (CUBES, (1, 2, 2), f"X has no slices of 1x2x2: {CUBE_SHAPES}"),
        (CUBES, (4, 4, 6), f"X has no slices of 4x4x6: {CUBE_SHAPES}"),
        (CUBES, (4, 12, 12), f"X has no slices of 4x12x12: {CUBE_SHAPES}"),
        (CUBES, (0, 4, 4), f"X has no slices of 0x4x4: {CUBE_SHAPES}"),
        (CUBES, (4, 4), f"X has 3 axes, and 4x4 has 2: {CUBE_SHAPES}"),
    ],
)
def test_other_shapes_are_refused(torus: Torus, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        check_shape("X", shape, torus)


def test_shape_is_proposed_for_a_number_of_chips() -> None:
    assert [shape_for(devices, FLAT) for devices in (1, 4, 8, 3)] == ["1x1", "2x2", "2x4", ""]
    of_cubes = [shape_for(devices, CUBES) for devices in (64, 128, 512)]
    assert of_cubes == ["4x4x4", "4x4x8", "8x8x8"]
    assert shape_for(68, CUBES) == ""
    assert written((4, 4, 8)) == "4x4x8"
