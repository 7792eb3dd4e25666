"""Published step times: rows, and their prices on the planner's own path."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.plan_time import (
    CALIBRATION,
    EAGER,
    EAGER_DISPATCH_S,
    SLOW,
    published_steps,
)
from nbdist.planner.hardware.topology import parse
from nbdist.records import DATA, MODEL, STAGE

pytestmark = pytest.mark.processes  # JAX traces whole models

STEPS = published_steps()
FIRST = {step.table: step for step in reversed(STEPS)}


def test_every_row_describes_its_devices() -> None:
    for step in STEPS:
        sizes = dict(step.fixed)
        devices = parse(step.hardware).devices
        assert math.prod(sizes[axis] for axis in (DATA, MODEL, STAGE)) == devices, step.name
        assert step.batch % (sizes[DATA] * sizes["micro"]) == 0, step.name


def test_tables_for_calibration_are_a_part() -> None:
    assert {*FIRST} > CALIBRATION
    assert {*FIRST} - CALIBRATION >= SLOW


@pytest.mark.parametrize("table", sorted(FIRST))
def test_plan_has_the_published_layout(table: str) -> None:
    step = FIRST[table]
    plan, sizes = step.plan(), dict(step.fixed)
    assert plan.axes[DATA] == sizes[DATA]
    assert plan.axes[MODEL] == sizes[MODEL]
    assert (plan.zero, plan.micro, plan.rounds) == tuple(
        sizes[name] for name in ("zero", "micro", "rounds")
    )
    assert plan.time.step > 0


def test_hosts_issue_the_operations_of_eager_programs() -> None:
    assert {*FIRST} > EAGER
    eager, compiled = (
        next(FIRST[table] for table in sorted(FIRST) if (table in EAGER) == so)
        for so in (True, False)
    )
    issued = eager.target.calibration
    assert issued.dispatch_s == EAGER_DISPATCH_S > compiled.target.calibration.dispatch_s
    at_once = dataclasses.replace(eager, table=compiled.table)
    assert eager.plan().time.step > at_once.plan().time.step
