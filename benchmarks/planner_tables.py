"""Predictions of the planner's cost model for published measurements.

Ours is the model's error. The peer is the error of the floor: operations at peak rate, and 18 bytes
per weight. For rank correlations, the figure is 1 minus the correlation. Rows:
benchmarks/reference/README.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.case import Case
from benchmarks.planner_fit import EVALUATIONS, STEPS, fit, fit_reduces, reduce_times, reduces
from benchmarks.planner_llama import B200, llama
from benchmarks.planner_memory import memory_rows
from benchmarks.planner_rows import A100, megatron, one_host, table
from nbdist.planner.cost.collectives import all_reduce_s
from nbdist.planner.hardware.efficiency import PYTORCH_A100, calibration_of
from nbdist.records.topology import Level, Topology

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from benchmarks.case import Scale
    from benchmarks.planner_rows import Row
    from nbdist.records.topology import Extent

STEP_ERROR = 0.08
MEGATRON_ERROR = 0.10
REDUCE_ERROR = 0.08
MEMORY_ERROR = 0.05
CORRELATION = 0.98
MORE_MEAN, MORE_WORST = 0.03, 0.15
"""Allowed excess of the picked plan over the fastest measured one."""

_BUS = "allreduce_bandwidth"
_NVLINK = Level(name="host", size=8, latency_s=3.4e-6, bytes_per_s=200e9)
_NICS = Level(name="network", size=2, latency_s=14e-6, bytes_per_s=8.13e9)
_TWO_HOSTS = Topology(chip=A100, levels=(_NVLINK, _NICS))
_WHOLE_NICS = msgspec.structs.replace(PYTORCH_A100, network_efficiency=1.0)
"""The figure is the measured bandwidth of a pair, not the nominal one of a NIC."""

_SMALLER = "llama3_70b"
_OTHER_CHIP = {"matmul_ceiling": (0.3, 0.95), "dispatch_s": STEPS["dispatch_s"]}

_FIRST_HALF = ("1024 x 12", "1024 x 20", "2048 x 16", "2048 x 24")
_NARROW = "1024"


def cases(scale: Scale) -> Iterator[Case]:
    evaluations = scale.of(EVALUATIONS, 1)
    rows = one_host()
    measured = np.array([row.measured_s for row in rows])
    floor = np.array([row.floor_s() for row in rows])
    halves = np.array([row.model in _FIRST_HALF for row in rows])
    predicted = _across(rows, halves, evaluations)
    yield _errors("one A100 host, fitted on other models", predicted, floor, measured, STEP_ERROR)
    narrow = np.array([row.model.startswith(_NARROW) for row in rows])
    wide = ~narrow
    learned = _across(rows, narrow, evaluations)
    yield _errors(
        "models twice as wide as those fitted on",
        learned[wide], floor[wide], measured[wide], STEP_ERROR,
    )  # fmt: skip
    yield from _ranks(rows, predicted, floor, measured)
    yield from _picks(rows, predicted, floor, measured)
    yield _megatron()
    yield _blackwell(evaluations)
    yield _reduces()
    yield _placements()
    yield _memory()


def _across(rows: Sequence[Row], first: np.ndarray, evaluations: int) -> np.ndarray:
    """Return seconds of each row, with constants fitted to the rows of the other side."""
    predicted = np.zeros(len(rows))
    start = fit_reduces(PYTORCH_A100, evaluations)
    for side in (first, ~first):
        own = [row for row, ours in zip(rows, side, strict=True) if ours]
        found = fit(own, start, evaluations=evaluations)
        for index in map(int, np.flatnonzero(~side)):
            predicted[index] = rows[index].seconds(found)
    return predicted


def _errors(
    name: str, predicted: np.ndarray, floor: np.ndarray, measured: np.ndarray, wanted: float
) -> Case:
    ours, peer = (float(np.mean(abs(side / measured - 1))) for side in (predicted, floor))
    return _case(f"mean error, {name}", ours, peer, "of measured", wanted, len(measured))


def _ranks(
    rows: Sequence[Row], predicted: np.ndarray, floor: np.ndarray, measured: np.ndarray
) -> Iterator[Case]:
    ours, peer = (1 - spearman(side, measured) for side in (predicted, floor))
    wanted = 1 - CORRELATION
    yield _case("1 - rank correlation, all steps", ours, peer, "", wanted, len(rows))
    models = _groups([row.model for row in rows])
    each = [
        [1 - spearman(side[index], measured[index]) for side in (predicted, floor)]
        for index in models
    ]
    ours, peer = (max(values) for values in zip(*each, strict=True))
    yield _case("1 - rank correlation, worst model", ours, peer, "", wanted, len(models))


def _picks(
    rows: Sequence[Row], predicted: np.ndarray, floor: np.ndarray, measured: np.ndarray
) -> Iterator[Case]:
    """Yield the excess of the predicted fastest plan over the measured fastest one.

    The floor is equal for all plans with the same number of devices, so it picks the first one.
    """
    asked: dict[str, list[Hashable]] = {
        "for a model, devices and batch": [(row.model, row.devices, row.batch) for row in rows],
        "for a model, by samples a second": [row.model for row in rows],
    }
    batches = np.array([row.batch for row in rows])
    for name, keys in asked.items():
        groups = _groups(keys)
        ours, peer = (
            _more(groups, side / batches, measured / batches) for side in (predicted, floor)
        )
        picked, over, runs = f"plan picked {name}", "over the best", len(groups)
        yield _case(f"{picked}, mean", ours.mean(), peer.mean(), over, MORE_MEAN, runs)
        yield _case(f"{picked}, worst", ours.max(), peer.max(), over, MORE_WORST, runs)


def _case(name: str, ours: float, peer: float, unit: str, wanted: float, runs: int) -> Case:
    """Return a case that is met if `ours` is at most `wanted`."""
    return Case(name, float(ours), float(peer), unit, round(wanted / float(peer), 4), runs)


def _more(groups: list[np.ndarray], predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return np.array(
        [measured[index][predicted[index].argmin()] / measured[index].min() - 1 for index in groups]
    )


def _megatron() -> Case:
    rows = megatron()
    predicted = np.array([row.seconds(PYTORCH_A100) for row in rows])
    measured = np.array([row.measured_s for row in rows])
    floor = np.array([row.floor_s() for row in rows])
    name = "Megatron's table 1, no constant fitted on it"
    return _errors(name, predicted, floor, measured, MEGATRON_ERROR)


def _blackwell(evaluations: int) -> Case:
    """Another GPU, host and program: two constants fitted to the smaller model only."""
    rows = llama()
    start = msgspec.structs.replace(PYTORCH_A100, units=calibration_of(B200).units)
    smaller = [row for row in rows if row.model == _SMALLER]
    larger = [row for row in rows if row.model != _SMALLER]
    found = fit(smaller, start, _OTHER_CHIP, evaluations=evaluations)
    predicted = np.array([row.seconds(found) for row in larger])
    floor = np.array([row.floor_s() for row in larger])
    measured = np.array([row.measured_s for row in larger])
    name = "Llama 3 405B on B200s, two constants from 70B"
    return _errors(name, predicted, floor, measured, STEP_ERROR)


def _reduces() -> Case:
    """All-reduces. The floor is bytes over bandwidth of the links."""
    rows = reduces()
    ranks = np.array([int(row["n_gpus_one_node"]) for row in rows])
    nbytes = np.array([int(row["bytes"]) for row in rows])
    measured = np.array([int(row["time_ns_out_of_place"]) / 1e9 for row in rows])
    floor = 2 * (ranks - 1) / ranks * nbytes / 300e9
    predicted = reduce_times(PYTORCH_A100)
    return _errors("NCCL's all-reduces, fitted on these", predicted, floor, measured, REDUCE_ERROR)


def _placements() -> Case:
    """All-reduces on two hosts of eight GPUs with NVLink of 200 GB/s.

    The network figure comes from one row that is not counted. The GPU type is not published: groups
    in one host are as fast as the constants of A100s predict for A800s. The floor is bytes over
    bandwidth of the links that a group crosses.
    """
    rows = [row for row in table("galvatron_allreduce_by_placement") if _extent(row) != (1, 2)]
    ranks = np.array([int(row["group_size"]) for row in rows])
    measured = 2 * (ranks - 1) / ranks / np.array([float(row[_BUS]) for row in rows])
    predicted = np.array([all_reduce_s(1e9, _extent(row), _TWO_HOSTS, _WHOLE_NICS) for row in rows])
    rates = np.array([200 if _extent(row)[1] == 1 else 8.13 * _extent(row)[0] for row in rows])
    name = "all-reduces by placement, 1 GB"
    return _errors(name, predicted, 2 * (ranks - 1) / ranks / rates, measured, REDUCE_ERROR)


def _extent(row: dict[str, str]) -> Extent:
    ranks, hosts = int(row["group_size"]), int(row["nodes"])
    crossing = hosts > 1 and (row["consecutive_ranks"] == "0" or ranks > _TWO_HOSTS.levels[0].size)
    return (ranks // hosts, hosts) if crossing else (ranks, 1)


def _memory() -> Case:
    rows = memory_rows()
    predicted = np.array([row.peak_bytes() for row in rows])
    measured = np.array([row.measured_bytes for row in rows])
    floor = np.array([row.floor_bytes() for row in rows])
    return _errors("memory on B200s, no constant fitted", predicted, floor, measured, MEMORY_ERROR)


def _groups(keys: Sequence[Hashable]) -> list[np.ndarray]:
    """Return the indexes of rows with equal keys, for keys that occur more than once."""
    found: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return [np.array(indexes) for indexes in found.values() if len(indexes) > 1]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Return the rank correlation of two series."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    return float(spearmanr(one, other).statistic)
