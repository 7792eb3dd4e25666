"""Pallas kernels in a plan: operations, memory, and what cannot be split."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.gpu.attention import mha
from jax.experimental.pallas.ops.gpu.layer_norm import layer_norm
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import make_splash_mha
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL, Planning
from tests import pallas_steps
from tests.plan_models import hardware

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Model, Op

ROWS, HEADS, LENGTH, WIDTH = 8, 4, 512, 128
SCORES = 2.0 * ROWS * HEADS * LENGTH**2 * WIDTH
"""Operations of one product of the size of all scores."""

SCRATCH = tpu.VMEM((1, WIDTH), jnp.bfloat16)


def model(step: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Model:
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    inputs: Any = [(f"x{n}", "batch") for n in range(len(shapes))]
    return model_of(jax.make_jaxpr(step)(*given), inputs)


def kernels(found: Model) -> list[Op]:
    return [op for op in found.every_op if op.kind == "attention"]


def gradient(attention: Callable[..., Any]) -> Callable[..., Any]:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


def splash(q: Any, k: Any, v: Any) -> Any:
    mask = masks.MultiHeadMask([masks.FullMask((LENGTH, LENGTH))] * HEADS)
    return jax.vmap(make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1))(q, k, v)


@pytest.mark.parametrize(
    ("attention", "heads", "products"),
    [
        (partial(mha, segment_ids=None), 2, [2, 0, 7]),
        (flash_attention, 1, [2, 4, 3]),
        (splash, 1, [2, 4, 3]),
    ],
)
def test_products_of_public_kernels_are_counted(
    attention: Any, heads: int, products: list[int]
) -> None:
    """The backward kernels compute scores two times: 9 products in all with the forward pass."""
    shape = [ROWS, LENGTH, WIDTH]
    shape.insert(heads, HEADS)
    found = model(gradient(attention), *[tuple(shape)] * 3)
    assert [op.flops / SCORES for op in kernels(found)] == products
    assert found.unpriced == ()
    assert found.notes == ()


def test_a_forward_pass_costs_what_plain_attention_does() -> None:
    shape = (ROWS, LENGTH, HEADS, WIDTH)
    fused = model(partial(mha, segment_ids=None), *[shape] * 3)
    plain = model(jax.nn.dot_product_attention, *[shape] * 3)
    whole = sum(op.flops for op in plain.every_op if op.kind == "dot")
    assert sum(op.flops for op in kernels(fused)) == pytest.approx(whole, rel=0.03)


@pytest.mark.parametrize("attention", [partial(mha, segment_ids=None), flash_attention])
def test_blocks_that_a_causal_mask_excludes_are_not_counted(attention: Any) -> None:
    shape = (ROWS, HEADS, LENGTH, WIDTH)
    if attention is not flash_attention:
        shape = (ROWS, LENGTH, HEADS, WIDTH)
    causal = partial(attention, causal=True)
    (op,) = kernels(model(causal, *[shape] * 3))
    blocks = LENGTH // 128
    assert op.flops / SCORES == 2 * (blocks + 1) / (2 * blocks)


def test_kernels_without_products_count_their_memory_traffic() -> None:
    found = model(layer_norm, (ROWS, LENGTH, WIDTH), (WIDTH,), (WIDTH,), dtype=jnp.float32)
    (op,) = kernels(found)
    assert op.flops == 0
    assert found.unpriced == ()


def test_scores_take_no_memory() -> None:
    shape = (ROWS, LENGTH, HEADS, WIDTH)
    attentions = partial(mha, segment_ids=None), jax.nn.dot_product_attention
    fused, plain = (
        plan(model(gradient(each), *[shape] * 3), hardware("1xA100"), Planning()).memory.total
        for each in attentions
    )
    assert fused < plain - ROWS * HEADS * LENGTH**2 * 2


def test_rows_and_heads_may_be_sharded_and_the_rest_stays_whole() -> None:
    found = model(partial(mha, segment_ids=None), *[(ROWS, LENGTH, HEADS, WIDTH)] * 3)
    for value in (*kernels(found)[0].ins, *kernels(found)[0].outs):
        blocked = [bool(found.groups[group].blocked) for group in value.groups]
        assert blocked == [False, True, False, True]


def test_a_plan_shards_the_projections_of_heads() -> None:
    found = pallas_steps.model()
    for sizes in ({DATA: 8, MODEL: 1}, {DATA: 2, MODEL: 4}):
        planned = plan(found, hardware("8xA100"), Planning(fixed=sizes))
        spec = {tensor.path: tensor.spec for tensor in planned.tensors}
        assert spec["q"][1] == ((MODEL,) if sizes[MODEL] > 1 else ())
        assert not any("computing time is unknown" in text for text in planned.warnings)


def counted(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * pl.program_id(0)


def summed(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] += x_ref[...]


def plain(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


def shared(x_ref: Any, o_ref: Any, total: Any) -> None:
    total[...] += x_ref[...]
    o_ref[...] = total[...]


def printed(x_ref: Any, o_ref: Any) -> None:
    jax.debug.print("step")
    o_ref[...] = x_ref[...]


def stashed(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...]
    x_ref[...] = x_ref[...] * 2


def by_row(kernel: Any, out: Any = lambda row: (row, 0), rows: int = 1, **given: Any) -> Any:
    def run(x: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(ROWS,),
            in_specs=[pl.BlockSpec((rows, WIDTH), lambda row: (row, 0))],
            out_specs=pl.BlockSpec((rows, WIDTH), out),
            out_shape=jax.ShapeDtypeStruct((ROWS * rows, WIDTH), x.dtype),
            interpret=True,
            **given,
        )(x)

    return run


@pytest.mark.parametrize(
    ("step", "rows", "reason"),
    [
        (by_row(counted), 1, "reads its program_id"),
        (by_row(summed, lambda _: (0, 0)), 1, "several steps write the same block"),
        (by_row(plain, lambda row: (row ^ 1, 0)), 1, "an index map computes with it"),
        (by_row(plain, rows=2), 2, "its blocks have several rows"),
        (by_row(shared, scratch_shapes=[SCRATCH]), 1, "share scratch memory"),
        (by_row(printed), 1, "the kernel uses debug_print"),
        (by_row(stashed), 1, "the kernel writes to an input"),
    ],
)
def test_a_kernel_that_cannot_be_split_is_whole(step: Any, rows: int, reason: str) -> None:
    found = model(step, (ROWS * rows, WIDTH))
    (note,) = found.notes
    assert note.startswith("the Pallas kernel ")
    assert reason in note
    assert all(found.groups[group].blocked for group in kernels(found)[0].outs[0].groups)


def test_products_of_rolled_elements_are_counted() -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        x = tpu.roll(x_ref[...], 1, 0)
        o_ref[...] = jnp.dot(x, x.T)

    def step(x: Any) -> Any:
        spec = pl.BlockSpec((None, WIDTH, WIDTH), lambda row: (row, 0, 0))
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(kernel, grid=ROWS, in_specs=[spec], out_specs=spec, out_shape=like)
        return call(x)

    found = model(step, (ROWS, WIDTH, WIDTH))
    assert [op.flops for op in kernels(found)] == [2.0 * ROWS * WIDTH**3]
    assert (found.unpriced, found.notes) == ((), ())


def test_a_kernel_in_a_while_loop_is_whole() -> None:
    def step(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.sum() < 1, by_row(plain), x)

    assert any("it is in a while loop" in note for note in model(step, (ROWS, WIDTH)).notes)


def test_a_kernel_in_a_jit_that_sets_shardings_is_whole() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    place = jax.NamedSharding(mesh, jax.P("data"))
    for own, is_whole in (({}, False), ({"out_shardings": place}, True)):
        found = model(jax.jit(by_row(plain), **own), (ROWS, WIDTH))
        assert any("in a jit that sets shardings" in note for note in found.notes) == is_whole
        (op,) = kernels(found)
        assert bool(found.groups[op.outs[0].groups[0]].blocked) == is_whole


def test_heads_that_share_keys_stay_whole_and_rows_do_not() -> None:
    def step(q: Any, k: Any) -> Any:
        own = pl.BlockSpec((None, LENGTH, None, WIDTH), lambda row, head: (row, 0, head, 0))
        shared = pl.BlockSpec((None, LENGTH, None, WIDTH), lambda row, head: (row, 0, head // 2, 0))

        def product(q_ref: Any, k_ref: Any, o_ref: Any) -> None:
            o_ref[...] = (q_ref[...] @ k_ref[...].T)[:, :WIDTH]

        return pl.pallas_call(
            product,
            grid=(ROWS, HEADS),
            in_specs=[own, shared],
            out_specs=own,
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            interpret=True,
        )(q, k)

    found = model(step, (ROWS, LENGTH, HEADS, WIDTH), (ROWS, LENGTH, HEADS // 2, WIDTH))
    blocked = [bool(found.groups[g].blocked) for g in kernels(found)[0].outs[0].groups]
    assert blocked == [False, True, True, True]


def test_a_grid_of_unknown_size_counts_with_the_estimate_of_the_kernel() -> None:
    shapes = [(256, 256), (4, 256, 256)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    closed = jax.make_jaxpr(lambda a, b, n: gmm(a, b, n, jnp.float32))(*arrays, sizes)
    found = model_of(closed, [("a", "batch"), ("b", "carried"), ("n", "carried")])
    (op,) = kernels(found)
    assert op.flops == 2 * 256**3
    assert found.unpriced == ()


def test_a_call_of_another_version_of_jax_is_whole_and_has_no_price() -> None:
    closed = jax.make_jaxpr(by_row(plain))(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    (call,) = closed.eqns
    changed = call.replace(params={**call.params, "backend": None})  # as in JAX 0.9
    found = model_of(closed.replace(jaxpr=closed.jaxpr.replace(eqns=[changed])), [("x", "batch")])
    assert found.unpriced == ("pallas_call",)
    assert "this form of a Pallas call is not known" in found.notes[0]


def test_a_loop_that_depends_on_data_has_no_price() -> None:
    def halved(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x_ref[...])

    assert model(by_row(halved), (ROWS, WIDTH)).unpriced == ("pallas_call",)


def test_a_kernel_with_scratch_memory_of_each_step_may_be_split() -> None:
    parallel = tpu.CompilerParams(dimension_semantics=("parallel",))
    step = by_row(shared, scratch_shapes=[SCRATCH], compiler_params=parallel)
    assert model(step, (ROWS, WIDTH)).notes == ()
