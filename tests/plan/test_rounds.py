"""Stages with several blocks of layers (interleaved): what it takes, when it is had, why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.plan.pipeline import bubble
from nbdist.plan.search import plan
from nbdist.plan.steps import Steps
from nbdist.records import DATA, STAGE, Planning
from tests import plans
from tests.plan_models import hardware, model_of_program

if TYPE_CHECKING:
    from nbdist.records import Plan, Schedule

HOST = "8xH100"


def around(rounds: int, schedule: Schedule = "gpipe", micro: int = 8, wide: int = 4096) -> Plan:
    fixed = {STAGE: 4, DATA: 2, "micro": micro, "rounds": rounds}
    model = plans.stacked(16, wide, 2**15)
    return plan(model, hardware(HOST), Planning(fixed=fixed, schedule=schedule))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_wait_for_a_block_and_no_more(schedule: Schedule) -> None:
    """(p - 1)/(v m) of the work; what is sent grows."""
    plain, often = (around(rounds, schedule) for rounds in (1, 4))
    assert often.title.startswith("data 2 x 4 stages, ")
    assert "4 rounds, 8 microbatches" in often.title
    for found, rounds in ((plain, 1), (often, 4)):
        waits = bubble(4, 8, rounds)
        assert 0.8 * waits / (1 + waits) < found.time.bubble < waits / (1 + waits)
    assert often.time.compute < plain.time.compute
    sent = [next(t.bytes for t in p.time.traffic if t.axis == STAGE) for p in (plain, often)]
    assert sent[1] > 1.5 * sent[0]


def test_what_goes_from_stage_to_stage_is_a_block_and_its_gradients() -> None:
    """Of few rows nothing else counts."""
    fixed = {STAGE: 4, DATA: 2, "micro": 4}
    model = plans.stacked(16, 512, 8)
    plain, often = (
        plan(model, hardware(HOST), Planning(fixed=fixed | {"rounds": rounds})) for rounds in (1, 4)
    )
    own = sum(t.device_bytes for t in plain.tensors if t.path.startswith("params['layers']"))
    sent = [next(t.bytes for t in p.time.traffic if t.axis == STAGE) for p in (plain, often)]
    assert sent[1] - sent[0] == pytest.approx(2 * own, rel=0.1)
    # All blocks lie there once more, and that of a tick; the gradients of a tick are one block's.
    more = often.memory.gradients - plain.memory.gradients
    assert more == pytest.approx((1 + 1 / 4) * own - (1 - 1 / 4) * own, rel=0.1)


def test_it_is_taken_where_it_is_faster() -> None:
    """Of few rows what is sent takes longer than what stages wait."""
    fixed = {STAGE: 4, DATA: 2, "micro": 4}
    many, few = (
        plan(plans.stacked(16, 4096, rows), hardware(HOST), Planning(fixed=fixed))
        for rows in (2**15, 64)
    )
    once = Planning(fixed=fixed | {"rounds": 1})
    one = plan(plans.stacked(16, 4096, 2**15), hardware(HOST), once)
    assert (many.rounds > 1, one.rounds, many.time.step < one.time.step) == (True, 1, True)
    assert few.rounds == 1
    assert any("4 stages, 2 rounds" in runner.title for runner in few.runners_up)


def test_it_is_had_where_it_is_asked_for() -> None:
    found = plan(plans.stacked(), hardware(HOST), Planning(fixed={"rounds": 2}))
    assert (found.rounds, found.axes[STAGE] > 1) == (2, True)
    assert not found.micro % found.axes[STAGE]
    edited = msgspec.structs.replace(around(1), rounds=2)
    taken = plan(plans.stacked(16, 4096, 2**15), hardware(HOST), Planning(given=edited))
    assert (taken.memory, taken.time) == (around(2).memory, around(2).time)


def refusal(fixed: dict[str, int], steps: Steps | None = None) -> str:
    with pytest.raises(PlanError) as refused:
        plan(steps or Steps(plans.stacked()), hardware(HOST), Planning(fixed=fixed))
    return str(refused.value)


def test_why_it_cannot_be_had_is_said() -> None:
    said = refusal({STAGE: 4, "rounds": 4})
    assert "4 stages have 4 blocks of layers each: the layers divide into 8 blocks at most" in said
    said = refusal({STAGE: 4, "rounds": 2, "micro": 6, DATA: 2})
    assert "micro is 6: in several rounds microbatches go in turns of as many as there are" in said
    assert "rounds is 0: microbatches go through stages once or more" in refusal({"rounds": 0})
    assert "each stage has 16 blocks of layers" in refusal({"rounds": 16})
    assert "no stages: there is no scan" in refusal({"rounds": 2}, Steps(model_of_program("MLP")))
    assert "rounds and schedules are of stages" in refusal({"rounds": 2, DATA: 8})
    for edited, says in (
        (msgspec.structs.replace(around(2), micro=6), "micro is 6: in several rounds"),
        (msgspec.structs.replace(around(2), rounds=3), "4 stages have 3 blocks"),
        (msgspec.structs.replace(around(2), rounds=0), "rounds is 0"),
    ):
        with pytest.raises(PlanError, match=says):
            plan(plans.stacked(16, 4096, 2**15), hardware(HOST), Planning(given=edited))
    whole = plan(plans.stacked(), hardware(HOST), Planning(fixed={DATA: 8}))
    given = msgspec.structs.replace(whole, rounds=2)
    with pytest.raises(PlanError, match="rounds is 2: microbatches go so often through stages"):
        plan(plans.stacked(), hardware(HOST), Planning(given=given))
