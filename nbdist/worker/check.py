"""One step on one replica against the same step on all: `--check`.

Three steps on a single replica tell what a difference means. With all rows it is what should come
out. With the rows in reverse order it shows how much rounding alone changes, which optimizers that
divide by small gradients amplify. With this rank's rows alone it shows what a step would do that
never asked the other replicas. The same step on all replicas is then compared with these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from nbdist.records import Difference
from nbdist.worker.data import map_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.worker.data import Batch, Tree

Values = dict[str, np.ndarray]

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "complex128": 1e-9, "complex64": 1e-5}
COARSE_TOLERANCE = 1e-2
"""For float16 and bfloat16, of 11 and 8 bits."""

_NOISE_MARGIN = 8
_MOST_NOISE = 0.05
"""Of a change; what differs more than that with the order of the rows is no rounding."""
_RATIO_TOLERANCE = 0.02
_OF_BATCH_NORM = ("batch_norm", "batchnorm", "moving")


class Outcome(msgspec.Struct, frozen=True):
    """After a step: the scalars that it reported, as on all replicas, and the variables."""

    report: Values
    state: Values


class Subject(Protocol):
    """A step that can be tried out; its state stays as it is."""

    def state(self) -> Values:
        """The variables before the step."""
        ...

    def alone(self, values: tuple[Tree, ...]) -> Outcome:
        """A step on one replica with these rows, asking no other."""
        ...

    def together(self, batch: Batch) -> Outcome:
        """A step on all replicas."""
        ...


class Findings(msgspec.Struct, frozen=True):
    """How the values differ, and what that looks like."""

    differences: tuple[Difference, ...]
    causes: tuple[str, ...]


def compare(subject: Subject, batch: Batch, replicas: int, *, coarse: bool) -> Findings:
    """Try a batch in all ways.

    Args:
        subject: the step.
        batch: the first of the run.
        replicas: how many share it.
        coarse: the model computes in less than float32.
    """
    before = subject.state()
    whole = batch.everything()
    one = subject.alone(whole)
    noise = subject.alone(map_arrays(lambda array: array[::-1], whole))
    local = subject.alone(batch.values)
    every = subject.together(batch)
    reports = [
        _difference(name, value, every.report[name], 0 * value, value, coarse=coarse, reported=True)
        for name, value in one.report.items()
    ]
    variables = [
        _difference(
            name,
            value,
            every.state[name],
            before[name],
            noise.state[name],
            coarse=coarse,
            reported=False,
        )
        for name, value in one.state.items()
    ]
    wrong = [d.name for d in variables if not d.passes]
    causes = _causes(before, one, every, local, noise, wrong, replicas)
    failed = wrong or not all(d.passes for d in reports)
    return Findings((*reports, *variables), tuple(causes) if failed else ())


def _difference(
    name: str,
    one: np.ndarray,
    every: np.ndarray,
    before: np.ndarray,
    noise: np.ndarray,
    *,
    coarse: bool,
    reported: bool,
) -> Difference:
    """The largest difference, relative to the largest change that the step makes.

    What rounding alone changes is within the tolerance.
    """
    tolerance = _tolerance(one.dtype, coarse=coarse)
    change, off, rounding = _span(one, before), _span(every, one), _span(noise, one)
    size = _span(one, np.zeros_like(one))
    epsilon = float(np.finfo(one.dtype).eps) if one.dtype.kind == "f" else 0.0
    rounding = min(_NOISE_MARGIN * rounding, _MOST_NOISE * change)
    allowed = max(tolerance * change, rounding, _NOISE_MARGIN * epsilon * size)
    if change == 0:
        largest = 0.0 if off <= allowed else float("inf")
    else:
        largest, tolerance = off / change, max(tolerance, allowed / change)
    return Difference(
        name=name,
        reported=reported,
        shape=one.shape,
        dtype=str(one.dtype),
        largest=largest,
        tolerance=tolerance,
    )


def _tolerance(dtype: np.dtype, *, coarse: bool) -> float:
    if dtype.kind in "iub":
        return 0.0
    return COARSE_TOLERANCE if coarse else TOLERANCES.get(str(dtype), COARSE_TOLERANCE)


def _span(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of an element; infinite where one of both is no number."""
    if not a.size:
        return 0.0
    widest = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
    same_odd = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return 0.0 if same_odd else float(widest) if np.isfinite(widest) else float("inf")


def _causes(
    before: Values,
    one: Outcome,
    every: Outcome,
    local: Outcome,
    noise: Outcome,
    wrong: Sequence[str],
    replicas: int,
) -> list[str]:
    """The mistakes whose signature is seen."""
    causes = []
    ordered = [n for n, value in one.report.items() if not _alike(noise.report[n], value)]
    ordered += [
        name
        for name in wrong
        if _span(noise.state[name], one.state[name])
        > _MOST_NOISE * _span(one.state[name], before[name])
    ]
    if ordered:
        causes.append(
            f"`{ordered[0]}` depends on the order of the rows: where the step draws random numbers "
            "for each sample (dropout, noise), these are others on each replica. That is no "
            "mistake; to check the rest, set the rate to 0."
        )
    ratios = [_ratio(every.state[n] - before[n], one.state[n] - before[n]) for n in wrong]
    ratios += [_ratio(every.report[name], value) for name, value in one.report.items()]
    if any(_near(ratio, replicas) for ratio in ratios):
        causes.append(
            f"Values are {replicas} times too large, the number of replicas: something is added up "
            "over replicas that should be averaged, as a mean over the local batch whose gradients "
            "are summed (all_reduce with SUM)."
        )
    if any(_near(ratio, 1 / replicas) for ratio in ratios):
        causes.append(
            f"Values are {replicas} times too small, the number of replicas: the step adds up over "
            "the batch (reduce_sum), which is a part of it on each replica. Take the mean."
        )
    unasked = [name for name in wrong if _alike(every.state[name], local.state[name])]
    if unasked:
        causes.append(
            f"`{unasked[0]}` is what this replica's own rows give: a reduction over the replicas "
            "is forgotten."
        )
    if any(word in name.lower() for name in wrong for word in _OF_BATCH_NORM):
        causes.append(
            "Statistics of a BatchNorm are taken over each replica's own rows: use Keras's layer, "
            "whose statistics a step cell takes over the whole batch."
        )
    return causes


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-6 if a.dtype != np.float64 else 1e-11, atol=0))


def _ratio(a: np.ndarray, b: np.ndarray) -> float:
    """By how much `a` is larger than `b`, if they are the same but for a factor; else 0."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    square = float(b @ b)
    if not square or not np.isfinite(square):
        return 0.0
    factor = float(a @ b) / square
    rest = float(np.linalg.norm(a - factor * b))
    return factor if rest <= _RATIO_TOLERANCE * float(np.linalg.norm(a)) else 0.0


def _near(ratio: float, factor: float) -> bool:
    return factor != 1 and abs(ratio - factor) <= _RATIO_TOLERANCE * factor
