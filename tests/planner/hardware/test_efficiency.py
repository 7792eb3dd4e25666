"""The constants that ship, against what others have measured; `make bench` has all the figures."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planner_fit import fit, fit_reduces, reduce_times, reduces
from benchmarks.planner_memory import memory_rows
from benchmarks.planner_rows import megatron, one_host
from nbdist.planner.hardware.efficiency import PYTORCH_A100


@pytest.mark.parametrize(("rows", "most"), [(one_host(), 0.08), (megatron(), 0.10)])
def test_step_times(rows, most) -> None:
    errors = [row.seconds(PYTORCH_A100) / row.measured_s - 1 for row in rows]
    assert np.mean(np.abs(errors)) < most


def test_all_reduces() -> None:
    measured = np.array([int(row["time_ns_out_of_place"]) / 1e9 for row in reduces()])
    assert np.mean(abs(reduce_times(PYTORCH_A100) / measured - 1)) < 0.08


def test_memory() -> None:
    for row in memory_rows():
        assert row.peak_bytes() == pytest.approx(row.measured_bytes, rel=0.05), row.case


@pytest.mark.full  # half a minute
def test_what_ships_is_what_is_fitted() -> None:
    rows = one_host()
    found = fit(rows[::2], fit_reduces(PYTORCH_A100))
    apart = [row.seconds(found) / row.seconds(PYTORCH_A100) - 1 for row in rows]
    assert np.mean(np.abs(apart)) < 0.02
