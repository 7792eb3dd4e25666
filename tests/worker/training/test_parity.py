"""`--check`: tolerances of a comparison, and the mistakes that explain a difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.worker.data.batches import RankRows, slicer
from nbdist.worker.training.parity import COARSE_TOLERANCE, TOLERANCES, Findings, Outcome, compare

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.data.batches import Batch

REPLICAS = 2
ROWS = np.arange(1.0, 5.0)


class Descent:
    """A step that moves a weight by the mean of its rows.

    Args:
        every: returns the weight and the loss on all replicas from those on one replica.
        dtype: type of the weight.
        name: name of the weight.
        alone: returns the change of the weight for some rows.
    """

    def __init__(
        self,
        every: Callable[[Any, Any], tuple[Any, Any]] = lambda w, loss: (w, loss),
        dtype: str = "float64",
        name: str = "w",
        alone: Callable[[np.ndarray], Any] = np.mean,
    ) -> None:
        self._every, self._dtype, self._name, self._alone = every, dtype, name, alone
        self.before = np.array([10.0, 0.0], dtype)

    def _outcome(self, weight: Any, loss: Any) -> Outcome:
        state = {self._name: np.asarray(weight, self._dtype)}
        return Outcome({"loss": np.asarray(loss, self._dtype)}, state)

    def _step(self, rows: np.ndarray) -> tuple[Any, Any]:
        return self.before + np.array([1.0, 0.5]) * self._alone(rows), rows.mean()

    def state(self) -> dict[str, np.ndarray]:
        return {self._name: self.before}

    def alone(self, values: tuple[np.ndarray, ...]) -> Outcome:
        return self._outcome(*self._step(values[0]))

    def together(self, batch: Batch) -> Outcome:
        return self._outcome(*self._every(*self._step(batch.everything()[0])))


def findings(
    subject: Descent, *, coarse: bool = False, rank: int = 0, replicas: int = REPLICAS
) -> Findings:
    rank_rows = RankRows(rank=rank, ranks=replicas, replicas=replicas)
    return compare(subject, rank_rows.batch(len(ROWS), slicer((ROWS,))), replicas, coarse=coarse)


def cause(found: Findings) -> str:
    (text,) = found.causes
    return text


def test_equal_results_have_no_cause() -> None:
    found = findings(Descent())
    assert [(d.name, d.reported, d.largest) for d in found.differences] == [
        ("loss", True, 0.0),
        ("w", False, 0.0),
    ]
    assert all(d.passes for d in found.differences)
    assert not found.causes


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("part", "passes"), [(0.5, True), (20.0, False)])
def test_difference_is_relative_to_the_largest_change(
    dtype: str, part: float, passes: bool
) -> None:
    off = part * TOLERANCES[dtype] * ROWS.mean()
    found = findings(Descent(lambda w, loss: (w + np.array([0, off]), loss), dtype))
    weight = found.differences[1]
    assert weight.passes is passes
    assert weight.tolerance >= TOLERANCES[dtype]
    assert weight.dtype == dtype


@pytest.mark.parametrize(("off", "is_rounding"), [(1e-4, True), (1e-2, False)])
def test_rounding_that_two_orders_hide_by_chance_is_found_in_others(
    off: float, is_rounding: bool
) -> None:

    def mean(rows: np.ndarray) -> float:
        steps = np.diff(rows)
        is_hidden = (steps > 0).all() or (steps < 0).all()
        return float(rows.mean()) + (0 if is_hidden else off)

    def every(weight: np.ndarray, loss: float) -> tuple[Any, Any]:
        return weight + np.array([off, off / 2]), loss

    found = findings(Descent(every, "float32", alone=mean))
    assert [d.passes for d in found.differences] == [True, is_rounding]
    wrong = findings(Descent(every, "float32"))
    assert [d.passes for d in wrong.differences] == [True, False]


def test_reported_value_is_compared_relative_to_itself() -> None:
    for part, passes in ((0.5, True), (2.0, False)):
        found = findings(Descent(lambda w, loss: (w, loss * (1 + part * 1e-9))))  # noqa: B023
        assert found.differences[0].passes is passes


def test_lower_precision_has_a_coarse_tolerance() -> None:
    subject = Descent(lambda w, loss: (w, loss * (1 + COARSE_TOLERANCE / 2)))
    assert not findings(subject).differences[0].passes
    assert findings(subject, coarse=True).differences[0].passes


def test_integers_must_be_equal() -> None:
    found = findings(Descent(lambda w, loss: (w + 1, loss), "int64"), coarse=True)
    assert (found.differences[1].tolerance, found.differences[1].passes) == (0.0, False)


def test_unchanged_variable_must_stay_unchanged() -> None:
    still = Descent(alone=lambda rows: 0.0)
    for still.before in (np.zeros(2), np.full(2, 10.0)):
        assert findings(still).differences[1].largest == 0.0
    moved = Descent(lambda w, loss: (w + 1e-3, loss), alone=lambda rows: 0.0)
    assert findings(moved).differences[1].largest == np.inf


def test_equal_infinite_values_are_no_difference() -> None:
    subject = Descent(alone=lambda rows: np.array([np.inf, np.nan]))
    assert [(d.largest, d.passes) for d in findings(subject).differences] == [(0.0, True)] * 2
    found = findings(Descent(lambda w, loss: (np.full(2, np.nan), np.nan)))
    assert [d.largest for d in found.differences] == [np.inf, np.inf]


@pytest.mark.parametrize(("part", "passes"), [(0.5, True), (20.0, False)])
def test_infinite_element_does_not_hide_other_elements(part: float, passes: bool) -> None:
    """The state of a minimum, or a mask of attention, may contain infinite elements."""
    off = np.array([0.0, part * TOLERANCES["float64"]])
    subject = Descent(lambda w, loss: (w + off, loss), alone=lambda rows: np.array([1.0, 2.0]))
    subject.before = np.array([-np.inf, 0.0])
    assert findings(subject).differences[1].passes is passes


def test_group_without_finite_changes_is_compared() -> None:
    subject = Descent(alone=lambda rows: np.inf * rows.mean())
    batch = RankRows(rank=0, ranks=2, replicas=2).batch(len(ROWS), slicer((ROWS,)))
    found = compare(subject, batch, 2, coarse=False, groups={"w": "variables of optimizer 0"})
    assert [d.passes for d in found.differences] == [True, True]


def test_imaginary_parts_are_compared() -> None:
    subject = Descent(lambda w, loss: (w + 1j, loss), "complex128")
    (_, weight) = findings(subject).differences
    assert weight.largest == pytest.approx(1 / 2.5)
    turned = Descent(lambda w, loss: (10 + REPLICAS * (w - 10), loss), "complex64")
    turned.before = np.full(2, 10, "complex64")
    turned._alone = lambda rows: np.array([1j, 2j])
    assert cause(findings(turned)).startswith(f"Values are {REPLICAS} times too large")


def test_change_with_the_order_of_rows_is_rounding() -> None:
    """The loss is the same in both orders, and the weight differs as much as between orders."""
    noise = 1e-4
    subject = Descent(
        lambda w, loss: (w + np.array([4 * noise, 0]), loss),
        alone=lambda rows: rows.mean() + noise * (rows[0] < rows[-1]),
    )
    assert findings(subject).differences[1].passes


def test_sum_over_replicas_is_recognized() -> None:
    before = Descent().before
    subject = Descent(lambda w, loss: (before + REPLICAS * (w - before), loss))
    assert cause(findings(subject)).startswith(f"Values are {REPLICAS} times too large")


def test_factor_has_one_cause_in_a_batch_norm() -> None:
    before = Descent().before
    subject = Descent(lambda w, loss: (before + REPLICAS * (w - before), loss), name="batch_norm")
    assert cause(findings(subject)).startswith(f"Values are {REPLICAS} times too large")


def test_small_difference_on_one_replica_is_no_factor() -> None:
    found = findings(Descent(lambda w, loss: (w, loss * 1.001)), replicas=1)
    assert not found.differences[0].passes
    assert not found.causes


def test_sum_over_the_batch_is_recognized() -> None:
    found = findings(Descent(lambda w, loss: (w, loss / REPLICAS)))
    assert cause(found).startswith(f"Values are {REPLICAS} times too small")


def test_missing_reduction_is_recognized() -> None:
    for rank in range(REPLICAS):
        half = ROWS[2 * rank : 2 * rank + 2]
        subject = Descent()
        own = subject.before + np.array([1.0, 0.5]) * half.mean()
        found = findings(Descent(lambda w, loss: (own, loss)), rank=rank)  # noqa: B023
        assert cause(found).startswith("`w` is computed from this replica's own rows only")


def test_statistics_of_a_batch_norm_are_recognized() -> None:
    found = findings(Descent(lambda w, loss: (w + 0.3, loss), name="Moving_mean"))
    assert cause(found).startswith("Statistics of a BatchNorm are computed")
    assert not findings(Descent(lambda w, loss: (w + 0.3, loss), name="w")).causes


class Drawn(Descent):
    """A step whose loss depends on the order of the rows.

    Args:
        loss: loss on all replicas.
    """

    def __init__(self, loss: float) -> None:
        super().__init__(lambda w, _: (w, loss))

    def _step(self, rows: np.ndarray) -> tuple[Any, Any]:
        return self.before + 1.0, rows[0]


def test_dependence_on_the_order_is_recognized() -> None:
    assert cause(findings(Drawn(33.0))).startswith("`loss` depends on the order of the rows.")
    assert not findings(Drawn(ROWS[0])).causes
