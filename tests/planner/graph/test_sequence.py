"""Sequence parallelism: steps that allow it, memory that it saves and bytes that it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import msgspec
import pytest

from nbdist.errors import PlanError
from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.cost.memory import MARGIN
from nbdist.planner.graph.fusion import added_up
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.optimizer_state import states_of
from nbdist.planner.graph.sequence import sequence_of
from nbdist.planner.search.explain import NO_TENSOR
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL, STAGE, Plan, Planning
from tests import plans
from tests.plan_models import hardware, model_of_program, tensor, traced

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model

ROWS, LENGTH, WIDTH, LAYERS, HEADS = 16, 512, 1024, 8, 16
ACTIVATION_BYTES = ROWS * LENGTH * WIDTH * 4


def training_model(layer: Any, layers: Any, length: int = LENGTH) -> Model:
    """Return the planner's model of a training step with a scan over layers."""

    def step(params: Any, _: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            out, _ = jax.lax.scan(lambda x, own: (layer(own, x), None), x, params)
            return ((out - x) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return traced(step, layers, (), plans.shape(ROWS, length, WIDTH))


def feed_forward(length: int = LENGTH) -> Model:
    layers = {
        "up": plans.shape(LAYERS, WIDTH, 4 * WIDTH),
        "down": plans.shape(LAYERS, 4 * WIDTH, WIDTH),
    }
    return training_model(
        lambda own, x: x + jax.nn.relu(x @ own["up"]) @ own["down"], layers, length
    )


def attention() -> Model:
    layers = {name: plans.shape(LAYERS, WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
    layers["o"] = plans.shape(LAYERS, HEADS, WIDTH // HEADS, WIDTH)

    def layer(own: Any, x: Any) -> Any:
        y = x / (1 + jnp.square(x).mean(-1, keepdims=True))
        q, k, v = (jnp.einsum("bsw,whe->bshe", y, own[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
        return x + jnp.einsum("bhst,bthe,hew->bsw", weights, v, own["o"])

    return training_model(layer, layers)


def planned(step: Model, *, sequence: int, data: int = 2) -> Plan:
    fixed = {DATA: data, MODEL: 8 // data, "sequence": sequence}
    return plan(step, hardware("8xA100"), Planning(fixed=fixed, remat=""))


def model_bytes_sent(found: Plan) -> float:
    """Return the bytes sent along the model axis."""
    return sum(traffic.bytes for traffic in found.time.traffic if traffic.axis == MODEL)


def test_sequence_is_neither_batch_nor_parameter_dimension() -> None:
    for model in (feed_forward(), attention()):
        (batch,) = (t.value for t in model.tensors if t.role == "batch")
        planned_model = plan(model, hardware("8xA100"), Planning(fixed={MODEL: 8}))
        split = {
            group
            for own, found in zip(model.tensors, planned_model.tensors, strict=True)
            for group, axes in zip(own.value.groups, found.spec, strict=True)
            if MODEL in axes and found.role == "parameter"
        }
        assert sequence_of(model, frozenset(split), 8) == {batch.groups[1]}
        assert not sequence_of(model, frozenset(), 8)


@pytest.mark.parametrize("name", ["MLP", "CNN", "LSTM", "recommender", "U-Net"])
def test_model_without_sequence_is_refused(name: str) -> None:
    """Neither the image dimensions of a convolution nor the time steps of a scan count."""
    with pytest.raises(PlanError, match="no sequence parallelism: no product"):
        planned(model_of_program(name), sequence=1)


@pytest.mark.parametrize("fixed", [{MODEL: 1}, {DATA: 8}, {DATA: 4, STAGE: 2}])
def test_missing_model_axis_is_the_only_reason(fixed: dict[str, int]) -> None:
    model, target = feed_forward(), hardware("8xA100")
    with pytest.raises(PlanError) as refused:
        plan(model, target, Planning(fixed={**fixed, "sequence": 1}))
    assert str(refused.value).endswith(f"sequence is 1: {NO_TENSOR}")
    edited = msgspec.structs.replace(plan(model, target, Planning(fixed={DATA: 8})), sequence=True)
    with pytest.raises(PlanError, match=f"sequence is true: {NO_TENSOR}"):
        plan(model, target, Planning(given=edited))


def test_sum_with_returned_term_is_not_merged() -> None:
    def step(params: Any, x: Any) -> Any:
        left, right = (x @ w for w in params)
        return left + right, left

    params = (plans.shape(WIDTH, WIDTH),) * 2
    closed = jax.make_jaxpr(step)(params, plans.shape(ROWS, WIDTH))
    model = model_of(closed, [("a", "carried"), ("b", "carried"), ("x", "batch")])
    assert not model.added


def test_indivisible_sequence_is_refused() -> None:
    assert planned(feed_forward(length=LENGTH - 2), sequence=1, data=4).sequence
    with pytest.raises(PlanError, match="no sequence parallelism"):
        planned(feed_forward(length=LENGTH - 2), sequence=1)


def test_sequence_parallel_activations_are_kept_once() -> None:
    model = feed_forward()
    whole, sharded = (planned(model, sequence=sequence) for sequence in (0, 1))
    assert sharded.memory.arguments == whole.memory.arguments
    saved = whole.memory.activations - sharded.memory.activations
    assert saved >= LAYERS * ACTIVATION_BYTES / 2 * (1 - 1 / 4)
    assert sharded.title == "data 2 x tensor 4, sequence parallel"
    assert msgspec.json.decode(msgspec.json.encode(sharded), type=Plan) == sharded


def test_sums_are_scattered_and_inputs_are_gathered() -> None:
    """Each layer has two sums and three gathers: of its input, its gradient, its input again."""
    model = feed_forward()
    whole, sharded = (planned(model, sequence=sequence) for sequence in (0, 1))
    assert model_bytes_sent(whole) == LAYERS * 2 * ACTIVATION_BYTES / 2
    assert model_bytes_sent(sharded) == LAYERS * (2 + 3) / 2 * ACTIVATION_BYTES / 2


def test_added_partial_sums_are_reduced_once() -> None:
    """Check the gradients of queries, keys and values: XLA adds them before the all-reduce."""
    model = attention()
    whole, sharded = (planned(model, sequence=sequence) for sequence in (0, 1))
    assert model_bytes_sent(whole) == LAYERS * 2 * ACTIVATION_BYTES / 2
    assert model_bytes_sent(sharded) == LAYERS * (2 + 3) / 2 * ACTIVATION_BYTES / 2
    found = added_up(model.ops, model.results)
    assert len(found) == 3
    assert len(set(found.values())) == 1


def test_operation_reads_whole_sequence_of_sharded_input() -> None:
    model = feed_forward()
    groups = tensor(model, "['up']").value.groups
    layout = Layout(2, 4, frozenset({groups[2]}), sequence=True)
    sharded = ShardedModel(model, layout, states_of(model))
    (loop, *_) = (op for op in model.ops if op.body)
    up, *_ = (op for op in loop.body if op.kind == "dot")
    x = up.ins[0]
    assert sharded.parts(x) == 2 * 4
    assert sharded.around(up).parts(x) == 2
    assert sharded.parts(up.outs[0]) == sharded.around(up).parts(up.outs[0]) == 2 * 4


def test_given_plan_keeps_sequence_setting() -> None:
    model, target = feed_forward(), hardware("8xA100")
    for sequence in (0, 1):
        given = planned(model, sequence=sequence)
        replanned = plan(model, target, Planning(given=given))
        assert replanned.sequence == given.sequence == bool(sequence)
        assert replanned.memory == given.memory
    other = planned(plans.stacked(), sequence=0)
    edited = msgspec.structs.replace(other, sequence=True)
    with pytest.raises(PlanError, match=r"the plan is impossible:\n  - sequence is true: no prod"):
        plan(plans.stacked(), target, Planning(given=edited))


def test_sequence_parallelism_is_tried_before_remat() -> None:
    """Sequence parallelism is preferred to remat if tensor parallelism alone does not fit."""
    model, target = feed_forward(), hardware("8xA100")
    sizes = {DATA: 1, MODEL: 8}
    whole = plan(model, target, Planning(fixed={**sizes, "sequence": 0}, remat=""))
    sharded = plan(model, target, Planning(fixed={**sizes, "sequence": 1}, remat=""))
    taken = (one.memory.total - one.memory.margin for one in (whole, sharded))
    budget = int(sum(taken) / 2 / (1 - MARGIN))
    found = plan(model, target, Planning(fixed=sizes, budget=budget))
    assert (found.sequence, found.remat) == (True, "")
