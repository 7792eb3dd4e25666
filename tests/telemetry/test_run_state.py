"""Planned values beside measured ones in the state of a run."""

from __future__ import annotations

import pytest

from nbdist.records import Compiled, FitBegun, Planned, StepFigures
from nbdist.telemetry.diagnostics import Pace
from nbdist.telemetry.run_state import PlanComparison, RunChanges
from tests.plans import made
from tests.runs import new_state

PLAN = made("both")


def compiled(arguments: int, temporaries: int) -> Compiled:
    return Compiled(rank=0, cell=1, arguments=arguments, temporaries=temporaries, seconds=1.0)


@pytest.fixture
def comparison() -> PlanComparison:
    created = PlanComparison(None)
    created.note(Planned(rank=0, cell=1, plan=PLAN))
    return created


def test_planned_values_are_available_before_measurements(comparison: PlanComparison) -> None:
    check = comparison.check(Pace())
    assert check is not None
    assert check.title == "data 4 x tensor 2, ZeRO-1"
    assert check.planned.arguments == PLAN.memory.arguments
    assert check.planned.memory == PLAN.memory.total - PLAN.memory.margin
    assert check.planned.step_s == PLAN.time.step
    assert check.planned.collectives == PLAN.time.exposed / PLAN.time.step
    assert check.measured == StepFigures()


def test_the_first_executable_is_compared_with_the_plan(comparison: PlanComparison) -> None:
    """A later executable is for a smaller batch, as at the end of an epoch."""
    comparison.note(compiled(100, 20))
    comparison.note(compiled(70, 10))
    check = comparison.check(Pace(step_s=0.5, collectives=0.25))
    assert check is not None
    assert check.measured == StepFigures(step_s=0.5, collectives=0.25, arguments=100, memory=120)


def test_memory_is_left_out_if_the_backend_reports_none(comparison: PlanComparison) -> None:
    comparison.note(compiled(0, 0))
    check = comparison.check(Pace(step_s=0.5))
    assert check is not None
    assert check.measured == StepFigures(step_s=0.5)


def test_measured_values_stay_until_there_are_newer_ones(comparison: PlanComparison) -> None:
    """A recovered run begins without steps.

    A resumed run begins with the values of the first process.
    """
    comparison.note(compiled(100, 20))
    before = comparison.check(Pace(step_s=0.5, collectives=0.25))
    assert comparison.check(Pace()) == before
    assert PlanComparison(before).check(Pace()) == before


def test_a_plan_without_a_run_is_not_compared() -> None:
    created = PlanComparison(None)
    created.note(Planned(rank=0, cell=1, plan=PLAN, only=True))
    created.note(compiled(100, 20))
    assert created.check(Pace(step_s=0.5)) is None


def test_hyperparameters_of_the_workers_are_added() -> None:
    changes = RunChanges(new_state(hyperparameters={"width": 64}), reported=False)
    for rank in (0, 1):
        found = {"optimizer": "Adam", "learning_rate": 0.1}
        changes.receive(FitBegun(rank=rank, cell=1, epochs=1, steps=1, hyperparameters=found))
    written = changes.take((), (), Pace())
    assert written["hyperparameters"] == {"width": 64, "optimizer": "Adam", "learning_rate": 0.1}


@pytest.mark.parametrize("program", ["", "train.py"])
def test_a_fit_of_a_cell_stops_at_the_end_of_a_step(program: str) -> None:
    state = new_state(kind="", program=program)
    changes = RunChanges(state, reported=False)
    assert "stoppable" not in changes.take((), (), Pace())
    changes.receive(FitBegun(rank=0, cell=1, epochs=1, steps=1))
    assert changes.take((), (), Pace())["stoppable"] is not bool(program)
