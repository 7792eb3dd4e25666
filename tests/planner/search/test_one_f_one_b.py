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


def piped(schedule: Schedule, micro: int, stage: int = 4) -> Plan:
    return plans.piped(schedule=schedule, stage=stage, data=8 // stage, micro=micro)


def test_a_stage_has_activations_of_those_under_way() -> None:
    """GPipe stores every microbatch, 1F1B at most 2 S - 1 of them."""
    all_, few = (piped(schedule, 16) for schedule in ("gpipe", "1f1b"))
    assert few.memory.activations < all_.memory.activations
    assert few.memory.arguments == all_.memory.arguments
    assert few.title == "data 2 x 4 stages, 1F1B, 16 microbatches"
    # Twice the microbatches of the same size add only inputs and outputs.
    model = {rows: plans.stacked(8, 256, rows) for rows in (512, 1024)}

    def activations(schedule: Schedule, rows: int) -> int:
        asked = {STAGE: 4, DATA: 2, "micro": rows // 16}
        wishes = Planning(fixed=asked, schedule=schedule)
        return plan(model[rows], hardware(HOSTS), wishes).memory.activations

    more = {s: activations(s, 1024) - activations(s, 512) for s in ("gpipe", "1f1b")}
    assert more["1f1b"] < more["gpipe"] / 4


def test_it_waits_as_long_and_its_head_is_done_by_microbatches() -> None:
    asked = {STAGE: 4, DATA: 1, MODEL: 1, "micro": 16}
    model, target = plans.stacked(8, 4096, 4096), hardware("4xA100")
    all_, few = (
        plan(model, target, Planning(fixed=asked, schedule=schedule))
        for schedule in ("gpipe", "1f1b")
    )
    assert few.time.bubble == pytest.approx(all_.time.bubble, rel=0.05)
    assert all_.time.step < few.time.step < 1.1 * all_.time.step


def test_it_is_chosen_where_not_all_can_be_kept() -> None:
    model = plans.stacked(8, 4096, 2**17)
    target = hardware("4 hosts x 1 A100, 25 Gbps")
    asked = {STAGE: 4, DATA: 1}
    roomy = plan(model, target, Planning(fixed=asked, budget=10**13))
    assert roomy.schedule == "gpipe"
    taken = roomy.memory.total - roomy.memory.margin
    tight = plan(model, target, Planning(fixed=asked, budget=int(0.9 * taken)))
    assert tight.schedule == "1f1b"
    assert tight.memory.total <= tight.memory.available
    assert any("stages" in r.title and "1F1B" not in r.title for r in tight.runners_up)


def test_it_is_had_where_it_is_asked_for() -> None:
    found = plan(plans.stacked(), hardware(HOSTS), Planning(schedule="1f1b"))
    assert found.schedule == "1f1b"
    assert found.axes[STAGE] > 1
    edited = msgspec.structs.replace(piped("gpipe", 16), schedule="1f1b")
    taken = plan(plans.stacked(), hardware(HOSTS), Planning(given=edited))
    assert (taken.memory, taken.time) == (piped("1f1b", 16).memory, piped("1f1b", 16).time)
    assert msgspec.json.decode(msgspec.json.encode(taken), type=type(taken)) == taken


def waiting() -> Steps:
    """Return a step whose rewriter refuses 1F1B because the loss needs all rows."""

    def alternates(_: str) -> None:
        raise PlanError("no 1F1B: the loss needs all rows")

    model = plans.stacked()
    return Steps(model, None, lambda _: (8, 8), alternates)


def test_why_it_cannot_be_had_is_said() -> None:
    def refusal(step: Steps, **wishes: object) -> str:
        with pytest.raises(PlanError) as refused:
            plan(step, hardware(HOSTS), Planning(schedule="1f1b", **wishes))
        return str(refused.value)

    assert "(schedule=1f1b): " in refusal(waiting())
    assert "no 1F1B: the loss needs all rows" in refusal(waiting())
    assert "no 1F1B: the loss needs" in refusal(waiting(), fixed={STAGE: 4})
    assert "no stages: there is no scan" in refusal(Steps(model_of_program("MLP")))
    for fixed in ({"micro": 3}, {STAGE: 1}, {DATA: 8}):
        assert "use 2, 4, 8, with the remaining devices" in refusal(
            Steps(plans.stacked()), fixed=fixed
        )
    assert "cut into 0 stages" in refusal(Steps(plans.stacked()), fixed={STAGE: 0})
    edited = msgspec.structs.replace(piped("gpipe", 16), schedule="1f1b")
    with pytest.raises(PlanError, match="no 1F1B: the loss needs"):
        plan(waiting(), hardware(HOSTS), Planning(given=edited))
    whole = plan(plans.stacked(), hardware(HOSTS), Planning(fixed={DATA: 8, MODEL: 1}))
    whole = msgspec.structs.replace(whole, schedule="1f1b")
    with pytest.raises(PlanError, match="schedule is 1f1b, and there are no stages"):
        plan(plans.stacked(), hardware(HOSTS), Planning(given=whole))
