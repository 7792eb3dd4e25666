"""Interleaved stages: their cost, the choice of rounds, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.graph.pipeline_schedule import bubble
from nbdist.planner.search.search import plan
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, MODEL, STAGE, Planning
from tests import plans
from tests.plan_models import hardware, model_of_program

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model
    from nbdist.records import Plan, Schedule

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


def test_stages_send_blocks_and_their_gradients() -> None:
    """With few rows, the transfers of activations are negligible."""
    fixed = {STAGE: 4, DATA: 2, "micro": 4}
    model = plans.stacked(16, 512, 8)
    plain, often = (
        plan(model, hardware(HOST), Planning(fixed=fixed | {"rounds": rounds})) for rounds in (1, 4)
    )
    own = sum(t.device_bytes for t in plain.tensors if t.path.startswith("params['layers']"))
    sent = [next(t.bytes for t in p.time.traffic if t.axis == STAGE) for p in (plain, often)]
    assert sent[1] - sent[0] == pytest.approx(2 * own, rel=0.1)
    # Memory holds all blocks a second time, plus the block of a tick. Gradients hold one block,
    # beside their accumulator and the sum.
    more = often.memory.gradients - plain.memory.gradients
    assert more == pytest.approx((1 + 1 / 4) * own + (3 / 4 - 1) * own, rel=0.1)


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
    edited = msgspec.structs.replace(planned_rounds(1), rounds=2)
    taken = plan(plans.stacked(16, 4096, 2**15), hardware(HOST), Planning(given=edited))
    assert (taken.memory, taken.time) == (planned_rounds(2).memory, planned_rounds(2).time)


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
        ({STAGE: 3, "rounds": 2}, "the layers cannot be divided into 3 stages: use 2, 4"),
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


def staged_model(layer: Any, dtype: Any = jnp.float32) -> Model:
    """Return the model of a training step whose layers have one matrix each."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            out, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), batch, params)
            return jnp.mean(out.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, params - grads.astype(dtype)

    params = jax.ShapeDtypeStruct((16, 256, 256), dtype)
    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    inputs: Any = [("params", "carried"), ("batch", "batch")]
    return model_of(jax.make_jaxpr(step)(params, batch), inputs)


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (lambda x, p: x + jnp.tanh(x @ p), jnp.float32),
        (lambda x, p: x + jnp.tanh(x @ p.astype(x.dtype)), jnp.bfloat16),
        (lambda x, p: x + x @ jnp.tanh(p), jnp.float32),
        (lambda x, p: x + (x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)), jnp.float32),
    ],
    ids=["plain", "bfloat16", "of parameters", "cast"],
)
def test_parameters_and_gradients_are_sent_once_each(layer: Any, dtype: Any) -> None:
    """Values that layers derive from parameters alone are stored for the backward pass."""
    model = staged_model(layer, dtype)
    fixed = {STAGE: 4, DATA: 1, MODEL: 1, "micro": 4}
    sent = {}
    for rounds in (1, 2):
        planning = Planning(fixed=fixed | {"rounds": rounds})
        found = plan(model, hardware("4xH100"), planning)
        (sent[rounds],) = (t.bytes for t in found.time.traffic if t.axis == STAGE)
    own = 16 * 256 * 256 * jnp.dtype(dtype).itemsize / 4
    rows = 64 / 4 * 256 * 4  # one microbatch; 7 ticks forward and backward, 11 in two rounds
    assert sent[2] - sent[1] == pytest.approx(2 * own + 2 * 4 * rows, rel=0.01)
