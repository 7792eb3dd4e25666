"""Plans of steps that were planned before."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

from nbdist.errors import PlanError
from nbdist.records import Planning
from nbdist.worker.planning.plan_step import named_target, plan_of
from nbdist.worker.planning.query import PlanQuery


def traced(rows: int, scale: float) -> tuple[jax.core.ClosedJaxpr, list[tuple[str, str]]]:
    """Trace a step over `rows` samples, with a constant whose values depend on `scale`."""
    constant = scale * jnp.arange(16.0)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - constant) ** 2))(w)
        return w - 0.1 * gradient, loss

    of = jax.ShapeDtypeStruct((32, 16), "float32"), jax.ShapeDtypeStruct((rows, 32), "float32")
    return jax.jit(step).trace(*of).jaxpr, [("w", "carried"), ("x", "batch")]


def planned(rows: int = 64, scale: float = 1.0, on: str = "4xH100", **options: object) -> object:
    return plan_of(PlanQuery(*traced(rows, scale), named_target(on), Planning(on=on, **options)))


def test_an_equal_step_gets_the_same_plan() -> None:
    assert planned() is planned()
    assert planned(scale=2.0) is planned(), "a plan depends on shapes, not on values"


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 128},
        {"on": "8xH100"},
        {"fixed": {"model": 2}},
        {"budget": 2**30},
        {"remat": "full"},
    ],
    ids=str,
)
def test_another_step_or_request_is_planned(other: dict[str, object]) -> None:
    assert planned(**other) is not planned()  # type: ignore[arg-type]


def test_specs_of_the_user_are_planned_for() -> None:
    step, target = traced(64, 1.0), named_target("4xH100")
    free = plan_of(PlanQuery(*step, target, Planning()))
    fixed = plan_of(PlanQuery(*step, target, Planning(), {"w": (("model",), ())}))
    assert fixed is not free


def test_only_the_latest_plans_are_kept() -> None:
    first = planned(rows=64)
    for rows in range(65, 65 + 20):
        planned(rows=rows * 4)
    assert planned(rows=64) is not first
    assert planned(rows=64) == first


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_plan_leaves_the_collection_of_garbage_as_it_was(*, is_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(PlanError, match="does not fit"):
            planned(budget=1)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()


def layers_one_by_one() -> tuple[jax.core.ClosedJaxpr, list[tuple[str, str]]]:
    """Trace a step of Adam that applies ten equal layers one by one to a batch of 16 rows."""
    width = 1024

    def step(carried: tuple[list[jax.Array], ...], x: jax.Array) -> object:
        def loss_of(params: list[jax.Array]) -> jax.Array:
            h = x
            for weights in params:
                h = h + jnp.tanh(h @ weights)
            return (h**2).mean()

        params, moments = carried
        grads = jax.grad(loss_of)(params)
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        return [p - 0.1 * m for p, m in zip(params, moments, strict=True)], moments

    layer = jax.ShapeDtypeStruct((width, width), "float32")
    carried = [layer] * 10, [layer] * 10
    traced = jax.jit(step).trace(carried, jax.ShapeDtypeStruct((16, width), "float32"))
    return traced.jaxpr, [*((f"p{n}", "carried") for n in range(20)), ("x", "batch")]


def test_layers_one_by_one_get_stages() -> None:
    """Each stage stores a quarter of each layer and of its moments."""
    step, target = layers_one_by_one(), named_target("4xH100")
    found = plan_of(PlanQuery(*step, target, Planning(fixed={"stage": 4})))
    layers = [t for t in found.tensors if t.role != "batch"]
    assert all(("stage",) in t.spec for t in layers)
    assert sum(t.device_bytes for t in layers) == 20 * 2**22 // 4


def test_stages_of_layers_one_by_one_are_listed_when_memory_requires_them() -> None:
    step, target = layers_one_by_one(), named_target("4xH100")
    request = Planning(fixed={"model": 1, "zero": 0}, budget=90 * 2**20)
    assert plan_of(PlanQuery(*step, target, request)).axes["stage"] > 1


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        ({"stage": 2, "model": 2}, "model is 2: layers that are applied one by one have stages w"),
        ({"stage": 2, "rounds": 2}, "layers that are applied one by one run in one round"),
    ],
)
def test_tensor_parallelism_and_rounds_need_a_scan(fixed: dict[str, int], reason: str) -> None:
    step, target = layers_one_by_one(), named_target("4xH100")
    with pytest.raises(PlanError, match=reason):
        plan_of(PlanQuery(*step, target, Planning(fixed=fixed)))


def test_layers_one_by_one_allow_1f1b() -> None:
    step, target = layers_one_by_one(), named_target("4xH100")
    found = plan_of(PlanQuery(*step, target, Planning(fixed={"stage": 4}, schedule="1f1b")))
    assert found.schedule == "1f1b"
