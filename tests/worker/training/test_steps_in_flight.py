"""Steps under way: order of their reports, epoch sums, and values that are not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import AnotherRankError, StepError
from nbdist.worker.checkpoint.folder import Position
from nbdist.worker.data.batches import Batch
from nbdist.worker.training import steps_in_flight, trace_schedule
from nbdist.worker.training.step_contract import StepResult
from nbdist.worker.training.steps_in_flight import IN_FLIGHT, StepsInFlight
from tests.clock import replace_time
from tests.worker.doubles import Recorder, SumStep

if TYPE_CHECKING:
    from nbdist.records import OnNan

NAN = StepResult({"loss": math.nan, "accuracy": 0.5}, finite=False)
ANOTHER = StepResult({"loss": 1.0}, finite=False, reason="a gradient is not finite")


def in_flight(
    step: SumStep, on_nan: OnNan = "stop", rank: int = 0
) -> tuple[StepsInFlight, Recorder]:
    reporter: Any = Recorder(rank)
    return StepsInFlight(reporter, step, (), on_nan), reporter


def batch_of(*rows: float) -> Batch:
    values = (np.array(rows),)
    return Batch(values, len(rows), whole=False, everything=lambda: values)


def begin(flight: StepsInFlight, step: int, *rows: float, at: Position | None = None) -> None:
    position = at or Position(step=step, epoch=2, batches=step)
    flight.begin(position, batch_of(*(rows or (step,))), input_s=0.25)


def test_only_steps_beyond_the_limit_are_waited_for() -> None:
    step = SumStep()
    flight, reporter = in_flight(step)
    for number in range(1, IN_FLIGHT + 1):
        begin(flight, number)
        flight.read_oldest()
    assert len(flight) == IN_FLIGHT
    assert not reporter.values
    begin(flight, IN_FLIGHT + 1)
    flight.read_oldest()
    assert len(flight) == IN_FLIGHT
    assert [(one.epoch, one.step, one.own) for one in reporter.values] == [(2, 1, {"loss": 1.0})]
    flight.read_all()
    assert len(flight) == 0
    assert [one.step for one in reporter.values] == [1, 2, 3]


def test_sums_of_an_epoch_are_weighted_by_rows() -> None:
    flight, _ = in_flight(SumStep())
    first = Position(step=1, epoch=1, batches=1)
    second = Position(step=2, epoch=1, batches=2, sums=first.sums)
    begin(flight, 1, 1.0, 3.0, at=first)
    begin(flight, 2, 8.0, at=second)
    flight.read_all()
    assert first.sums == {"loss": 2 * 2.0 + 8.0}


@pytest.mark.parametrize("reduced", [False, True])
def test_values_are_shared_if_the_strategy_reduces_them(reduced: bool) -> None:
    step = SumStep()
    step.reduced = reduced
    flight, reporter = in_flight(step)
    flight.report(1, -1, {"loss": 2.0}, {"step_s": 1.0})
    (one,) = reporter.values
    assert (one.own, one.shared) == (({}, {"loss": 2.0}) if reduced else ({"loss": 2.0}, {}))
    assert (one.epoch, one.step, one.measured) == (1, -1, {"step_s": 1.0})


def test_time_of_a_step_is_that_since_the_end_of_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = replace_time(monkeypatch, steps_in_flight, trace_schedule)
    measured = StepResult({"loss": 0.0}, finite=True, measured={"collective_s": 0.5})
    flight, reporter = in_flight(SumStep({2: measured}))
    begin(flight, 1)
    clock.now += 3
    flight.read_all()
    clock.now += 40
    flight.restart_clock()
    begin(flight, 2)
    clock.now += 2
    flight.read_all()
    assert [one.measured for one in reporter.values] == [
        {"step_s": 3.0, "input_s": 0.25},
        {"step_s": 2.0, "input_s": 0.25, "collective_s": 0.5},
    ]


def test_start_of_a_trace_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = replace_time(monkeypatch, steps_in_flight, trace_schedule)
    flight, reporter = in_flight(SumStep())

    def before(step: int, epoch: int) -> float:
        del step, epoch
        clock.now += 5
        return 5.0

    monkeypatch.setattr(flight.tracing, "before", before)
    begin(flight, 1)
    clock.now += 1
    flight.read_all()
    assert reporter.values[0].measured["step_s"] == 1.0


def test_value_that_is_not_finite_ends_the_run() -> None:
    flight, reporter = in_flight(SumStep({1: NAN}), rank=3)
    begin(flight, 1)
    message = r"`loss` is not finite at step 1 on rank 3: .*use --on-nan warn to continue anyway"
    with pytest.raises(StepError, match=message) as caught:
        flight.read_all()
    assert type(caught.value) is StepError
    assert reporter.notes("nan") == ["!`loss` is nan at step 1, epoch 2"]
    assert len(reporter.values) == 1


def test_value_of_another_rank_ends_the_run_with_its_reason() -> None:
    flight, reporter = in_flight(SumStep({1: ANOTHER}))
    begin(flight, 1)
    with pytest.raises(AnotherRankError, match="stopped at step 1: a gradient is not finite"):
        flight.read_all()
    assert not reporter.notes("nan")


def test_each_value_is_noted_once_if_the_run_continues() -> None:
    both = StepResult({"loss": math.nan, "norm": -math.inf}, finite=False)
    flight, reporter = in_flight(SumStep({1: NAN, 2: NAN, 3: both}), on_nan="warn")
    for number in range(1, 5):
        begin(flight, number)
    flight.read_all()
    assert reporter.notes("nan") == [
        "!`loss` is nan at step 1, epoch 2",
        "!`norm` is -inf at step 3, epoch 2",
    ]
    assert len(reporter.values) == 4


def test_value_that_does_not_decide_is_only_noted() -> None:
    """A strategy may report a value that is not finite although all its ranks continue."""
    flight, reporter = in_flight(SumStep({1: StepResult({"ratio": math.inf}, finite=True)}))
    begin(flight, 1)
    flight.read_all()
    assert reporter.notes("nan") == ["!`ratio` is inf at step 1, epoch 2"]
