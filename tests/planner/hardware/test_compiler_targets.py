"""Arguments of XLA's compilers for absent hardware."""

from __future__ import annotations

import re

import pytest

from nbdist.errors import PlanError
from nbdist.planner.hardware.catalog import MACHINES
from nbdist.planner.hardware.compiler_targets import compiler_target, is_compiler_installed
from nbdist.planner.hardware.gpu_cards import CARDS
from nbdist.planner.hardware.topology import parse
from nbdist.records import Chip, Level, Topology


@pytest.mark.parametrize(
    ("hardware", "name", "options"),
    [
        ("v5e:4x4", "v5e:4x4", {}),
        ("v5e:1x1", "v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5e:8x16", "v5e:8x16", {}),
        ("v5p:2x2x1", "v5p:2x2x1", {}),
        ("v4:4x4x8", "v4:4x4x8", {}),
        ("2 x v5e:4x4", "v5e:4x4", {"num_slices": 2}),
        ("3 x v5p:2x2x2", "v5p:2x2x2", {"num_slices": 3}),
    ],
)
def test_slices_have_names(hardware: str, name: str, options: dict[str, object]) -> None:
    """The order of the levels, rings first, does not matter: `8x16` has the axis y innermost."""
    topology = parse(hardware)
    found = compiler_target(topology)
    assert (found.platform, found.name, found.options) == ("tpu", name, options)
    assert found.devices == topology.devices


@pytest.mark.parametrize(
    ("hardware", "shape"),
    [
        ("8xH100", "1x1x8"),
        ("32xH100", "1x4x8"),
        ("3 hosts x 2 A100", "1x3x2"),
        ("36xGB200", "1x9x4"),
    ],
)
def test_hosts_of_gpus_have_a_shape(hardware: str, shape: str) -> None:
    found = compiler_target(parse(hardware))
    assert found.platform == "cuda"
    assert found.options["topology"] == shape


@pytest.mark.parametrize(
    ("hardware", "major", "features"),
    [("8xV100", 7, "NONE"), ("8xA100", 8, "NONE"), ("8xH100", 9, "ACCELERATED_FEATURES")],
)
def test_gpu_is_described_by_its_figures(hardware: str, major: int, features: str) -> None:
    topology = parse(hardware)
    config = str(compiler_target(topology).options["target_config"])
    capability = f"{{ major: {major} feature_extension: {features} }}"
    assert f"cuda_compute_capability {capability}" in config
    assert f"device_memory_size: {topology.chip.memory_bytes}\n" in config
    assert re.search(r"memory_bandwidth: \d+\n", config)
    assert config.count(f'"{topology.chip.name}"') == 2


@pytest.mark.parametrize(
    "name",
    [
        machine.chip.name
        for machine in MACHINES
        if machine.chip.platform == "gpu" and machine not in CARDS
    ],
)
def test_compiler_knows_gpus_with_target_descriptions(name: str) -> None:
    assert compiler_target(parse(f"4x{name}")).name == name


def test_cpus_need_no_description() -> None:
    found = compiler_target(parse("8 x CPU"))
    assert (found.platform, found.name, found.options, found.devices) == ("cpu", "", {}, 8)


def test_other_hardware_is_refused() -> None:
    chip = Chip(
        name="Zorn 1",
        platform="tpu",
        memory_bytes=1,
        flops={"float32": 1.0},
        bytes_per_s=1.0,
        source="a test",
    )
    level = Level(name="host", size=1, latency_s=0.0, bytes_per_s=1.0)
    with pytest.raises(
        PlanError, match=r"^--verify: no compiler supports Zorn 1; supported are TP"
    ):
        compiler_target(Topology(chip=chip, levels=(level,)))


def test_jax_itself_compiles_for_cpus() -> None:
    assert is_compiler_installed("cpu")


def test_missing_package_means_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((None, False), (object(), True)):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=found: found)
        assert is_compiler_installed("tpu") is expected
        assert is_compiler_installed("cpu")
