"""Chip lookup by the names of JAX and of people, rates, and computation types."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import PlanError
from nbdist.planner.hardware.catalog import MACHINES, PLAIN_HOST
from nbdist.planner.hardware.lookup import (
    EXAMPLE,
    find,
    host_of,
    known,
    machine_named,
    peak,
    probed,
    unknown,
)
from nbdist.planner.hardware.topology_file import from_file
from nbdist.records import Chip

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "Tesla V100-SXM3-32GB": "V100-32GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA H200 141GB HBM3e": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA B300": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA H20": "H20",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA A100-PCIE-40GB": "A100-40GB-PCIe",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "Tesla V100-PCIE-16GB": "V100-PCIe",
    "Tesla T4": "T4",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA A10G": "A10G",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "TPU v2": "TPU v2",
    "TPU v3": "TPU v3",
    "TPU7x": "TPU v7",
    "NVIDIA GB200": "GB200",
    "TPU v4": "TPU v4",
    "TPU v5 lite": "TPU v5e",
    "TPU v5e": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v5p": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "cpu": "CPU",
}
COMMON_NAMES = {
    "V100": "V100-16GB",
    "v100-32": "V100-32GB",
    "A100": "A100-40GB",
    "A100 80GB": "A100-80GB",
    "h100 sxm": "H100",
    "v5e": "TPU v5e",
    "v5litepod": "TPU v5e",
    "Trillium": "TPU v6e",
}
UNKNOWN_KINDS = (
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA GH200 480GB",
    "TPU v4 lite",
    "",
)


@pytest.mark.parametrize(("kind", "name"), (KINDS | COMMON_NAMES).items())
def test_known_kind_is_found(kind: str, name: str) -> None:
    chip = find(kind)
    assert chip is not None
    assert chip.name == name


@pytest.mark.parametrize("kind", UNKNOWN_KINDS)
def test_similar_kind_is_not_found(kind: str) -> None:
    assert find(kind) is None


@given(
    kind=st.sampled_from(sorted(KINDS)),
    upper=st.booleans(),
    gap=st.sampled_from(["", " ", "-", "_", "  "]),
)
def test_case_and_spacing_do_not_matter(kind: str, upper: bool, gap: str) -> None:
    written = re.sub("[ -]", gap, kind.upper() if upper else kind.lower())
    chip = find(written)
    assert chip is not None
    assert chip.name == KINDS[kind]


def test_each_name_matches_exactly_one_chip() -> None:
    for kind in (*KINDS, *COMMON_NAMES, *known()):
        squashed = re.sub("[^a-z0-9]", "", kind.lower())
        assert sum(bool(re.fullmatch(each.names, squashed)) for each in MACHINES) == 1, kind


@pytest.mark.parametrize(
    ("kind", "dtype", "teraflops"),
    [
        ("V100", "float32", 15.7),
        ("V100", "bfloat16", 15.7),
        ("V100", "float16", 125),
        ("A100", "float32", 156),
        ("A100", "float8_e4m3fn", 312),
        ("H100", "float8_e5m2", 1979),
        ("H100", "uint8", 1979),
        ("TPU v4", "float32", 275),
        ("TPU v4", "float16", 275),
        ("v6e", "int8", 1836),
    ],
)
def test_peak_uses_the_computation_type_of_jax(kind: str, dtype: str, teraflops: float) -> None:
    chip = find(kind)
    assert chip is not None
    assert peak(chip, dtype) == pytest.approx(teraflops * 1e12)


def test_type_without_rate_is_refused() -> None:
    chip = find("V100")
    assert chip is not None
    message = (
        "no rate is known for products of float64 on V100-16GB: it has float16, float32; "
        "cast to one of them"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        peak(chip, "float64")


def test_unknown_hardware_lists_nearest_names_first() -> None:
    message = unknown("H10O")
    assert message.startswith("unknown hardware 'H10O': known are H100, ")
    assert all(name in message for name in known())


def test_proposed_description_can_be_parsed(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(unknown("potato").partition("path:\n")[2])
    assert path.read_text() == EXAMPLE
    assert from_file(path).devices == 32


def test_probed_chip_states_its_source() -> None:
    chip = probed("Fake 1", "fake", 2**30, {"float32": 1e9}, 1e8)
    assert isinstance(chip, Chip)
    assert (chip.name, chip.platform) == ("Fake 1", "fake")
    assert chip.source.startswith("measured")
    assert machine_named(chip.name) is None
    assert host_of(chip) is PLAIN_HOST


@pytest.mark.parametrize(
    ("memory_bytes", "flops", "bytes_per_s", "faults"),
    [
        (0, {"float32": 1e9}, 1e8, "memory_bytes is 0"),
        (1, {}, float("nan"), "bytes_per_s is nan, flops is empty"),
        (1, {"int8": -1.0}, float("inf"), "bytes_per_s is inf, flops['int8'] is -1.0"),
    ],
)
def test_invalid_probe_results_are_refused(
    memory_bytes: int, flops: dict[str, float], bytes_per_s: float, faults: str
) -> None:
    message = f"the benchmark of 'Fake 1' has invalid results: {faults}"
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        probed("Fake 1", "fake", memory_bytes, flops, bytes_per_s)
