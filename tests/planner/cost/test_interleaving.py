"""Blocks of layers that stages exchange: bytes sent and held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL, STAGE, Planning
from tests import plans
from tests.plan_models import hardware

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model


HOST = "8xH100"


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


def test_uneven_stages_send_layers_and_their_gradients() -> None:
    """Ten layers in four stages take the time of twelve, and exchange their parameters once."""
    fixed = {STAGE: 4, DATA: 2, "micro": 4}
    uneven, even = (
        plan(plans.stacked(layers, 512, 8), hardware(HOST), Planning(fixed=fixed))
        for layers in (10, 12)
    )
    assert uneven.time.compute == pytest.approx(even.time.compute, rel=0.05)
    own = sum(t.device_bytes for t in even.tensors if t.path.startswith("params['layers']"))
    sent = [next(t.bytes for t in p.time.traffic if t.axis == STAGE) for p in (even, uneven)]
    assert sent[1] - sent[0] == pytest.approx(2 * own, rel=0.1)
    # Memory holds the layers of a stage beside the stored ones.
    assert uneven.memory.gradients - even.memory.gradients == pytest.approx(own, rel=0.1)
    stored = sum(t.device_bytes for t in uneven.tensors if t.path.startswith("params['layers']"))
    assert stored == own * 10 / 12


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
