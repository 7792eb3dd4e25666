"""Shipped constants against published measurements; `make bench` prints all figures."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from benchmarks.planner_fit import fit, fit_reduces, reduce_times, reduces
from benchmarks.planner_memory import memory_rows
from benchmarks.planner_rows import megatron, one_host
from nbdist.planner.hardware.efficiency import PYTORCH_A100, calibration_of
from tests.planner.machines import A100, V5E


@pytest.mark.parametrize(("rows", "most"), [(one_host(), 0.08), (megatron(), 0.10)])
def test_predicted_step_times_match_measurements(rows, most) -> None:
    errors = [row.seconds(PYTORCH_A100) / row.measured_s - 1 for row in rows]
    assert np.mean(np.abs(errors)) < most


def test_predicted_all_reduces_match_measurements() -> None:
    measured = np.array([int(row["time_ns_out_of_place"]) / 1e9 for row in reduces()])
    assert np.mean(abs(reduce_times(PYTORCH_A100) / measured - 1)) < 0.08


def test_predicted_memory_matches_measurements() -> None:
    for row in memory_rows():
        assert row.peak_bytes() == pytest.approx(row.measured_bytes, rel=0.05), row.case


@pytest.mark.full  # half a minute
def test_shipped_constants_match_a_fit() -> None:
    rows = one_host()
    found = fit(rows[::2], fit_reduces(PYTORCH_A100))
    deviations = [row.seconds(found) / row.seconds(PYTORCH_A100) - 1 for row in rows]
    assert np.mean(np.abs(deviations)) < 0.02


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("V100-32GB", 80),
        ("A100-40GB", 108),
        ("A100-80GB", 108),
        ("H100", 132),
        ("H200", 132),
        ("B200", 148),
        ("GB200", 148),
        ("TPU v4", 8),
        ("TPU v5e", 4),
        ("TPU v5p", 8),
        ("TPU v6e", 8),
    ],
)
def test_chip_name_selects_calibration(name, units) -> None:
    assert calibration_of(msgspec.structs.replace(A100, name=name)).units == units


def test_chip_constants_do_not_depend_on_framework() -> None:
    compiled = calibration_of(A100)
    assert compiled.matmul_ceiling == PYTORCH_A100.matmul_ceiling
    assert compiled.link_efficiency == PYTORCH_A100.link_efficiency
    assert compiled.dispatch_s < PYTORCH_A100.dispatch_s


def test_tpu_and_unknown_chip_have_other_calibrations() -> None:
    unknown = msgspec.structs.replace(V5E, name="a chip of somebody's")
    assert calibration_of(unknown) != calibration_of(V5E)
    assert calibration_of(unknown).units == 1


@pytest.mark.parametrize("name", ["A100-80GB", "TPU v5e", "cpu"])
def test_efficiencies_are_between_zero_and_one(name) -> None:
    calibration = calibration_of(msgspec.structs.replace(A100, name=name))
    for share in (
        calibration.matmul_ceiling,
        calibration.unaligned,
        calibration.memory_efficiency,
        calibration.link_efficiency,
        calibration.network_efficiency,
    ):
        assert 0 < share <= 1
