"""Memory that steps take of TPUs, as it is expected and as their compiler says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compiled_models import MODELS, traced
from nbdist.plan.cost import Target
from nbdist.plan.defaults import calibration_of
from nbdist.plan.topology import parse
from nbdist.records import Planning
from nbdist.worker import oracle
from nbdist.worker.planning import plan_of
from tests.oracles import there

if TYPE_CHECKING:
    from nbdist.plan.model import Role
    from nbdist.records import Plan

pytestmark = there("tpu")

LAYERS, SIZE, CHANNELS = 6, 128, 64


def plan_on(on: str, step: Any, inputs: list[tuple[str, Role]], **wishes: Any) -> Plan:
    topology = parse(on)
    target = Target(topology, calibration_of(topology.chip))
    return plan_of(step, inputs, target, Planning(verify=True, **wishes), {})


def expected(plan: Plan) -> int:
    return plan.memory.total - plan.memory.margin


def convolved(rows: int, **fixed: int) -> Plan:
    """A plan for four TPUs of convolutions with ReLUs."""
    kernels = [jax.ShapeDtypeStruct((3, 3, CHANNELS, CHANNELS), jnp.bfloat16)] * LAYERS
    images = jax.ShapeDtypeStruct((rows, SIZE, SIZE, CHANNELS), jnp.bfloat16)
    numbers = "NHWC", "HWIO", "NHWC"

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            x = jax.nn.relu(x)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(kernels: Any, moments: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(kernels, x)
        moments = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), moments, slopes)
        return value, jax.tree.map(lambda k, m: k - 0.1 * m, kernels, moments), moments

    closed = jax.jit(step).trace(kernels, kernels, images).jaxpr
    inputs: list[tuple[str, Role]] = [(f"{n}", "carried") for n in range(2 * LAYERS)]
    return plan_on("v5e:2x2", closed, [*inputs, ("x", "batch")], fixed={"micro": 1, **fixed})


@pytest.mark.parametrize(("rows", "zero"), [(512, 0), (512, 1), (128, 0)])
def test_images_are_kept_once_and_padded(rows: int, zero: int) -> None:
    """Neither before the ReLU and after it, nor once more for kernels' gradients.

    With 128 of them on each device they lie without padding, with 32 their channels are padded.
    """
    plan = convolved(rows, data=4, zero=zero)
    image = SIZE * SIZE * CHANNELS * 2
    kept = LAYERS * max(rows // 4, 64) * image
    assert plan.verified is not None
    assert kept < plan.verified.temporaries < 1.5 * kept
    assert 0.9 < expected(plan) / plan.verified.total < 1.1


@pytest.mark.full
@pytest.mark.parametrize("on", ["v5e:4x4", "v5p:4x4x4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_best_plan_compiles_and_takes_what_was_expected(
    name: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "MOST", 1)
    plan = plan_on(on, *traced(name))
    assert plan.verified is not None
    assert plan.verified.arguments == pytest.approx(plan.memory.arguments, rel=0.02)
    assert 0.85 < expected(plan) / plan.verified.total < 1.1
