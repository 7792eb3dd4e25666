"""Layers in stages: results equal to the original step, or a reason for the refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings

from nbdist.errors import PlanError
from nbdist.jaxpr.pipeline.build import as_pipeline, layers_of
from nbdist.jaxpr.planner_model import model_of
from nbdist.records import GPIPE, Staging
from nbdist.worker.planning.rewrite import rewriting
from tests.jaxpr.test_microbatches import assert_same, rows_of
from tests.jaxpr.test_remat import (
    LAYERS,
    ROWS,
    WIDTH,
    block,
    params_and_batch,
    plain_loss,
    scanned,
    second_loss,
    step_of,
    traced,
    unrolled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Remat


def stacked(layers: int) -> Any:
    rng = np.random.default_rng(layers)

    def normal(*shape: int) -> Any:
        return np.float32(rng.normal(size=(layers, *shape)) / shape[0] ** 0.5 / 2)

    return {"up": normal(5, 7), "down": normal(7, 5)}


def training(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step that yields its loss, auxiliary results and new parameters."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            out, more, loss = forward(params, batch[0])
            return jnp.mean((out - batch[1]) ** 2) + loss, more

        (loss, more), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return loss, more, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def assert_same_in_stages(
    step: Callable[..., Any],
    params: Any,
    batch: Any,
    stages: int,
    micro: int,
    remat: Remat = "",
    staging: Staging = GPIPE,
) -> None:
    made = jax.jit(rewriting(step, remat, micro, stages, staging=staging))(params, batch)
    assert_same(made, jax.jit(step)(params, batch))


@pytest.mark.parametrize(
    ("stages", "micro", "per"),
    [(2, 1, 3), (3, 5, 1), pytest.param(4, 2, 2, marks=pytest.mark.full)],
)
def test_stages_give_the_results_of_one_stage(stages: int, micro: int, per: int) -> None:
    """Include one microbatch, more and fewer than stages, and several layers of a stage."""
    assert_same_for_sizes(stages, micro, per)


@pytest.mark.full
@settings(max_examples=5, deadline=None)
@given(stages=st.integers(2, 4), micro=st.integers(1, 6), per=st.integers(1, 3))
def test_any_stages_give_the_results_of_one_stage(stages: int, micro: int, per: int) -> None:
    assert_same_for_sizes(stages, micro, per)


def assert_same_for_sizes(stages: int, micro: int, per: int) -> None:
    def forward(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, p: (block(x, p), None), x, params)[0], None, 0.0

    rows = rows_of(2, 2 * micro, 3, 5)
    assert_same_in_stages(
        training(forward), stacked(stages * per), (rows[0], rows[1]), stages, micro
    )


@pytest.mark.parametrize(
    "remat", [*(pytest.param(r, marks=pytest.mark.full) for r in ("", "full")), "selective"]
)
def test_remat_in_stages_gives_the_same_results(remat: Remat) -> None:
    step = step_of(scanned)
    assert_same(
        jax.jit(rewriting(step, remat, 4, 3))(*params_and_batch()),
        jax.jit(step)(*params_and_batch()),
    )


@pytest.mark.parametrize("name", ["tied transformer", "transformer"])
@pytest.mark.parametrize("remat", ["", pytest.param("full", marks=pytest.mark.full)])
def test_transformer_trains_as_in_one_stage(name: str, remat: Remat) -> None:
    assert second_loss(name, remat, 8, 2) == pytest.approx(plain_loss(name), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["LSTM", *(pytest.param(n, marks=pytest.mark.full) for n in ("CNN", "U-Net"))]
)
def test_step_without_layer_scan_gets_an_example(name: str) -> None:
    """A scan over time does not count: each of its iterations reads its own rows."""
    with pytest.raises(PlanError, match=r"no scan over layers .* x, _ = jax.lax.scan\("):
        second_loss(name, "", 4, 2)


@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.full), True])
def test_layers_carry_keys_sums_and_shared_weights(checkpointed: bool) -> None:
    """Include keys, accumulated sums, masks, shared weights and reused results of each layer."""

    def layer(shared: Any, mask: Any, carry: Any, own: Any) -> Any:
        x, key, count, loss = carry
        key, noise = jax.random.split(key)
        out_rows = block(x, own) * mask[:, None] + x @ shared / (count + 1)
        out_rows += 0.1 * jax.random.normal(noise, out_rows.shape[-1:])
        return (out_rows, key, count + 1, loss + (out_rows**2).sum()), (out_rows, own["up"].sum())

    def forward(params: Any, x: Any) -> Any:
        own, shared = params
        mask = (x[:, 0] > 0).astype(x.dtype)
        layer_step = lambda carry, own: layer(shared, mask, carry, own)  # noqa: E731
        start = x, jax.random.key(3), 0, jnp.float32(0.5)
        (out, key, count, loss), (hidden, sums) = jax.lax.scan(
            jax.checkpoint(layer_step) if checkpointed else layer_step, start, own
        )
        more = hidden, sums, count, jax.random.key_data(key)
        return out + hidden[1], more, 0.01 * loss + (hidden[2] ** 2).mean()

    params, step = (stacked(6), rows_of(5, 5)), training(forward)
    batch = rows_of(12, 5), rows_of(2, 12, 5)[1]
    assert_same_in_stages(step, params, batch, 3, 4)
    assert layers_of(*traced(step, params, batch)) == (6, 6)


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("remat", [pytest.param("", marks=pytest.mark.full), "full"])
def test_dropout_matches_the_whole_batch(checkpointed: bool, remat: Remat) -> None:
    def forward(params: Any, x: Any) -> Any:
        def layer(carry: Any, own: Any) -> Any:
            h, key = carry
            params, seed = own
            key, noise = jax.random.split(key)
            h = block(h, params) * jax.random.bernoulli(seed, 0.8, h.shape)
            noise, more = jax.random.split(noise)
            h = h * jax.random.bernoulli(more, 0.9, h.shape)
            return (h + 0.1 * jax.random.normal(noise, h.shape), key), None

        keys = jax.random.split(jax.random.key(1), 4)
        run = jax.checkpoint(layer) if checkpointed else layer
        (out, _), _ = jax.lax.scan(run, (x, jax.random.key(2)), (params, keys))
        return out, None, 0.0

    rows, step = rows_of(2, 8, 3, 5), training(forward)
    made = jax.jit(rewriting(step, remat, 4, 2))(stacked(4), (rows[0], rows[1]))
    assert_same(made, jax.jit(step)(stacked(4), (rows[0], rows[1])))


@pytest.mark.parametrize("remat", [pytest.param("", marks=pytest.mark.full), "full"])
def test_accumulated_sum_may_start_as_a_number(remat: Remat) -> None:
    def forward(params: Any, x: Any) -> Any:
        def layer(carry: Any, own: Any) -> Any:
            h, loss = carry
            h = block(h, own)
            return (h, loss + (h**2).mean()), None

        (out, loss), _ = jax.lax.scan(layer, (x, 0.0), params)
        return out, None, 0.1 * loss

    rows, step = rows_of(2, 8, 5), training(forward)
    made = jax.jit(rewriting(step, remat, 4, 2))(stacked(4), (rows[0], rows[1]))
    assert_same(made, jax.jit(step)(stacked(4), (rows[0], rows[1])))


@pytest.mark.parametrize("remat", [pytest.param("", marks=pytest.mark.full), "full"])
def test_layers_may_branch_by_kind(remat: Remat) -> None:
    def forward(params: Any, x: Any) -> Any:
        def layer(h: Any, at: Any) -> Any:
            own, is_first = at
            other = lambda h: jnp.sin(h) + jnp.tanh(h @ own["up"]) @ own["down"]  # noqa: E731
            return jax.lax.cond(is_first, lambda h: block(h, own), other, h), None

        kinds = jnp.array([True, False, False, True])
        return jax.lax.scan(layer, x, (params, kinds))[0], None, 0.0

    rows, step = rows_of(2, 8, 5), training(forward)
    made = jax.jit(rewriting(step, remat, 4, 2))(stacked(4), (rows[0], rows[1]))
    assert_same(made, jax.jit(step)(stacked(4), (rows[0], rows[1])))


def test_branch_on_the_batch_is_refused() -> None:
    def step(params: Any, batch: Any) -> Any:
        def layer(h: Any, own: Any) -> Any:
            made = jax.lax.cond(h.sum() > 0, lambda h: block(h, own), lambda h: h, h)
            return made, None

        return jax.lax.scan(layer, batch, params)[0]

    with pytest.raises(PlanError, match=r"gt \(line .*jax.lax.cond.* needs a sum over all rows"):
        layers_of(*traced(step, stacked(4), rows_of(8, 5)))


def test_other_scans_are_unchanged() -> None:
    """Check a scan of a single layer, and one over time in a checkpoint."""

    def forward(params: Any, x: Any) -> Any:
        first, rest = params

        @jax.checkpoint
        def through_time(x: Any) -> Any:
            def later(state: Any, now: Any) -> Any:
                state = jnp.tanh(now + state)
                return state, state

            return jax.lax.scan(later, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)

        layer = lambda h, own: (block(h, own), None)  # noqa: E731
        out, _ = jax.lax.scan(layer, through_time(x), first)
        return jax.lax.scan(layer, out, rest)[0], None, 0.0

    rows, params = rows_of(2, 8, 3, 5), (stacked(1), stacked(4))
    step = training(forward)
    assert_same_in_stages(step, params, (rows[0], rows[1]), 2, 4)
    assert layers_of(*traced(step, params, (rows[0], rows[1]))) == (4, 4)


@pytest.mark.parametrize("rows", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 3)), 6])
def test_last_batch_may_have_fewer_rows(rows: int) -> None:
    """Rows that microbatches do not divide pass the layers as one batch."""
    step = step_of(scanned)
    params, (x, y) = params_and_batch()
    few = x[:rows], y[:rows]
    assert_same(jax.jit(rewriting(step, "", 4, 3))(params, few), jax.jit(step)(params, few))


def test_encoder_and_decoder_with_attention() -> None:
    def forward(params: Any, x: Any) -> Any:
        first, second = params
        seen, _ = jax.lax.scan(lambda h, p: (block(h, p), None), x, first)

        def layer(h: Any, p: Any) -> Any:
            scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, seen))
            return block(h + jnp.einsum("bqk,bkd->bqd", scores, seen), p), None

        out, _ = jax.lax.scan(layer, x[:, ::-1], second)
        return out, None, 0.0

    rows, params = rows_of(2, 8, 3, 5), (stacked(4), stacked(2))
    step = training(forward)
    assert_same_in_stages(step, params, (rows[0], rows[1]), 2, 4)
    assert sorted(layers_of(*traced(step, params, (rows[0], rows[1])))) == [2, 2, 4, 4]


def test_layers_may_scan_over_time() -> None:
    def forward(params: Any, x: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            def later(state: Any, now: Any) -> Any:
                state = jnp.tanh(now @ p["up"] @ p["down"] + state)
                return state, state

            return jax.lax.scan(later, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[1].swapaxes(
                0, 1
            ), None

        return jax.lax.scan(layer, x, params)[0], None, 0.0

    rows = rows_of(2, 8, 3, 5)
    assert_same_in_stages(training(forward), stacked(4), (rows[0], rows[1]), 2, 4)
    assert layers_of(*traced(training(forward), stacked(4), (rows[0], rows[1]))) == (4, 4)


def test_stacked_layer_results_without_gradients() -> None:
    def step(params: Any, batch: Any) -> Any:
        x, y = batch
        out, hidden = jax.lax.scan(lambda h, p: (block(h, p), h), x, params)
        back, _ = jax.lax.scan(
            lambda h, at: (h * 0.5 + block(at[0], at[1]), None), y, (hidden, params), reverse=True
        )
        return out, back, hidden

    rows = rows_of(2, 8, 5)
    assert_same_in_stages(step, stacked(4), (rows[0], rows[1]), 2, 4)
    assert layers_of(*traced(step, stacked(4), (rows[0], rows[1]))) == (4, 4)


def test_idle_stages_do_not_change_results() -> None:
    """Idle stages compute on another microbatch; a layer may yield NaN there."""

    def forward(params: Any, x: Any) -> Any:
        def layer(carry: Any, p: Any) -> Any:
            h, count = carry
            # In order, each layer receives its own first element; out of order the root is NaN.
            root = jnp.sqrt(h[:, :1] - count)
            made = jnp.concatenate(
                [h[:, :1] + 1, h[:, 1:] + jnp.tanh(h @ p["up"] @ p["down"])[:, 1:] * root], 1
            )
            return (made, count + 1.0), None

        (out, _), _ = jax.lax.scan(layer, (x.at[:, 0].set(0.5), 0.0), params)
        return out, None, 0.0

    rows = rows_of(2, 8, 5)
    step = training(forward)
    made = jax.jit(rewriting(step, "", 2, 4))(stacked(4), (rows[0], rows[1]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made))
    assert_same_in_stages(step, stacked(4), (rows[0], rows[1]), 4, 2)


def test_parameters_may_be_cast_to_bfloat16() -> None:
    def forward(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
            return x + jnp.tanh(x.astype(jnp.bfloat16) @ p["up"] @ p["down"]).astype(x.dtype), None

        return jax.lax.scan(layer, x, params)[0], None, 0.0

    rows = rows_of(2, 8, 5)
    step, batch = training(forward), (rows[0], rows[1])
    made = jax.jit(rewriting(step, "", 4, 2))(stacked(4), batch)
    assert_same(made, jax.jit(step)(stacked(4), batch), rtol=2e-2)


def test_flax_and_optax_step_runs_in_stages() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            made = nnx.vmap(Layer, in_axes=(nnx.StateAxes({...: 0}),), out_axes=0)
            self.layers = nnx.split_rngs(splits=4)(made)(rngs)
            self.last = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            through = nnx.scan(
                lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            return self.last(through(x, self.layers))

    def trained(stages: int) -> Any:
        model = Net(nnx.Rngs(0))
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        optimizer = nnx.Optimizer(model, clipped, wrt=nnx.Param)
        graph, state = nnx.split((model, optimizer))

        def step(state: Any, batch: Any) -> Any:
            model, optimizer = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch) - 1.0) ** 2))(model)
            optimizer.update(model, grads)
            return loss, nnx.state((model, optimizer))

        run = jax.jit(rewriting(step, "", 4, stages) if stages > 1 else step)
        losses = []
        for _ in range(3):
            loss, state = run(state, rows_of(16, 8))
            losses.append(float(loss))
        return losses

    assert trained(2) == pytest.approx(trained(1), rel=1e-5)


def gradient_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            start = batch, jnp.float32(0)
            (out, loss), _ = jax.lax.scan(lambda c, p: (layer(*c, p), None), start, params)
            return (out**2).mean() + loss

        return jax.value_and_grad(loss_of)(params)

    return step


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda x, s, p: (x - x.mean(0) + block(x, p), s), "needs the sum over all rows"),
        (
            lambda x, s, p: (x[::-1] + block(x, p), s),
            r"rev \(line \d+: `.*\) is not known to treat",
        ),
        (lambda x, s, p: (block(x, p) * (1 + s), s + x.sum()), "needs a sum over all rows"),
        (
            lambda x, s, p: (block(x, p), x.sum() - s),
            "a layer reads a sum over all rows of the batch",
        ),
        (lambda x, s, p: (block(x, p), s + x.sum() ** 2), "needs a sum over all rows"),
        (lambda x, s, p: (block(x, p), x.sum()), "a layer reads a sum over all rows of the batch"),
    ],
)
def test_layers_that_mix_rows_are_refused(layer: Callable[..., Any], message: str) -> None:
    closed, inputs = traced(gradient_step(layer), stacked(4), rows_of(8, 5))
    with pytest.raises(PlanError, match=f"the scan over 4 layers cannot run in .*: .*{message}"):
        as_pipeline(closed, inputs, 2, 4)
    with pytest.raises(PlanError, match=message):
        layers_of(closed, inputs)


def test_indivisible_sizes_are_refused_with_alternatives() -> None:
    closed, inputs = traced(step_of(scanned), *params_and_batch())
    assert set(layers_of(closed, inputs)) == {LAYERS}
    with pytest.raises(PlanError, match=rf"{LAYERS} layers are too few .* use {LAYERS} stages"):
        as_pipeline(closed, inputs, LAYERS + 1, 4)
    with pytest.raises(PlanError, match=rf"{ROWS} rows .* micro=6: .* 2, 4, 8, 16, 32, 64, or"):
        as_pipeline(closed, inputs, 2, 6)
    closed, inputs = traced(step_of(unrolled), *params_and_batch())
    with pytest.raises(PlanError, match="no scan over layers"):
        layers_of(closed, inputs)


def test_checkpoint_around_all_layers_is_refused() -> None:
    step = step_of(jax.checkpoint(scanned))
    closed, inputs = traced(step, *params_and_batch())
    assert model_of(closed, inputs).ops
    assert_same(
        jax.jit(rewriting(step, "full", 1))(*params_and_batch()), jax.jit(step)(*params_and_batch())
    )
    with pytest.raises(PlanError, match=r"checkpoint the layer instead"):
        as_pipeline(closed, inputs, 2, 4)


def test_stage_keeps_only_results_of_its_layers() -> None:
    """Each stack of layer results has a stage dimension; no value holds all layers."""
    stages, micro = 4, 8
    closed, inputs = traced(step_of(scanned), *params_and_batch())
    made = as_pipeline(closed, inputs, stages, micro)
    shapes = {var.aval.shape for eqn in made.jaxpr.eqns for var in eqn.outvars}
    ticks, part = micro + stages - 1, ROWS // micro
    assert (ticks, stages, 1, LAYERS // stages, part, 4 * WIDTH) in shapes
    assert not [shape for shape in shapes if shape[:1] == (LAYERS,) and ROWS in shape]
    whole = {var.aval.shape for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    assert (LAYERS, ROWS, 4 * WIDTH) in whole
