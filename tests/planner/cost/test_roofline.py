from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.planner.cost.roofline import ITEM_BYTES, issued_s, matmul_s, memory_s
from nbdist.planner.hardware.efficiency import PYTORCH_A100, calibration_of
from tests.planner.machines import A100, V5E

SIZES = st.integers(1, 20_000)
CHIPS = st.sampled_from(
    [(A100, PYTORCH_A100), (A100, calibration_of(A100)), (V5E, calibration_of(V5E))]
)
SECONDS = st.floats(0, 10)
RANKS = st.dictionaries(st.integers(1, 64), st.integers(0, 9), max_size=3)


@given(st.integers(1, 64), SIZES, SIZES, SIZES, CHIPS)
def test_products_stay_below_peak_and_take_time(batch, m, n, k, machine) -> None:
    chip, calibration = machine
    seconds = matmul_s(batch, m, n, k, "bfloat16", chip, calibration)
    assert 0 < 2 * batch * m * n * k / seconds / chip.flops["bfloat16"] < 1


@given(st.integers(1, 64), SIZES, SIZES, SIZES, CHIPS)
def test_products_are_never_faster_than_memory(batch, m, n, k, machine) -> None:
    chip, calibration = machine
    operands = batch * ITEM_BYTES["bfloat16"] * (m * k + k * n + m * n)
    assert matmul_s(batch, m, n, k, "bfloat16", chip, calibration) > operands / chip.bytes_per_s


@given(st.integers(1, 64), SIZES, SIZES, st.integers(1, 2000), st.integers(0, 5000), CHIPS)
def test_more_work_is_never_faster(batch, m, n, eighth, more, machine) -> None:
    def seconds(batch: int, m: int, k: int) -> float:
        return matmul_s(batch, m, n, k, "bfloat16", *machine)

    k = 8 * eighth
    assert seconds(batch, m + more, k) >= seconds(batch, m, k)
    assert seconds(batch, m, k + 8 * more) >= seconds(batch, m, k)
    assert seconds(batch + more, m, k) >= seconds(batch, m, k)


@given(SIZES, SIZES, SIZES, CHIPS)
def test_batch_is_never_slower_than_single_products(m, n, k, machine) -> None:
    together = matmul_s(8, m, n, k, "bfloat16", *machine)
    assert together <= 8 * matmul_s(1, m, n, k, "bfloat16", *machine)


def test_unpadded_vocabulary_costs_more_than_padded() -> None:
    ragged = matmul_s(1, 8192, 50257, 1024, "float16", A100, PYTORCH_A100)
    padded = matmul_s(1, 8192, 50304, 1024, "float16", A100, PYTORCH_A100)
    assert ragged > 1.5 * padded


def test_partial_wave_costs_more_than_its_share() -> None:
    square = msgspec.structs.replace(PYTORCH_A100, tiles=((128, 128),), kernel_s=0.0)

    def seconds(tiles: int) -> float:
        return matmul_s(1, 128 * tiles, 9 * 128, 8192, "float16", A100, square)

    assert square.units == 12 * 9
    assert seconds(24) == pytest.approx(2 * seconds(12))
    assert seconds(12) * 13 / 12 < seconds(13) <= seconds(24)


@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (4096, 16384, 4096)])
def test_large_products_approach_the_ceiling(shape) -> None:
    m, n, k = shape
    flops_per_s = 2 * m * n * k / matmul_s(1, m, n, k, "float16", A100, PYTORCH_A100)
    assert flops_per_s == pytest.approx(PYTORCH_A100.matmul_ceiling * 312e12, rel=0.2)


@given(st.floats(0, 1e12), st.floats(0, 1e12), CHIPS)
def test_memory_time_grows_and_respects_bandwidth(few, more, machine) -> None:
    chip, calibration = machine
    assert memory_s(few + more, chip, calibration) >= memory_s(few, chip, calibration)
    assert memory_s(few, chip, calibration) > few / chip.bytes_per_s


@given(SECONDS, st.integers(0, 10_000), RANKS)
def test_host_and_device_overlap_at_best(device_s, operations, ranks) -> None:
    host_s = operations * PYTORCH_A100.dispatch_s
    host_s += sum(ranks.values()) * PYTORCH_A100.collective_dispatch_s
    seconds = issued_s(device_s, operations, ranks, PYTORCH_A100)
    late_s = 64 * sum(ranks.values()) * PYTORCH_A100.straggle_s
    assert max(device_s, host_s) <= seconds
    assert seconds <= (device_s + host_s + late_s) * (1 + 1e-9)


@given(SECONDS, SECONDS, st.integers(0, 1000), st.integers(0, 1000), RANKS)
def test_more_operations_never_finish_earlier(few, more, operations, further, ranks) -> None:
    seconds = issued_s(few, operations, ranks, PYTORCH_A100)
    rounding = 1 + 1e-9
    assert seconds <= issued_s(few + more, operations, ranks, PYTORCH_A100) * rounding
    assert seconds <= issued_s(few, operations + further, ranks, PYTORCH_A100) * rounding


def test_empty_step_takes_no_time() -> None:
    assert issued_s(0.0, 0, {}, PYTORCH_A100) == 0
    assert issued_s(0.0, 0, {}, calibration_of(V5E)) == 0


def test_unsupported_type_is_computed_in_wider_type() -> None:
    flops = {"float32": 15.7e12, "float16": 125e12}
    volta = msgspec.structs.replace(A100, name="V100-16GB", flops=flops)
    wide, narrow = (
        matmul_s(1, 8192, 8192, 8192, dtype, volta, calibration_of(volta))
        for dtype in ("bfloat16", "float16")
    )
    assert wide > 5 * narrow
