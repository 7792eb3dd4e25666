"""`--check`: comparison of one step on one replica with the same step on all replicas.

Three steps on a single replica help to explain a difference. The step with all rows gives the
expected result. The step with the rows in reverse order measures rounding; optimizers that divide
by small gradients amplify it. If that does not explain a difference, steps with two other orders
follow, because sums of the same terms in two orders may be equal by chance. The step with this
rank's rows alone gives the result without communication. The step on all replicas is compared with
these.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from msgspec import structs

from nbdist.records import Difference
from nbdist.worker.data.batches import map_arrays

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from nbdist.worker.data.batches import Batch, Tree

Values = dict[str, np.ndarray]

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "complex128": 1e-9, "complex64": 1e-5}
COARSE_TOLERANCE = 1e-2
"""Tolerance for float16 and bfloat16 (11 and 8 bits)."""

_NOISE_MARGIN = 8
_OF_GROUP = 1e-2
"""Part of the largest change in a group below which a change in it may be rounding only.

A bias before a normalization has a gradient of zero, and rounding in place of it.
"""

_OF_ORDER = 1e-3
"""Largest part of a change that the order of the rows may change by rounding.

Optimizers that divide by small gradients amplify rounding to the whole change.
"""

_OF_OTHERS = 200
"""Largest part of a change that other orders may change by rounding, in units of precision.

A step that compares pairs of rows changes with them, but not with the reverse order.
"""

_NO_GROUPS: Mapping[str, str] = types.MappingProxyType({})
_RATIO_TOLERANCE = 0.02
_OF_BATCH_NORM = ("batch_norm", "batchnorm", "moving")


class Outcome(msgspec.Struct, frozen=True):
    """Result of a step: the reported scalars, equal on all replicas, and the variables."""

    report: Values
    state: Values


class Subject(Protocol):
    """A step to try; its state does not change."""

    def state(self) -> Values:
        """Return the variables before the step."""
        ...

    def alone(self, values: tuple[Tree, ...]) -> Outcome:
        """Run a step on one replica with these rows, without communication."""
        ...

    def together(self, batch: Batch) -> Outcome:
        """Run a step on all replicas."""
        ...


class Findings(msgspec.Struct, frozen=True):
    """Differences between the values, and their likely causes.

    Attributes:
        by_ratio: those of the causes that explain a factor of the number of replicas.
        ordered: reported values that depend on the order of the rows, for example on random draws.
        moved: True if the step changes a variable, apart from counters.
    """

    differences: tuple[Difference, ...]
    causes: tuple[str, ...]
    by_ratio: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()
    moved: bool = True


def compare(
    subject: Subject,
    batch: Batch,
    replicas: int,
    *,
    coarse: bool,
    groups: Mapping[str, str] = _NO_GROUPS,
    amplified: Container[str] | None = None,
) -> Findings:
    """Run the step in all ways with one batch, and compare the results.

    Args:
        subject: the step.
        batch: first batch of the run.
        replicas: number of replicas that share the batch.
        coarse: True if the model computes in a lower precision than float32.
        groups: groups of variables whose changes have one scale, by the names of the variables.
        amplified: names of the variables whose optimizer amplifies rounding; None if unknown.
    """
    before = subject.state()
    whole = batch.everything()
    trial = _Trial(
        before=before,
        one=subject.alone(whole),
        reverse=subject.alone(_reversed(whole, batch.divided)),
        local=subject.alone(batch.values),
        every=subject.together(batch),
        replicas=replicas,
        coarse=coarse,
        groups=groups,
        amplified=amplified,
    )
    found = trial.findings()
    if all(difference.passes for difference in found.differences):
        return found
    others = tuple(map(subject.alone, _reordered(whole, batch.divided, batch.rows)))
    return structs.replace(trial, others=others).findings()


def _reversed(whole: tuple[Tree, ...], divided: int | None) -> tuple[Tree, ...]:
    """Return the arguments of a step with their rows in reverse order."""
    rows = map_arrays(lambda array: array[::-1], whole[:divided])
    return (*rows, *(() if divided is None else whole[divided:]))


def _reordered(whole: tuple[Tree, ...], divided: int | None, rows: int) -> Iterator[Any]:
    """Yield the arguments of a step with their rows in two further orders.

    Rows that NumPy cannot index, such as ragged ones, have none.
    """
    indexes = np.arange(rows)
    for order in (np.roll(indexes, rows // 2), np.concatenate([indexes[::2], indexes[1::2]])):
        try:
            parts = map_arrays(lambda array: np.asarray(array)[order], whole[:divided])  # noqa: B023
        except (TypeError, ValueError, IndexError):
            return
        yield (*parts, *(() if divided is None else whole[divided:]))


class _Trial(msgspec.Struct, frozen=True):
    """Results of a step in all ways with one batch.

    Attributes:
        others: results with the rows in further orders.
    """

    before: Values
    one: Outcome
    reverse: Outcome
    local: Outcome
    every: Outcome
    replicas: int
    coarse: bool
    groups: Mapping[str, str]
    amplified: Container[str] | None
    others: tuple[Outcome, ...] = ()

    def findings(self) -> Findings:
        sizes = self._report_sizes()
        ordered = [n for n in self.one.report if self._is_ordered(n, sizes[n])]
        reports = [self._of_report(name, sizes[name]) for name in self.one.report]
        changes = self._changes()
        variables = [
            self._of_variable(name, changes[name], rounds=not ordered) for name in self.one.state
        ]
        wrong = [d.name for d in variables if not d.passes]
        failed = wrong or not all(d.passes for d in reports)
        by_ratio = self._of_ratio(wrong) if failed else []
        causes = self._causes(ordered, wrong, by_ratio) if failed else []
        moved = any(
            after.dtype.kind not in "iub" and _span(after, self.before[name]) > 0
            for name, after in self.one.state.items()
        )
        differences = *reports, *variables
        return Findings(differences, tuple(causes), tuple(by_ratio), tuple(ordered), moved)

    def _report_sizes(self) -> dict[str, float]:
        """Return the sizes of the reported values. `grads[0]` and `grads[1]` are one group."""
        sizes = {name: _size(value) for name, value in self.one.report.items()}
        return _at_least(sizes, {name: name.partition("[")[0] for name in sizes})

    def _changes(self) -> dict[str, float]:
        """Return the largest change of an element of each variable."""
        found = {name: _span(after, self.before[name]) for name, after in self.one.state.items()}
        return _at_least(found, self.groups)

    def _of_report(self, name: str, size: float) -> Difference:
        """Compare a reported value, relative to the value itself."""
        one = self.one.report[name]
        return self._difference(name, one, self.every.report[name], size, 0.0)

    def _of_variable(self, name: str, change: float, *, rounds: bool) -> Difference:
        """Compare a variable, relative to the largest change of an element.

        A change with the order of the rows counts as rounding, unless reported values change too,
        or it is too large for rounding.
        """
        one = self.one.state[name]
        epsilon = float(np.finfo(one.dtype).eps) if one.dtype.kind == "f" else 0.0
        reordered = _span(self.reverse.state[name], one) if rounds else 0.0
        if self.amplified is not None and name not in self.amplified:
            reordered = min(reordered, _OF_ORDER * change)
        spans = (_span(other.state[name], one) for other in self.others if rounds)
        further = min(max(spans, default=0.0), _OF_OTHERS * epsilon * change)
        rounding = max(epsilon * _size(one), reordered, further)
        return self._difference(
            name, one, self.every.state[name], change, _NOISE_MARGIN * rounding, reported=False
        )

    def _difference(
        self,
        name: str,
        one: np.ndarray,
        every: np.ndarray,
        change: float,
        rounding: float,
        *,
        reported: bool = True,
    ) -> Difference:
        off, tolerance = _span(every, one), self._tolerance(one.dtype)
        if change:
            largest, tolerance = off / change, max(tolerance, rounding / change)
        else:
            largest = 0.0 if off <= rounding else float("inf")
        return Difference(
            name=name,
            reported=reported,
            shape=one.shape,
            dtype=str(one.dtype),
            largest=largest,
            tolerance=tolerance,
        )

    def _tolerance(self, dtype: np.dtype) -> float:
        if dtype.kind in "iub":
            return 0.0
        return COARSE_TOLERANCE if self.coarse else TOLERANCES.get(str(dtype), COARSE_TOLERANCE)

    def _is_ordered(self, name: str, size: float) -> bool:
        """Return True if a reported value depends on the order of the rows, except for its own."""
        value, reverse = self.one.report[name], self.reverse.report[name]
        own = reverse[::-1] if reverse.ndim else reverse
        limit = _NOISE_MARGIN * self._tolerance(value.dtype) * size
        return min(_span(reverse, value), _span(own, value)) > limit

    def _alike(self, a: np.ndarray, b: np.ndarray) -> bool:
        equal_shapes = a.shape == b.shape
        return equal_shapes and bool(np.allclose(a, b, rtol=self._tolerance(b.dtype), atol=0))

    def _causes(
        self, ordered: Sequence[str], wrong: Sequence[str], by_ratio: Sequence[str]
    ) -> list[str]:
        """Return the mistakes that match the differences."""
        causes = []
        if ordered:
            causes.append(
                f"`{ordered[0]}` depends on the order of the rows. If the step draws random "
                "numbers with a stateful operation (tf.random.normal), each trial draws other "
                "numbers: this is no mistake. To check the rest, use Keras layers or "
                "tf.random.stateless_* with a seed, or set the rate to 0."
            )
        causes += by_ratio
        unasked = [n for n in wrong if self._alike(self.every.state[n], self.local.state[n])]
        if unasked:
            causes.append(
                f"`{unasked[0]}` is computed from this replica's own rows only: add a reduction "
                "over the replicas."
            )
        if not by_ratio and any(word in n.lower() for n in wrong for word in _OF_BATCH_NORM):
            causes.append(
                "Statistics of a BatchNorm are computed over each replica's own rows: use the "
                "Keras layer, whose statistics a step cell computes over the whole batch."
            )
        return causes

    def _of_ratio(self, wrong: Sequence[str]) -> list[str]:
        """Return the mistakes that change values by a factor of the number of replicas."""
        before, one, every, replicas = self.before, self.one, self.every, self.replicas
        with np.errstate(invalid="ignore"):  # an infinite element that does not change
            ratios = [_ratio(every.state[n] - before[n], one.state[n] - before[n]) for n in wrong]
        ratios += [_ratio(every.report[name], value) for name, value in one.report.items()]
        causes = []
        if any(_near(ratio, replicas) for ratio in ratios):
            causes.append(
                f"Values are {replicas} times too large, the number of replicas: the step sums "
                "over replicas what should be averaged, for example the gradients of a mean over "
                "the local batch (all_reduce with SUM)."
            )
        if any(_near(ratio, 1 / replicas) for ratio in ratios):
            causes.append(
                f"Values are {replicas} times too small, the number of replicas: the step sums "
                "over the batch (reduce_sum), but each replica has only a part of it. Take the "
                "mean."
            )
        return causes


def _at_least(sizes: dict[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    """Raise sizes that are small in their group."""
    largest: dict[str, float] = {}
    for name, group in groups.items():
        size = sizes.get(name, 0.0)
        if np.isfinite(size):
            largest[group] = max(size, largest.get(group, 0.0))
    return {
        name: max(size, _OF_GROUP * largest.get(groups.get(name, ""), 0.0))
        for name, size in sizes.items()
    }


def _size(a: np.ndarray) -> float:
    """Return the largest magnitude of the finite elements; 0 without finite elements."""
    sizes = np.abs(_wide(a))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _span(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of an element.

    It is infinite if only one of both is finite, or if the shapes differ.
    """
    a, b = _wide(a), _wide(b)
    if a.shape != b.shape:
        return float("inf")
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    widest = float(np.abs(a[differs] - b[differs]).max(initial=0.0))
    return widest if np.isfinite(widest) else float("inf")


def _ratio(a: np.ndarray, b: np.ndarray) -> float:
    """Return the factor from `b` to `a` if they are proportional, else 0."""
    a, b = _wide(a).ravel(), _wide(b).ravel()
    if a.shape != b.shape:
        return 0.0
    square = float(np.vdot(b, b).real)
    if not square or not np.isfinite(square):
        return 0.0
    factor = float(np.vdot(b, a).real) / square
    rest = float(np.linalg.norm(a - factor * b))
    return factor if rest <= _RATIO_TOLERANCE * float(np.linalg.norm(a)) else 0.0


def _wide(a: np.ndarray) -> np.ndarray:
    """Convert numbers of any type to 64-bit floats, or to complex numbers of those."""
    return np.asarray(a, np.complex128 if a.dtype.kind == "c" else np.float64)


def _near(ratio: float, factor: float) -> bool:
    return factor != 1 and abs(ratio - factor) <= _RATIO_TOLERANCE * factor
