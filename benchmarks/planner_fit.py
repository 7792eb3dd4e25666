"""Fit of the constants of `nbdist.planner.hardware.efficiency` to published measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from benchmarks.planner_rows import SELENE, forget, table
from nbdist.planner.cost.collectives import all_reduce_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.planner.hardware.efficiency import Calibration

Ranges = dict[str, tuple[float, float]]

STEPS: Ranges = {
    "tile_loads": (0.0, 100.0),
    "tile_start": (0.0, 500.0),
    "unaligned": (0.1, 1.0),
    "memory_efficiency": (0.4, 0.95),
    "dispatch_s": (5e-6, 100e-6),
    "collective_dispatch_s": (5e-6, 300e-6),
    "overlap": (1.0, 10.0),
    "straggle_s": (0.0, 500e-6),
}
"""Constants fitted to step times, with their physically possible ranges."""

REDUCES: Ranges = {
    "collective_s": (1e-6, 100e-6),
    "link_efficiency": (0.5, 1.0),
    "local_passes": (0.0, 8.0),
}
"""Constants fitted to separate all-reduces, with their ranges."""

EVALUATIONS = 30
"""Largest number of evaluations of a fit, without those for derivatives."""

_SCALE = 0.05
"""Relative error beyond which the loss is linear instead of quadratic."""


class Measured(Protocol):
    """Measured step."""

    @property
    def measured_s(self) -> float: ...

    def seconds(self, calibration: Calibration) -> float: ...


def fit(
    rows: Sequence[Measured],
    start: Calibration,
    ranges: Ranges = STEPS,
    *,
    evaluations: int = EVALUATIONS,
) -> Calibration:
    """Return `start` with the constants that fit the rows best, within their ranges."""
    measured = np.array([row.measured_s for row in rows])

    def errors(calibration: Calibration) -> np.ndarray:
        forget()
        predicted = np.array([row.seconds(calibration) for row in rows])
        return np.asarray(np.log(predicted / measured))

    return _fit(errors, start, ranges, evaluations)


def fit_reduces(start: Calibration, evaluations: int = EVALUATIONS) -> Calibration:
    """Return `start` with the constants of `REDUCES` that best fit NCCL's all-reduces on A100s."""
    measured = np.array([float(row["time_ns_out_of_place"]) / 1e9 for row in reduces()])

    def errors(calibration: Calibration) -> np.ndarray:
        return np.asarray(np.log(reduce_times(calibration) / measured))

    return _fit(errors, start, REDUCES, evaluations)


def reduces() -> list[dict[str, str]]:
    return table("a100_nccl_allreduce")


def reduce_times(calibration: Calibration) -> np.ndarray:
    """Return the seconds of each row of `reduces`."""
    return np.array(
        [
            all_reduce_s(int(row["bytes"]), (int(row["n_gpus_one_node"]), 1), SELENE, calibration)
            for row in reduces()
        ]
    )


def _fit(
    errors: Callable[[Calibration], np.ndarray],
    start: Calibration,
    ranges: Ranges,
    evaluations: int,
) -> Calibration:
    """Fit by least squares of logarithms, with each constant as a fraction of its range."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    low, high = (np.array(side) for side in zip(*ranges.values(), strict=True))

    def made(shares: np.ndarray) -> Calibration:
        values = low + shares * (high - low)
        found = dict(zip(ranges, map(float, values), strict=True))
        return msgspec.structs.replace(start, **found)

    first = np.array([getattr(start, name) for name in ranges])
    found = least_squares(
        lambda shares: errors(made(shares)),
        np.clip((first - low) / (high - low), 0.01, 0.99),
        bounds=(0, 1),
        loss="soft_l1",
        f_scale=_SCALE,
        diff_step=0.01,
        max_nfev=evaluations,
    )
    return made(found.x)
