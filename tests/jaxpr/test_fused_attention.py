"""cuDNN's fused attention in a step: dimensions that can be sharded, operations, microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.cost.roofline import attention_s
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.lookup import find
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL, Planning
from nbdist.worker.planning.rewrite import rewritten
from tests.plan_models import hardware

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Op

ROWS, LENGTH, HEADS, GROUPS, WIDTH = 16, 64, 8, 4, 32


def step(weights: Any, x: Any, *, causal: bool) -> Any:
    def loss(weights: Any) -> Any:
        q, k, v = (jnp.einsum("bsw,whd->bshd", x, each) for each in weights)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
        return jnp.mean(mixed.astype(jnp.float32) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - g, weights, slopes)


def traced(*, causal: bool = True) -> tuple[Any, Any]:
    """Return the step's jaxpr and its inputs. The version of cuDNN is a double: none is here."""
    half = jnp.bfloat16
    weights = [
        jax.ShapeDtypeStruct((HEADS * WIDTH, heads, WIDTH), half)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, HEADS * WIDTH), half)
    with mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", return_value=91000):
        closed = jax.make_jaxpr(lambda w, x: step(w, x, causal=causal))(weights, x)
    return closed, [*((f"w{n}", "carried") for n in range(3)), ("x", "batch")]


def attentions(*, causal: bool = True) -> list[Op]:
    return [op for op in model_of(*traced(causal=causal)).every_op if op.kind == "attention"]


def test_products_of_scores_are_counted() -> None:
    scores = 2.0 * ROWS * HEADS * LENGTH**2 * WIDTH
    assert [op.flops for op in attentions(causal=False)] == [2 * scores, 5 * scores]
    assert [op.flops for op in attentions()] == [scores, 2.5 * scores]


def test_heads_and_rows_are_sharded() -> None:
    model = model_of(*traced())
    assert not model.unpriced
    for sizes in ({DATA: 8, MODEL: 1}, {DATA: 2, MODEL: 4}, {DATA: 1, MODEL: 4}):
        devices = sizes[DATA] * sizes[MODEL]
        found = plan(model, hardware(f"{devices}xA100"), Planning(fixed=sizes))
        spec = {t.path: t.spec for t in found.tensors}
        assert spec["w0"][1] == spec["w1"][1] == ((MODEL,) if sizes[MODEL] > 1 else ())


def test_length_and_width_stay_whole() -> None:
    model = model_of(*traced())
    queries = attentions()[0].ins[0]
    blocked = [bool(model.groups[group].blocked) for group in queries.groups]
    assert blocked == [False, True, False, True]


def test_step_is_divided_into_microbatches() -> None:
    closed, inputs = traced()
    few = rewritten(closed, inputs, "", 4)
    shapes = [op.ins[0].sizes for op in model_of(few, inputs).every_op if op.kind == "attention"]
    assert shapes == [(ROWS // 4, LENGTH, HEADS, WIDTH)] * 2


def test_slower_of_products_and_memory_counts() -> None:
    chip = find("A100")
    assert chip is not None
    calibration = calibration_of(chip)
    small, more, moved = (
        attention_s(flops, nbytes, "bfloat16", chip, calibration)
        for flops, nbytes in ((1e12, 1e3), (2e12, 1e3), (1e3, 1e10))
    )
    start = calibration.kernel_s
    assert more - start == pytest.approx(2 * (small - start))
    expected = 1e10 / (chip.bytes_per_s * calibration.memory_efficiency)
    assert moved - start == pytest.approx(expected)
