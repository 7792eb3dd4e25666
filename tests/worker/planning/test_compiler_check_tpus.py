"""Predicted memory of steps on TPUs, compared with their compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compiled_models import MODELS, stepped, traced
from benchmarks.language_models import gpt, traced_step
from nbdist.records import DATA, MODEL, STAGE, Planning
from nbdist.worker.planning import compiler_check
from nbdist.worker.planning.plan_step import named_target, plan_of
from nbdist.worker.planning.query import PlanQuery
from tests.oracles import there

if TYPE_CHECKING:
    from nbdist.records import Plan

pytestmark = there("tpu")

LAYERS, SIZE, CHANNELS = 6, 128, 64


def convolved(rows: int, **fixed: int) -> Plan:
    """Return a plan of convolutions with ReLUs for four TPUs."""
    kernels = [jax.ShapeDtypeStruct((3, 3, CHANNELS, CHANNELS), jnp.bfloat16)] * LAYERS
    images = jax.ShapeDtypeStruct((rows, SIZE, SIZE, CHANNELS), jnp.bfloat16)
    numbers = "NHWC", "HWIO", "NHWC"

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            x = jax.nn.relu(x)
        return (x.astype(jnp.float32) ** 2).mean()

    planning = Planning(verify=True, fixed={"micro": 1, **fixed})
    return plan_of(PlanQuery(*stepped(loss, kernels, images), named_target("v5e:2x2"), planning))


@pytest.mark.parametrize(("rows", "zero"), [(512, 0), (512, 1), (128, 0)])
def test_images_are_kept_once_and_padded(rows: int, zero: int) -> None:
    """Images are neither kept twice around the ReLU nor again for gradients of kernels.

    With 128 images on each device they need no padding; with 32, their channels are padded.
    """
    plan = convolved(rows, data=4, zero=zero)
    image = SIZE * SIZE * CHANNELS * 2
    kept = LAYERS * max(rows // 4, 64) * image
    assert plan.verified is not None
    assert kept < plan.verified.temporaries < 1.5 * kept
    assert 0.9 < plan.memory.needed / plan.verified.total < 1.1


@pytest.mark.full
@pytest.mark.parametrize("layers", [8, 6])
def test_even_and_uneven_stages_compile_with_predicted_memory(layers: int) -> None:
    """A GPT with Adam, 1,024 wide, on four stages."""
    model = gpt(vocabulary=32_000, width=1024, layers=layers, length=512, heads=16)
    fixed = {DATA: 2, MODEL: 1, STAGE: 4, "micro": 8, "zero": 0, "rounds": 1}
    planning = Planning(verify=True, fixed=fixed, remat="full", schedule="1f1b")
    plan = plan_of(PlanQuery(*traced_step(model, 64), named_target("v5e:2x4"), planning))
    assert plan.verified is not None
    assert 0.95 < plan.memory.needed / plan.verified.total < 1.09


@pytest.mark.full
@pytest.mark.parametrize("on", ["v5e:4x4", "v5p:4x4x4"])
@pytest.mark.parametrize("name", MODELS)
def test_best_plan_compiles_with_predicted_memory(
    name: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_check, "MOST", 1)
    plan = plan_of(PlanQuery(*traced(name), named_target(on), Planning(verify=True)))
    assert plan.verified is not None
    assert plan.verified.arguments == pytest.approx(plan.memory.arguments, rel=0.02)
    assert 0.85 < plan.memory.needed / plan.verified.total < 1.1
