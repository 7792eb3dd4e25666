"""Steps compiled by XLA with sharding constraints on the rows of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from nbdist.jaxpr.sharding_constraints import MeshLayout, with_sharded_products
from nbdist.records import Plan, Planning, Remat
from nbdist.worker.planning.plan_step import named_target, plan_of
from nbdist.worker.planning.query import PlanQuery
from tests import plans

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Role

pytestmark = pytest.mark.processes

LAYERS, WIDTH, ROWS, LENGTH = 8, 256, 64, 32
STACKS = plans.shape(LAYERS, WIDTH, 4 * WIDTH), plans.shape(LAYERS, 4 * WIDTH, WIDTH)

Forward = Callable[[Any, jax.Array], jax.Array]


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        up, down = own
        x = x - x.mean(-1, keepdims=True)
        normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x + jax.nn.relu(normed @ up) @ down, None

    return jax.lax.scan(layer, x, params)[0]


def one_by_one(params: Any, x: jax.Array) -> jax.Array:
    for w in params.reshape(-1, WIDTH, WIDTH):
        x = jax.nn.relu(x @ w)
    return x


def convolved(params: Any, x: jax.Array) -> jax.Array:
    x = x.reshape(-1, 16, 16, 1) * jnp.ones(64)
    for w in params.reshape(-1, 64, 4, 4, 64)[:2].transpose(0, 2, 3, 1, 4):
        numbers = "NHWC", "HWIO", "NHWC"
        x = x + jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    return x.mean(-1).reshape(-1, WIDTH)


def verified_plan(
    forward: Forward, params: Any, *sizes: int, remat: Remat = "", **fixed: int
) -> Plan:
    """Plan a step for eight devices and compile it; `sizes` is the shape of a sample."""

    def step(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((forward(params, x) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    traced = jax.jit(step).trace(params, plans.shape(ROWS, *sizes)).jaxpr
    inputs: list[tuple[str, Role]] = [
        (jax.tree_util.keystr(path), "carried")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    planning = Planning(verify=True, fixed=fixed, remat=remat)
    return plan_of(PlanQuery(traced, [*inputs, ("x", "batch")], named_target("8xCPU"), planning))


def bytes_by_collective(plan: Plan) -> dict[str, int]:
    """Return the bytes that the collectives of a plan produce, by kind."""
    assert plan.verified is not None
    return {one.kind: one.bytes for one in plan.verified.collectives}


@pytest.mark.parametrize(
    "forward",
    [scanned, *(pytest.param(f, marks=pytest.mark.full) for f in (one_by_one, convolved))],
)
def test_parameters_are_gathered_but_no_rows(forward: Forward) -> None:
    """Without constraints, XLA shards activations like the parameters and gathers the batch."""
    stack = plans.shape(LAYERS, WIDTH, WIDTH)
    params = STACKS if forward is scanned else stack
    plan = verified_plan(forward, params, WIDTH, data=8, zero=3)
    found = bytes_by_collective(plan)
    assert "all-to-all" not in found
    parameters = sum(t.device_bytes for t in plan.tensors if t.role == "parameter")
    assert 0 < found["all-gather"] <= 8 * parameters


@pytest.mark.full  # end_to_end/test_planned.py tests the numbers
@pytest.mark.parametrize("remat", ["", "full"])
def test_sequence_parallelism_gathers_no_parameter(remat: Remat) -> None:
    """Without constraints, XLA gathers parameters if activations are larger."""
    whole, sharded = (
        verified_plan(
            scanned, STACKS, LENGTH, WIDTH, remat=remat, data=2, model=4, sequence=sequence
        )
        for sequence in (0, 1)
    )
    passed = ROWS // 2 * LENGTH * WIDTH * 4
    assert bytes_by_collective(whole)["all-gather"] == passed, "not only the batch is gathered"
    assert bytes_by_collective(sharded)["all-gather"] == (1 + 3) * passed
    for plan in (whole, sharded):
        assert plan.verified is not None
        assert plan.verified.arguments == plan.memory.arguments
    assert whole.verified is not None
    assert sharded.verified is not None
    saved = whole.verified.temporaries - sharded.verified.temporaries
    assert saved >= LAYERS * passed * (1 - 1 / 4), "a layer stores whole activations"


@pytest.mark.parametrize(
    ("forward", "kernels"),
    [
        (convolved, 2),
        (lambda params, x: convolved(params, jnp.concatenate([x, x])).reshape(2, *x.shape)[0], 0),
        (lambda params, x: convolved(params, jnp.ones_like(x[:8])).mean() * x, 0),
        (one_by_one, 0),
    ],
    ids=["kernels", "two views", "no rows", "products"],
)
def test_zero_1_replicates_only_gradients_of_kernels(forward: Forward, kernels: int) -> None:
    """Images with unknown rows get no constraint: each device would compute all of them."""
    stack = plans.shape(LAYERS, WIDTH, WIDTH)
    rows = plans.shape(ROWS, WIDTH)

    def step(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda params: jnp.mean((forward(params, x) - x) ** 2))(params)

    closed = jax.jit(step).trace(stack, rows).jaxpr
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    constraints = MeshLayout(mesh, rows=False)
    constrained = with_sharded_products(closed, [("w", "carried"), ("x", "batch")], constraints)
    found = [e for e in constrained.jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    assert len(found) == kernels
    for constraint in found:
        assert constraint.params["sharding"].is_fully_replicated
        assert constraint.invars[0].aval.shape == (4, 4, 64, 64)
