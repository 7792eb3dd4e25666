"""Figures of the catalog: consistent for each chip, and equal to published ones."""

from __future__ import annotations

import math

import pytest

from nbdist.planner.hardware.catalog import MACHINES, PLAIN_HOST
from nbdist.planner.hardware.lookup import find, host_of
from nbdist.planner.hardware.machine import GIB, Machine, Torus


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.chip.name)
def test_catalog_entry_is_consistent(machine: Machine) -> None:
    chip, host = machine.chip, machine.host
    assert find(chip.name) is chip
    assert chip.source
    assert host.source
    assert host.usual
    assert chip.memory_bytes > 0
    assert 0 < chip.bytes_per_s < chip.flops["float32"]
    wide = [
        chip.flops[dtype]
        for dtype in ("float32", "tensorfloat32", "float16")
        if dtype in chip.flops
    ]
    assert wide == sorted(wide)
    assert chip.flops.get("float8", chip.flops["float32"]) >= chip.flops["float32"]
    assert host.nic_bytes_per_s * host.nics / host.devices <= host.bytes_per_s
    assert (machine.torus is not None) == (chip.platform == "tpu")


def test_rates_match_published_figures() -> None:
    chip = find("NVIDIA A100-SXM4-80GB")
    assert chip is not None
    assert chip.flops == {
        "float32": 19.5e12,
        "tensorfloat32": 156e12,
        "bfloat16": 312e12,
        "float16": 312e12,
        "int8": 624e12,
    }
    assert chip.memory_bytes == 85100068864
    assert chip.bytes_per_s == pytest.approx(2.039e12, rel=1e-4)
    host = host_of(chip)
    assert (host.devices, host.bytes_per_s, host.nics, host.nic_bytes_per_s) == (8, 300e9, 8, 25e9)


def test_exact_float32_takes_six_passes_on_tpus() -> None:
    chip = find("v5e")
    assert chip is not None
    assert chip.flops["float32"] == pytest.approx(chip.flops["bfloat16"] / 6)


def named(name: str) -> Machine:
    (found,) = [each for each in MACHINES if each.chip.name == name]
    return found


def test_chips_have_unique_names() -> None:
    names = [each.chip.name for each in MACHINES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("torus", {each.torus for each in MACHINES if each.torus is not None})
def test_shapes_of_slices_are_consistent(torus: Torus) -> None:
    """All shapes are listed, or those smaller than a cube."""
    volumes = [math.prod(shape) for shape in torus.shapes]
    assert volumes == sorted(set(volumes))
    assert {len(shape) for shape in torus.shapes} == {len(torus.longest)}
    if torus.cube:
        assert all(size % torus.cube == 0 for size in torus.longest)
        assert max(volumes) < torus.cube**3
    else:
        assert torus.shapes[-1] == torus.longest
        assert all(shape == tuple(sorted(shape)) for shape in torus.shapes)


def test_rates_are_in_base_units() -> None:
    """The catalog lists GB/s of links, Gb/s of NICs, TB/s of memory and Tflop/s."""
    h100, v5p = named("H100"), named("TPU v5p")
    assert (h100.chip.flops["bfloat16"], h100.chip.bytes_per_s) == (989e12, 3.35232e12)
    assert (h100.host.bytes_per_s, h100.host.nic_bytes_per_s) == (450e9, 50e9)
    assert h100.host.pcie_bytes_per_s == 63e9
    assert (v5p.chip.flops["bfloat16"], v5p.chip.bytes_per_s) == (459e12, 2765e9)
    assert (v5p.host.bytes_per_s, v5p.host.nic_bytes_per_s) == (90e9, 25e9)
    assert (v5p.chip.memory_bytes, named("TPU v4").chip.memory_bytes) == (95 * GIB, 30.75 * GIB)


def test_only_racks_have_links_between_hosts() -> None:
    racks = {each.chip.name: each.host.rack for each in MACHINES}
    assert {name: rack for name, rack in racks.items() if rack > 1} == {"GB200": 18, "GB300": 18}
    assert named("GB200").host.devices == 4


def test_old_gpus_have_no_bfloat16() -> None:
    without = {each.chip.name for each in MACHINES if "bfloat16" not in each.chip.flops}
    assert without == {"V100-16GB", "V100-32GB", "V100-PCIe", "T4"}


def test_unknown_hosts_are_slower_than_known_ones() -> None:
    for each in MACHINES:
        if each.chip.platform != "cpu":
            assert each.host.bytes_per_s > PLAIN_HOST.bytes_per_s
            assert each.host.pcie_bytes_per_s >= PLAIN_HOST.pcie_bytes_per_s
