"""Parts of a cell's request."""

from __future__ import annotations

import pytest

from nbdist.records import (
    CellOptions,
    CellRequest,
    Planning,
    Saving,
    StepOptions,
    StepProgram,
)

PROGRAM = StepProgram(body="", given=(), reads={}, carried=(), carried_lines={}, report="")
PLANNING = Planning(budget=7, only=True)


def request(step: StepOptions | None = None, program: StepProgram | None = None) -> CellRequest:
    return CellRequest(
        number=1,
        source="",
        label=1,
        strategy=None,
        awaits=False,
        options=CellOptions(step=step, seed=3),
        program=program,
    )


def test_a_step_has_a_program_and_options() -> None:
    options = StepOptions(data="rows")
    found = request(options, PROGRAM).step
    assert found is not None
    assert (found.program, found.options) == (PROGRAM, options)
    assert request(options).step is None
    assert request(None, PROGRAM).step is None


def test_the_layout_of_a_fit_is_that_of_options_without_data() -> None:
    assert request(StepOptions(data="", planning=PLANNING)).planning == PLANNING
    assert request(StepOptions(data="rows", planning=PLANNING)).planning == Planning()
    assert request().planning == Planning()


@pytest.mark.parametrize("data", ["", "rows"])
def test_a_plan_of_a_step_or_a_fit_does_not_train(data: str) -> None:
    assert request(StepOptions(data=data, planning=PLANNING)).is_plan
    assert not request(StepOptions(data=data)).is_plan
    assert not request().is_plan


def test_other_options_replace_the_given_ones() -> None:
    saving = Saving(folder="/kept")
    changed = request().with_options(saving=saving, seed=None)
    assert changed.saving == saving
    assert changed.options.seed is None
    assert request().saving is None
    assert changed.with_options(saving=None, seed=3) == request()
