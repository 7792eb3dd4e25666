"""Topologies from names, their descriptions, and the extents of mesh axes."""

from __future__ import annotations

import contextlib
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import PlanError
from nbdist.planner.hardware.catalog import MACHINES
from nbdist.planner.hardware.lookup import known, machine_named
from nbdist.planner.hardware.topology import describe, extents, parse
from nbdist.records import Chip, Level, Topology

HOSTED_CHIPS = sorted(machine.chip.name for machine in MACHINES if machine.torus is None)
LEVELS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def levels_of(topology: Topology) -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in topology.levels]


def topology_of(sizes: list[int]) -> Topology:
    chip = Chip(
        name="Any",
        platform="any",
        memory_bytes=2**31,
        flops={"float32": 1.0},
        bytes_per_s=1.0,
        source="a test",
    )
    levels = [
        Level(name=f"level {index}", size=size, latency_s=0.0, bytes_per_s=1.0)
        for index, size in enumerate(sizes)
    ]
    return Topology(chip=chip, levels=tuple(levels))


@pytest.mark.parametrize(
    ("text", "chip", "levels"),
    [
        ("32xH100", "H100", [("host", 8), ("network", 4)]),
        ("32 x H100", "H100", [("host", 8), ("network", 4)]),
        ("32 h100", "H100", [("host", 8), ("network", 4)]),
        ("H100", "H100", [("host", 1)]),
        ("4xH100", "H100", [("host", 4)]),
        ("1024xA100-80GB", "A100-80GB", [("host", 8), ("network", 128)]),
        ("4 hosts x 8 A100, 25 Gbps", "A100-40GB", [("host", 8), ("network", 4)]),
        ("1 host x 3 A100", "A100-40GB", [("host", 3)]),
        ("16 hosts x 1 V100, 10 Gbps", "V100-16GB", [("host", 1), ("network", 16)]),
        ("4 hosts x 8 x V100 32GB", "V100-32GB", [("host", 8), ("network", 4)]),
        ("GB200 NVL72", "GB200", [("host", 4), ("rack", 18)]),
        ("2 x NVL72", "GB200", [("host", 4), ("rack", 18), ("network", 2)]),
        ("32xGB200", "GB200", [("host", 4), ("rack", 8)]),
        ("v5e:16x16", "TPU v5e", [("ICI x", 16), ("ICI y", 16)]),
        ("v5e:16x8", "TPU v5e", [("ICI y", 16), ("ICI x", 8)]),
        ("v5p:4x4x4", "TPU v5p", [("ICI x", 4), ("ICI y", 4), ("ICI z", 4)]),
        ("TPU v4: 2 x 2 x 1", "TPU v4", [("ICI x", 2), ("ICI y", 2)]),
        ("v6e:1x1", "TPU v6e", [("ICI x", 1)]),
        ("2 x v5e:16x16", "TPU v5e", [("ICI x", 16), ("ICI y", 16), ("DCN", 2)]),
        ("8 x CPU", "CPU", [("host", 8)]),
    ],
)
def test_name_is_parsed_as_topology(text: str, chip: str, levels: list[tuple[str, int]]) -> None:
    topology = parse(text)
    assert topology.chip.name == chip
    assert levels_of(topology) == levels
    assert topology.devices == math.prod(size for _, size in levels)


@pytest.mark.parametrize(
    ("text", "shared", "alone"),
    [
        ("32xH100", 50e9, 50e9),
        ("32xA100", 6.25e9, 12.5e9),
        ("4 hosts x 8 A100, 25 Gbps", 25e9 / 8 / 8, 25e9 / 8),
        ("4 hosts x 8 A100, 25 Gb/s", 25e9 / 8 / 8, 25e9 / 8),
        ("4 hosts x 8 A100, 200 GB/s", 25e9, 31e9),
        ("4 hosts x 8 A100, 8x200 Gbit/s", 25e9, 25e9),
        ("4 hosts x 8 A100, 1.6 TBps", 31e9, 31e9),
        ("2 hosts x 4 H100", 50e9, 50e9),
        ("16 hosts x 1 V100, 10 gbps", 1.25e9, 1.25e9),
        ("2 x v5e:16x16", 3.125e9, 12.5e9),
        ("2 x v5p:4x4x4", 6.25e9, 15e9),
        ("2 x v5e:16x16, 800 Mbps", 1e8 / 8, 1e8),
        ("2 x v5e:2x2, 800 Mbps", 1e8 / 4, 1e8),
    ],
)
def test_devices_share_bandwidth_of_their_host(text: str, shared: float, alone: float) -> None:
    outer = parse(text).levels[-1]
    assert outer.bytes_per_s == pytest.approx(shared)
    assert outer.alone_bytes_per_s == pytest.approx(alone)


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("v5e:16x16", {"ICI x": True, "ICI y": True}),
        ("v5e:8x16", {"ICI x": False, "ICI y": True}),
        ("v6e:8x8", {"ICI x": False, "ICI y": False}),
        ("v5p:4x4x8", {"ICI x": True, "ICI y": True, "ICI z": True}),
        ("v4:2x4x4", {"ICI x": False, "ICI y": False, "ICI z": False}),
    ],
)
def test_only_full_length_rings_are_closed(text: str, closed: dict[str, bool]) -> None:
    topology = parse(text)
    assert {level.name: level.wraps for level in topology.levels} == closed
    assert all(level.ring for level in topology.levels)


def test_missing_rates_are_listed_as_assumed() -> None:
    assert len(parse("32xH100").assumed) == 2
    assumed = parse("4 hosts x 8 A100, 25 Gbps").assumed
    assert len(assumed) == 1
    assert assumed[0].startswith("NVLink 3 300 GB/s one way (")
    assert parse("16 hosts x 1 V100, 10 Gbps").assumed == ()
    assert "closed rings" in parse("v5e:4x4").assumed[-1]


@given(
    hosts=st.integers(1, 300),
    devices=st.integers(1, 16),
    name=st.sampled_from([name for name in HOSTED_CHIPS if not name.startswith("GB")]),
    gap=st.sampled_from(["", " "]),
    rate=st.integers(1, 4000),
)
def test_hosts_and_rate_are_parsed_from_text(
    hosts: int, devices: int, name: str, gap: str, rate: int
) -> None:
    topology = parse(f"{hosts} hosts{gap}x{gap}{devices} {name},{gap}{rate}{gap}Gbps")
    assert topology.chip.name == name
    assert topology.levels[0].size == devices
    assert topology.devices == hosts * devices
    for outer in topology.levels[1:]:
        assert outer.bytes_per_s <= rate * 1e9 / 8 / devices * (1 + 1e-12)
        assert outer.alone_bytes_per_s is not None
        assert outer.bytes_per_s <= outer.alone_bytes_per_s <= rate * 1e9 / 8


@given(name=st.sampled_from(HOSTED_CHIPS), hosts=st.integers(1, 18), racks=st.integers(1, 3))
def test_more_hosts_keep_inner_levels(name: str, hosts: int, racks: int) -> None:
    machine = machine_named(name)
    assert machine is not None
    usual = machine.host.devices
    one = parse(f"{usual}x{name}")
    several = parse(f"{usual * hosts}x{name}")
    assert several.levels[: len(one.levels)] == one.levels
    whole = parse(f"{usual * machine.host.rack}x{name}")
    more = parse(f"{usual * machine.host.rack * racks}x{name}")
    assert more.levels[: len(whole.levels)] == whole.levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "12xH100",
            (
                "12 x H100 do not fill hosts of 8: use 8xH100 or 16xH100, or state the hosts, as "
                "in 3 hosts x 4 H100"
            ),
        ),
        ("76xGB200", "19 hosts do not fill racks of 18: take 18 or 36"),
        ("0xH100", "need at least 1 x H100, got 0: use 1 x H100 or more"),
        ("0 hosts x 8 H100", "need at least 1 x H100, got 0: use 1 x H100 or more"),
        ("0 x v5e:4x4", "need at least 1 slice, got 0: use v5e:4x4"),
        ("16xv5e", "slices of TPU v5e have a shape: use TPU v5e:4x4"),
        ("999 x v5p", "slices of TPU v5p have a shape: use TPU v5p:16x16x24"),
        ("2 hosts x 4 v4", "slices of TPU v4 have a shape: use TPU v4:2x2x2"),
        ("H100:4x4", "H100 has no slices with a shape: use 16xH100"),
        (
            "v5e:4x4x4",
            (
                "TPU v5e has 2 axes, and 4x4x4 has 3: its slices are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, "
                "8x16, 16x16"
            ),
        ),
        (
            "v5e:3x5",
            (
                "TPU v5e has no slices of 3x5: its slices are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, "
                "16x16"
            ),
        ),
        (
            "v5p:4x4x6",
            (
                "TPU v5p has no slices of 4x4x6: its slices are 2x2x1, 2x2x2, 2x2x4, 2x4x4, and "
                "multiples of 4 up to 16x16x24"
            ),
        ),
        (
            "v4:4x4x20",
            (
                "TPU v4 has no slices of 4x4x20: its slices are 2x2x1, 2x2x2, 2x2x4, 2x4x4, and "
                "multiples of 4 up to 16x16x16"
            ),
        ),
        (
            "32xH100, fast",
            "'fast' is not a network bandwidth: use 25 Gbps, 8x200 Gb/s or 12.5 GB/s",
        ),
        (
            "32xH100, 0 Gbps",
            "'0 Gbps' is not a network bandwidth: use 25 Gbps, 8x200 Gb/s or 12.5 GB/s",
        ),
        (
            "32xH100, 0x200 Gbps",
            "'0x200 Gbps' is not a network bandwidth: use 25 Gbps, 8x200 Gb/s or 12.5 GB/s",
        ),
        (
            "32xH100, ",
            "'' is not a network bandwidth: use 25 Gbps, 8x200 Gb/s or 12.5 GB/s",
        ),
        (
            "1e3",
            (
                "'1e3' describes no devices: use 32xH100, 4 hosts x 8 A100, 25 Gbps, v5e:16x16, "
                "2 x v5e:16x16, v5p-128, p4d.24xlarge, or a file's path"
            ),
        ),
    ],
)
def test_invalid_descriptions_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        parse(text)


@pytest.mark.parametrize("text", ["8xH10O", "2 hosts x 4 H10O", "H10O:4x4"])
def test_unknown_hardware_is_refused_in_every_form(text: str) -> None:
    with pytest.raises(PlanError, match=r"^unknown hardware 'H10O': known are H100, "):
        parse(text)


@given(text=st.text(max_size=30) | st.from_regex(r"[0-9x :]{0,9}(H100|v4|hosts)[0-9x:, Gbps]{0,9}"))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(PlanError):
        assert parse(text).devices > 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "32xH100",
            "32 x H100, 79.1 GiB each: 4 hosts of 8, NVLink 4 450 GB/s, network 50 GB/s a device",
        ),
        ("8xB200", "8 x B200, 178 GiB each: 1 host of 8, NVLink 5 900 GB/s"),
        (
            "2 x NVL72",
            "144 x GB200, 184 GiB each: 36 hosts of 4, NVLink 5 900 GB/s, network 50 GB/s a device",
        ),
        ("v5e:8x16", "128 x TPU v5e, 15.8 GiB each: 1 slice of 8x16, ICI 45 GB/s a link"),
        (
            "2 x v5p:4x4x4, 100 Gbps",
            (
                "128 x TPU v5p, 95 GiB each: 2 slices of 4x4x4, ICI 90 GB/s a link, DCN 3.12 GB/s "
                "a device"
            ),
        ),
    ],
)
def test_topology_is_described_in_one_line(text: str, line: str) -> None:
    assert describe(parse(text)) == line


def test_topology_with_custom_levels_is_described() -> None:
    assert describe(topology_of([2, 3])) == (
        "6 x Any, 2 GiB each: level 0 of 2 x level 1 of 3, level 0 1e-09 GB/s a device, "
        "level 1 1e-09 GB/s a device"
    )


@pytest.mark.parametrize(
    ("axes", "sizes", "expected"),
    [
        ({"dp": 4, "tp": 8}, [8, 4], {"dp": (1, 4), "tp": (8, 1)}),
        ({"dp": 8, "tp": 4}, [8, 4], {"dp": (2, 4), "tp": (4, 1)}),
        ({"dp": 2, "pp": 2, "tp": 8}, [8, 4], {"dp": (1, 2), "pp": (1, 2), "tp": (8, 1)}),
        ({"tp": 16, "dp": 2}, [8, 4], {"tp": (4, 4), "dp": (2, 1)}),
        ({"tp": 32}, [8, 4], {"tp": (8, 4)}),
        ({"dp": 1, "tp": 32}, [8, 4], {"dp": (1, 1), "tp": (8, 4)}),
        # An axis of 6 over hosts of 4: only pairs are within a host for every device.
        ({"dp": 2, "tp": 6}, [4, 3], {"dp": (1, 2), "tp": (2, 3)}),
        ({"dp": 4, "tp": 3}, [4, 3], {"dp": (1, 4), "tp": (1, 3)}),
        ({}, [1], {}),
    ],
)
def test_axes_are_mapped_to_levels(
    axes: dict[str, int], sizes: list[int], expected: dict[str, tuple[int, ...]]
) -> None:
    found = extents(axes, topology_of(sizes))
    assert found == expected
    assert list(found) == list(axes)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], dict[str, int]]:
    """Draw level sizes and axis sizes with the same product."""
    sizes = draw(LEVELS)
    rest = math.prod(sizes)
    axes = {}
    for index in range(draw(st.integers(0, 3))):
        divisors = [number for number in range(1, rest + 1) if rest % number == 0]
        axes[f"axis {index}"] = draw(st.sampled_from(divisors))
        rest //= axes[f"axis {index}"]
    return sizes, {**axes, "last": rest}


@given(mesh=meshes())
def test_factors_of_axis_multiply_to_its_size(mesh: tuple[list[int], dict[str, int]]) -> None:
    sizes, axes = mesh
    found = extents(axes, topology_of(sizes))
    assert {name: math.prod(extent) for name, extent in found.items()} == axes
    assert all(len(extent) == len(sizes) for extent in found.values())


@given(mesh=meshes())
def test_inner_factors_hold_for_every_device(
    mesh: tuple[list[int], dict[str, int]],
) -> None:
    """Check each run of devices: as long as the product of inner factors, and in one block."""
    sizes, axes = mesh
    stride = 1
    found = extents(axes, topology_of(sizes))
    for name, size in reversed(list(axes.items())):
        for depth in range(len(sizes)):
            block = math.prod(sizes[: depth + 1])
            run = math.prod(found[name][: depth + 1])
            for first in range(0, math.prod(sizes), stride * size):
                for start in range(first, first + stride):
                    members = [start + stride * index for index in range(size)]
                    runs = [members[at : at + run] for at in range(0, size, run)]
                    assert all(len({device // block for device in each}) == 1 for each in runs)
        stride *= size


@given(powers=st.lists(st.integers(0, 3), min_size=1, max_size=3), data=st.data())
def test_dividing_sizes_fill_all_levels(powers: list[int], data: st.DataObject) -> None:
    sizes = [2**power for power in powers]
    left = sum(powers)
    axes = {}
    for index in range(2):
        power = data.draw(st.integers(0, left))
        axes[f"axis {index}"] = 2**power
        left -= power
    found = extents({**axes, "last": 2**left}, topology_of(sizes))
    columns = zip(*found.values(), strict=True)
    assert [math.prod(factors) for factors in columns] == sizes


@pytest.mark.parametrize(
    ("axes", "product"),
    [
        ({"dp": 4, "tp": 3}, "dp 4 x tp 3 is 12"),
        ({"dp": -4, "tp": -8}, "dp -4 x tp -8 is 32"),
        ({}, "no axes is 1"),
    ],
)
def test_axes_with_wrong_device_count_are_refused(axes: dict[str, int], product: str) -> None:
    message = f"{product}, and there are 32 devices: the product of the axes must be 32"
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        extents(axes, parse("32xH100"))


def test_every_known_chip_has_a_topology() -> None:
    for name in known():
        machine = machine_named(name)
        assert machine is not None
        shape = "x".join(map(str, machine.torus.longest)) if machine.torus else ""
        topology = parse(f"{name}:{shape}" if shape else name)
        assert topology.chip is machine.chip
