"""Measured device rates in the planner's cost figures."""

from __future__ import annotations

import pytest

from nbdist.errors import PlanError
from nbdist.planner.cost.collectives import all_reduce_s
from nbdist.planner.cost.measured import benched_chip, benched_links
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.lookup import peak
from nbdist.planner.hardware.topology_live import live
from nbdist.records import Bench, Link, LocalDevices, Product

CPUS = [LocalDevices(host="a", platform="cpu", kind="cpu", devices=2, memory_bytes=10**9)] * 2
BENCH = Bench(
    devices=4,
    products=(
        Product(dtype="float32", size=256, flops=10e9),
        Product(dtype="float32", size=2048, flops=50e9),
        Product(dtype="bfloat16", size=256, flops=2e9),
    ),
    bytes_per_s=8e9,
    links={
        "process": Link(latency_s=20e-6, bytes_per_s=3e9),
        "host": Link(latency_s=100e-6, bytes_per_s=0.4e9),
    },
)


def test_products_have_measured_rates() -> None:
    chip = benched_chip(BENCH, CPUS[0])
    calibration = calibration_of(chip)
    assert peak(chip, "float32") * calibration.matmul_ceiling == pytest.approx(50e9)
    assert peak(chip, "bfloat16") * calibration.matmul_ceiling == pytest.approx(2e9)
    assert chip.bytes_per_s * calibration.memory_efficiency == pytest.approx(8e9)
    assert chip.source.startswith("products and copies measured by %dist_devices --bench; the rest")


def test_collectives_have_measured_times() -> None:
    """All-reduce of 4 MB over two processes of two devices: inside, half of it outside, inside."""
    chip = benched_chip(BENCH, CPUS[0])
    topology = live(CPUS, chip=chip, links=benched_links(BENCH, chip))
    assert not [text for text in topology.assumed if "not measured" in text]
    calibration = calibration_of(chip)
    inside, outside = 20e-6 + 2e6 / 3e9, 100e-6 + 1e6 / 0.4e9
    assert all_reduce_s(4e6, (2, 2), topology, calibration) == pytest.approx(
        calibration.collective_s + 2 * (inside + outside)
    )


def test_unknown_chip_gets_measured_rates() -> None:
    own = LocalDevices(host="a", platform="zorn", kind="Zorn 1", devices=1, memory_bytes=32 * 10**9)
    chip = benched_chip(BENCH, own)
    assert (chip.name, chip.platform, chip.memory_bytes) == ("Zorn 1", "zorn", 32 * 10**9)
    assert peak(chip, "float32") * calibration_of(chip).matmul_ceiling == pytest.approx(50e9)


def test_unknown_chip_without_memory_size_is_refused() -> None:
    own = LocalDevices(host="a", platform="zorn", kind="Zorn 1", devices=1)
    with pytest.raises(PlanError, match=r"invalid results: .*memory_bytes"):
        benched_chip(BENCH, own)


def test_gpu_float32_rate_uses_computation_type() -> None:
    own = LocalDevices(host="a", platform="gpu", kind="NVIDIA A100-SXM4-80GB", devices=1)
    chip = benched_chip(BENCH, own)
    calibration = calibration_of(chip).matmul_ceiling
    assert peak(chip, "float32") * calibration == pytest.approx(50e9)
    assert chip.flops["float32"] > 1e12  # exact float32 was not measured
