"""The 1F1B schedule in the planner: its cost, its choice, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.planner.search.search import plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, MODEL, STAGE, Planning
from tests import plans
from tests.plan_models import hardware, model_of_program

if TYPE_CHECKING:
    from nbdist.records import Plan, Schedule

HOSTS = "2 hosts x 4 A100"


def pipeline_plan(schedule: Schedule, micro: int, stage: int = 4) -> Plan:
    return plans.piped(schedule=schedule, stage=stage, data=8 // stage, micro=micro)


def test_stage_keeps_activations_of_microbatches_in_flight() -> None:
    """GPipe stores every microbatch, 1F1B at most 2 S - 1 of them."""
    gpipe, one_f_one_b = (pipeline_plan(schedule, 16) for schedule in ("gpipe", "1f1b"))
    assert one_f_one_b.memory.activations < gpipe.memory.activations
    assert one_f_one_b.memory.arguments == gpipe.memory.arguments
    assert one_f_one_b.title == "data 2 x 4 stages, 1F1B, 16 microbatches"
    # Twice the microbatches of the same size add only inputs and outputs.
    model = {rows: plans.stacked(8, 256, rows) for rows in (512, 1024)}

    def activations(schedule: Schedule, rows: int) -> int:
        fixed = {STAGE: 4, DATA: 2, "micro": rows // 16}
        planning = Planning(fixed=fixed, schedule=schedule)
        return plan(model[rows], hardware(HOSTS), planning).memory.activations

    more = {s: activations(s, 1024) - activations(s, 512) for s in ("gpipe", "1f1b")}
    assert more["1f1b"] < more["gpipe"] / 4


def test_1f1b_has_same_bubble_and_splits_the_head() -> None:
    fixed = {STAGE: 4, DATA: 1, MODEL: 1, "micro": 16}
    model, target = plans.stacked(8, 4096, 4096), hardware("4xA100")
    gpipe, one_f_one_b = (
        plan(model, target, Planning(fixed=fixed, schedule=schedule))
        for schedule in ("gpipe", "1f1b")
    )
    assert one_f_one_b.time.bubble == pytest.approx(gpipe.time.bubble, rel=0.05)
    assert gpipe.time.step < one_f_one_b.time.step < 1.1 * gpipe.time.step


def test_1f1b_is_chosen_if_gpipe_does_not_fit() -> None:
    model = plans.stacked(8, 4096, 2**17)
    target = hardware("4 hosts x 1 A100, 25 Gbps")
    fixed = {STAGE: 4, DATA: 1}
    unlimited = plan(model, target, Planning(fixed=fixed, budget=10**13))
    assert unlimited.schedule == "gpipe"
    needed = unlimited.memory.total - unlimited.memory.margin
    limited = plan(model, target, Planning(fixed=fixed, budget=int(0.9 * needed)))
    assert limited.schedule == "1f1b"
    assert limited.memory.total <= limited.memory.available
    assert any("stages" in r.title and "1F1B" not in r.title for r in limited.runners_up)


def test_requested_1f1b_is_planned() -> None:
    found = plan(plans.stacked(), hardware(HOSTS), Planning(schedule="1f1b"))
    assert found.schedule == "1f1b"
    assert found.axes[STAGE] > 1
    edited = msgspec.structs.replace(pipeline_plan("gpipe", 16), schedule="1f1b")
    taken = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    assert (taken.memory, taken.time) == (
        pipeline_plan("1f1b", 16).memory,
        pipeline_plan("1f1b", 16).time,
    )
    assert msgspec.json.decode(msgspec.json.encode(taken), type=type(taken)) == taken


def refusing_1f1b() -> Steps:
    """Return a step whose rewriter refuses 1F1B because the loss needs all rows."""

    def refuse(_: str) -> None:
        raise PlanError("no 1F1B: the loss needs all rows")

    model = plans.stacked()
    return Steps(model, None, lambda _: (8, 8), refuse)


def test_impossible_1f1b_states_the_reason() -> None:
    def refusal(step: Steps, **options: object) -> str:
        with pytest.raises(PlanError) as refused:
            plan(step, hardware(HOSTS), Planning(schedule="1f1b", **options))
        return str(refused.value)

    assert "(schedule=1f1b): " in refusal(refusing_1f1b())
    assert "no 1F1B: the loss needs all rows" in refusal(refusing_1f1b())
    assert "no 1F1B: the loss needs" in refusal(refusing_1f1b(), fixed={STAGE: 4})
    assert "no stages: there is no scan" in refusal(Steps(model_of_program("MLP")))
    for fixed in ({"micro": 3}, {STAGE: 1}, {DATA: 8}):
        assert "use 2, 4, 8, with the remaining devices" in refusal(
            Steps(plans.stacked()), fixed=fixed
        )
    assert "divided into 0 stages" in refusal(Steps(plans.stacked()), fixed={STAGE: 0})
    edited = msgspec.structs.replace(pipeline_plan("gpipe", 16), schedule="1f1b")
    with pytest.raises(PlanError, match="no 1F1B: the loss needs"):
        plan(refusing_1f1b(), hardware(HOSTS), Planning(given=edited))
    whole = plan(plans.stacked(), hardware(HOSTS), Planning(fixed={DATA: 8, MODEL: 1}))
    whole = msgspec.structs.replace(whole, schedule="1f1b")
    with pytest.raises(PlanError, match="schedule is 1f1b, and there are no stages"):
        plan(plans.stacked(), hardware(HOSTS), Planning(given=whole))
