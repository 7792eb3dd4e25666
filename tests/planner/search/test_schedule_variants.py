"""Schedules of pipelines in the planner, 1F1B and interleaving: cost, choice and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.planner.graph.pipeline_schedule import bubble
from nbdist.planner.search.search import plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, MODEL, STAGE, Planning
from tests import plans
from tests.plan_models import hardware, model_of_program
from tests.plans import TWO_HOSTS

if TYPE_CHECKING:
    from nbdist.records import Plan, Schedule


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
        return plan(model[rows], hardware(TWO_HOSTS), planning).memory.activations

    more = {s: activations(s, 1024) - activations(s, 512) for s in ("gpipe", "1f1b")}
    assert more["1f1b"] < more["gpipe"] / 4


def test_1f1b_has_same_bubble_and_splits_the_head() -> None:
    fixed = {STAGE: 4, DATA: 1, MODEL: 1, "micro": 16}
    model, target = plans.stacked(8, 4096, 4096), hardware("4xA100")
    gpipe, one_f_one_b = (
        plan(model, target, Planning(fixed=fixed, schedule=schedule))
        for schedule in ("gpipe", "1f1b")
    )
    assert one_f_one_b.time.bubble == pytest.approx(gpipe.time.bubble, rel=0.1)
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
    found = plan(plans.stacked(), hardware(TWO_HOSTS), Planning(schedule="1f1b"))
    assert found.schedule == "1f1b"
    assert found.axes[STAGE] > 1
    edited = msgspec.structs.replace(pipeline_plan("gpipe", 16), schedule="1f1b")
    taken = plan(plans.stacked(), hardware(TWO_HOSTS), Planning(given=edited))
    assert (taken.memory, taken.time) == (
        pipeline_plan("1f1b", 16).memory,
        pipeline_plan("1f1b", 16).time,
    )
    assert msgspec.json.decode(msgspec.json.encode(taken), type=type(taken)) == taken


def refusing_1f1b() -> Steps:
    """Return a step whose rewriter refuses 1F1B because the loss needs all rows."""

    def refuse(_: str) -> None:
        raise PlanError("schedule=1f1b is not possible: the loss needs all rows")

    model = plans.stacked()
    return Steps(model, None, lambda _: (8, 8), refuse)


def test_impossible_1f1b_states_the_reason() -> None:
    def refusal(step: Steps, **options: object) -> str:
        with pytest.raises(PlanError) as refused:
            plan(step, hardware(TWO_HOSTS), Planning(schedule="1f1b", **options))
        return str(refused.value)

    assert "(schedule=1f1b): " in refusal(refusing_1f1b())
    assert "schedule=1f1b is not possible: the loss needs all rows" in refusal(refusing_1f1b())
    assert "schedule=1f1b is not possible: the loss needs" in refusal(
        refusing_1f1b(), fixed={STAGE: 4}
    )
    assert "no stages: there is no scan" in refusal(Steps(model_of_program("MLP")))
    for fixed in ({"micro": 3}, {STAGE: 1}, {DATA: 8}):
        assert "use 2 to 8, with the remaining devices" in refusal(
            Steps(plans.stacked()), fixed=fixed
        )
    assert "divided into 0 stages" in refusal(Steps(plans.stacked()), fixed={STAGE: 0})
    edited = msgspec.structs.replace(pipeline_plan("gpipe", 16), schedule="1f1b")
    with pytest.raises(PlanError, match="schedule=1f1b is not possible: the loss needs"):
        plan(refusing_1f1b(), hardware(TWO_HOSTS), Planning(given=edited))
    whole = plan(plans.stacked(), hardware(TWO_HOSTS), Planning(fixed={DATA: 8, MODEL: 1}))
    whole = msgspec.structs.replace(whole, schedule="1f1b")
    with pytest.raises(PlanError, match="schedule is 1f1b, and there are no stages"):
        plan(plans.stacked(), hardware(TWO_HOSTS), Planning(given=whole))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_slow_links_keep_rows_at_the_last_stage(schedule: Schedule) -> None:
    """The plan is taken as it is; with all stages at the loss it is slower."""
    model, target = plans.stacked(8, 1024, 4096), hardware("4 hosts x 1 A100, 1 Gbps")
    fixed = {STAGE: 4, DATA: 1, MODEL: 1, "micro": 16}
    found = plan(model, target, Planning(fixed=fixed, schedule=schedule))
    assert found.loss_stages == "last"
    assert "loss on the last stage" in found.title
    taken = plan(model, target, Planning(given=found))
    assert (taken.loss_stages, taken.time, taken.memory) == ("last", found.time, found.memory)
    edited = msgspec.structs.replace(found, loss_stages="all")
    shared = plan(model, target, Planning(given=edited))
    assert shared.time.step > 1.3 * found.time.step


def test_fast_links_share_the_loss_of_gpipe() -> None:
    fixed = {STAGE: 4, DATA: 1, MODEL: 1, "micro": 16}
    model = plans.stacked(8, 1024, 4096)
    found = plan(model, hardware("4xA100"), Planning(fixed=fixed, schedule="gpipe"))
    assert found.loss_stages == "all"


def test_loss_on_the_last_stage_has_the_conditions_of_1f1b() -> None:
    fixed = {STAGE: 4, DATA: 2, "micro": 16}
    steps, target = refusing_1f1b(), hardware("8 hosts x 1 A100, 1 Gbps")
    found = plan(steps, target, Planning(fixed=fixed))
    assert found.loss_stages == "all"
    edited = msgspec.structs.replace(found, loss_stages="last")
    with pytest.raises(PlanError, match=r"loss_stages is last: .*the loss needs all rows"):
        plan(steps, target, Planning(given=edited))


HOST = "8xH100"


def planned_rounds(rounds: int, schedule: Schedule = "gpipe") -> Plan:
    fixed = {STAGE: 4, DATA: 2, "micro": 8, "rounds": rounds}
    model = plans.stacked(16, 4096, 2**15)
    return plan(model, hardware(HOST), Planning(fixed=fixed, schedule=schedule))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_wait_for_one_block(schedule: Schedule) -> None:
    """Stages idle for (p - 1)/(v m) of the work; transfers grow."""
    plain, often = (planned_rounds(rounds, schedule) for rounds in (1, 4))
    assert often.title.startswith("data 2 x 4 stages, ")
    assert "4 rounds, 8 microbatches" in often.title
    for found, rounds in ((plain, 1), (often, 4)):
        waits = bubble(4, 8, rounds)
        assert 0.8 * waits / (1 + waits) < found.time.bubble < waits / (1 + waits)
    assert often.time.compute < plain.time.compute
    sent = [next(t.bytes for t in p.time.traffic if t.axis == STAGE) for p in (plain, often)]
    assert sent[1] > 1.5 * sent[0]


def test_interleaving_is_chosen_if_faster() -> None:
    """With few rows, transfers take longer than idle stages."""
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


def test_requested_interleaving_is_planned() -> None:
    found = plan(plans.stacked(), hardware(HOST), Planning(fixed={"rounds": 2}))
    assert (found.rounds, found.axes[STAGE] > 1) == (2, True)
    assert not found.micro % found.axes[STAGE]
    wanted = planned_rounds(2)
    edited = msgspec.structs.replace(planned_rounds(1), rounds=2, loss_stages=wanted.loss_stages)
    taken = plan(plans.stacked(16, 4096, 2**15), hardware(HOST), Planning(given=edited))
    assert (taken.memory, taken.time) == (wanted.memory, wanted.time)


def refusal(fixed: dict[str, int], steps: Steps | None = None) -> str:
    with pytest.raises(PlanError) as refused:
        plan(steps or Steps(plans.stacked()), hardware(HOST), Planning(fixed=fixed))
    return str(refused.value)


def test_impossible_interleaving_states_the_reason() -> None:
    for fixed, message in (
        ({STAGE: 4, "rounds": 4}, "4 stages of 4 blocks do not divide the layers: use 2"),
        (
            {STAGE: 4, "rounds": 3},
            "3 rounds: 8 layers cannot be divided into stages of 3 blocks each",
        ),
        ({"rounds": 16}, "16 rounds: 8 layers cannot be divided into stages of 16 blocks each"),
        ({"rounds": 0}, "rounds is 0: use 1 or more"),
        ({STAGE: 3, "rounds": 2}, "3 stages of 2 blocks do not divide the layers: use 2, 4"),
        ({STAGE: 9, "rounds": 2}, "the layers cannot be divided into 9 stages: use 2, 4"),
        ({STAGE: 1, "rounds": 2}, "rounds and schedules need stages: use 2, 4, with the re"),
        ({DATA: 8, "rounds": 2}, "rounds and schedules need stages: use 2, 4, with the re"),
        ({STAGE: 4, "rounds": 2, "micro": 6}, "micro is 6, and with several rounds it must be "),
        ({STAGE: 4, "rounds": 2, "micro": 6}, "a multiple of the stages: use 2 stages"),
        ({STAGE: 8, "rounds": 1, "micro": 1}, "micro is 1: stages need 2"),
    ):
        assert message in refusal(fixed), fixed
    few = Steps(plans.stacked(8, 64, 4))
    assert "2 rows are in each group, and with several" in refusal(
        {STAGE: 4, "rounds": 2, DATA: 2}, few
    )
    assert "no stages: there is no scan" in refusal({"rounds": 2}, Steps(model_of_program("MLP")))
    for edited, message in (
        (
            msgspec.structs.replace(planned_rounds(2), micro=6),
            "micro is 6, and with several rounds",
        ),
        (
            msgspec.structs.replace(planned_rounds(2), rounds=3),
            "3 rounds: 16 layers cannot be divided",
        ),
        (msgspec.structs.replace(planned_rounds(2), rounds=0), "rounds is 0"),
    ):
        with pytest.raises(PlanError, match=message):
            plan(plans.stacked(16, 4096, 2**15), hardware(HOST), Planning(given=edited))
    whole = plan(plans.stacked(), hardware(HOST), Planning(fixed={DATA: 8}))
    given = msgspec.structs.replace(whole, rounds=2, schedule="1f1b")
    both = "schedule is 1f1b, and there are no stages.*rounds is 2, and there are no stages"
    with pytest.raises(PlanError, match=f"(?s){both}"):
        plan(plans.stacked(), hardware(HOST), Planning(given=given))


def test_four_rounds_can_fit_if_two_do_not() -> None:
    """A tick holds a block of layers and its gradients; more rounds make blocks smaller."""
    fixed = {STAGE: 4, DATA: 2, "micro": 4, "zero": 0}
    model = plans.stacked(16, 4096, 2**12)

    def found(budget: int, **more: int) -> Plan:
        planning = Planning(budget=budget, fixed=fixed | more, schedule="gpipe", remat="")
        return plan(model, hardware(HOST), planning)

    large_budget = 79 * 10**9
    memories = {n: found(large_budget, rounds=n).memory for n in (1, 2, 4)}
    needed = {n: memory.total - memory.margin for n, memory in memories.items()}
    assert needed[1] < needed[4] < needed[2]
    assert found(int((needed[4] + needed[2]) / 2 / 0.96)).rounds == 4
