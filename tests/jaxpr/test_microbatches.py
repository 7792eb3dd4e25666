"""Microbatches: results equal to the whole batch, or a reason for the refusal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.errors import PlanError
from nbdist.planner.search.search import plan
from nbdist.records import Planning
from nbdist.worker.planning.rewrite import rewriting, rewritten
from tests.jaxpr.test_remat import (
    WIDTH,
    checkpointed,
    dropped_out,
    models,
    params_and_batch,
    plain_loss,
    scanned,
    second_loss,
    step_of,
    steps_of,
    traced,
    unrolled,
)
from tests.plan_models import engines, hardware

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Remat

REFUSED = {
    "depthwise CNN": "conv_general_dilated .*is not known to treat rows",
    "experts": "add_any .*needs the sum over all rows",
}
"""Models whose rows depend on each other, and patterns of the error."""


def in_bfloat16(params: Any, x: Any) -> Any:
    return unrolled(*jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))).astype(x.dtype)


def assert_same(one: Any, other: Any, rtol: float = 1e-5) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("remat", ["", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "forward", [pytest.param(unrolled, marks=pytest.mark.full), scanned, dropped_out, checkpointed]
)
def test_microbatches_give_the_results_of_whole_batch(
    forward: Callable[..., Any], remat: Remat
) -> None:
    step = step_of(forward)
    assert_same(
        jax.jit(rewriting(step, remat, 4))(*params_and_batch()), jax.jit(step)(*params_and_batch())
    )


def test_sums_over_microbatches_are_float32() -> None:
    step = step_of(in_bfloat16)
    whole, parts = (jax.jit(s)(*params_and_batch()) for s in (step, rewriting(step, "", 16)))
    assert_same(whole, parts, rtol=2e-2)
    program = str(jax.make_jaxpr(rewriting(step, "", 16))(*params_and_batch()))
    assert "scan" in program


@models("tied transformer", "recommender", "U-Net", "experts")
def test_every_model_trains_as_with_whole_batch(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(PlanError, match=REFUSED[name]):
            second_loss(name, "", 4)
    else:
        assert second_loss(name, "", 4) == pytest.approx(plain_loss(name), rel=1e-5)


def test_row_results_keep_their_order() -> None:
    def step(weights: Any, batch: Any) -> Any:
        rows, labels = batch
        out = rows @ weights
        named = jnp.take_along_axis(out, labels[:, None], axis=1)[:, 0]
        return jnp.sum(named), jnp.stack([named, named**2]), out.argmax(-1)

    rng = np.random.default_rng(2)
    batch = np.float32(rng.normal(size=(12, 5))), rng.integers(0, 7, 12).astype(np.int32)
    weights = np.float32(rng.normal(size=(5, 7)))
    assert_same(jax.jit(rewriting(step, "", 4))(weights, batch), jax.jit(step)(weights, batch))


def test_table_gets_gradients_of_all_rows() -> None:
    def step(table: Any, batch: Any) -> Any:
        grads = jax.grad(lambda table: jnp.mean(jnp.tanh(table[batch]) ** 2))(table)
        return table - grads, jnp.sqrt(jnp.sum(grads**2))

    table = np.float32(np.random.default_rng(3).normal(size=(9, 4)))
    batch = np.array([1, 1, 5, 0, 8, 5, 1, 2], np.int32)
    assert_same(jax.jit(rewriting(step, "", 4))(table, batch), jax.jit(step)(table, batch))


def test_fewer_rows_use_fewer_microbatches() -> None:
    step, (params, batch) = step_of(unrolled), params_and_batch()
    for rows in (6, 7):
        few = jax.tree.map(lambda array: array[:rows], batch)  # noqa: B023
        assert_same(jax.jit(rewriting(step, "", 4))(params, few), jax.jit(step)(params, few))


def normalised(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (normalised, "sub .*needs the sum over all rows for each row"),
        (lambda x: x @ x.T, "rows"),
        (lambda x: jnp.sort(x, axis=0), "sort .*is not known to treat rows"),
        (lambda x: x - jax.lax.stop_gradient(x.max(0)), "reduce_max .*is not known to treat rows"),
        (lambda x: jnp.roll(x, 1, axis=0), "is not known to treat rows"),
        (lambda x: x.reshape(-1, 2, WIDTH).sum(1), "rows are merged or split"),
        (lambda x: jnp.cumsum(x, axis=0), "cumsum .*is not known to treat rows"),
        (lambda x: x[jnp.argsort(x[:, 0])], "is not known to treat rows"),
        (
            lambda x: jax.lax.cond(x.sum() > 0, lambda y: y, lambda y: -y, x),
            "the taken branch depends on",
        ),
        (lambda x: jax.lax.map(jnp.tanh, x), "a scan iterates over rows of the batch"),
        (lambda x: x[::2], "is not known to treat rows"),
        (lambda x: jnp.flip(x, 0), "rev .*is not known to treat rows"),
    ],
)
def test_dependent_rows_are_refused(function: Callable[..., Any], message: str) -> None:
    def step(weights: Any, batch: Any) -> Any:
        return jax.grad(lambda weights: jnp.sum(function(batch @ weights) ** 2))(weights)

    weights = jnp.eye(WIDTH)
    closed, inputs = traced(step, weights, params_and_batch()[1][0])
    with pytest.raises(PlanError, match=message):
        rewritten(closed, inputs, "", 4)


def test_step_that_does_not_fit_uses_microbatches() -> None:
    """CPUs included. If the step cannot be split, the error of the plan states the reason."""
    closed, inputs = traced(step_of(unrolled), *params_and_batch())
    target = engines(1, 1)
    whole = plan(steps_of(closed, inputs), target, Planning())
    needed = whole.memory.total - whole.memory.margin
    limited = plan(
        steps_of(closed, inputs), target, Planning(budget=needed - whole.memory.activations // 4)
    )
    assert whole.micro == 1
    assert limited.micro > 1
    assert limited.title == f"one device, {limited.micro} microbatches"
    assert limited.memory.activations < whole.memory.activations / 1.5


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_sent_once_for_any_number_of_microbatches(zero: int) -> None:
    steps = steps_of(*traced(step_of(scanned), *params_and_batch()))
    fixed = {"data": 2, "model": 1, "zero": zero}
    few, more = (
        plan(steps, hardware("2xA100"), Planning(fixed=fixed | {"micro": micro})).time.traffic
        for micro in (2, 8)
    )
    assert [traffic.axis for traffic in few] == ["data"]
    assert few == more


def test_reason_against_microbatches_is_stated() -> None:
    closed, inputs = traced(step_of(lambda p, x: normalised(unrolled(p, x))), *params_and_batch())
    steps, target = steps_of(closed, inputs), engines(1, 1)
    whole = plan(steps, target, Planning())
    with pytest.raises(PlanError, match=r"no microbatches: .* needs the sum over all rows"):
        plan(steps, target, Planning(fixed={"micro": 4}))
    budget = whole.memory.total - whole.memory.margin - whole.memory.activations // 4
    pattern = r"(?s)the step does not fit.*\n\(no microbatches: sub .*needs"
    with pytest.raises(PlanError, match=pattern):
        plan(steps, target, Planning(budget=budget))


def rows_of(*shape: int) -> Any:
    return np.float32(np.random.default_rng(sum(shape)).normal(size=shape))


def through_barrier(w: Any, x: Any) -> Any:
    x, w = jax.lax.optimization_barrier((x, w))
    return jnp.sum(x @ w)


def noise_of_a_branch(w: Any, x: Any) -> Any:
    noise, other = jax.lax.cond(
        w[0, 0] > 0,
        lambda: (jnp.ones((8, 5)), jnp.arange(5.0)),
        lambda: (jnp.zeros((8, 5)), jnp.ones(5)),
    )
    return ((x + noise) @ w).mean(), other.sum()


def masked(w: Any, x: Any) -> Any:
    mask = jnp.arange(8) < x[0, 0] + 6

    def loss_of(w: Any) -> Any:
        return jnp.mean((x @ w).sum(-1) ** 2, where=mask)

    return jax.value_and_grad(loss_of)(w)


def weighted(w: Any, x: Any) -> Any:
    weights = jnp.abs(x[:, 0])
    return jax.grad(lambda w: (((x @ w) ** 2).sum(-1) * weights).sum() / weights.sum())(w)


def key_of_a_scan(w: Any, x: Any) -> Any:
    def layer(carry: Any, _: Any) -> Any:
        key, h = carry
        return (jax.random.fold_in(key, 1), jnp.tanh(h @ w @ w.T)), None

    (key, h), _ = jax.lax.scan(layer, (jax.random.key(3), x), None, length=3)
    return (h**2).mean(), jax.random.key_data(key)


OTHER_ROWS = rows_of(8, 5)


@pytest.mark.parametrize(
    "step",
    [
        through_barrier,
        noise_of_a_branch,
        masked,
        weighted,
        key_of_a_scan,
        lambda w, x: (x @ w > 0).sum() // 3,
        lambda w, x: (x @ w).sum(0).at[jnp.array([0, 7])].get(mode="fill", fill_value=7.0),
        lambda w, x: ((x + OTHER_ROWS) @ w).sum(),
        lambda w, x: OTHER_ROWS @ (w @ jnp.mean(x @ w, 0)),
        lambda w, x: (OTHER_ROWS * jnp.mean(x @ w)).sum(),
        lambda w, x: w.sum() + x.shape[0],
        lambda w, x: jnp.mean(((x - x.mean(0)) / x.std(0)) @ w),
        lambda w, x: jnp.sort(x, axis=0)[0].sum() + jnp.mean(x @ w),
    ],
)
def test_results_that_resemble_sums_are_correct(step: Callable[..., Any]) -> None:
    """Each of these steps once gave a wrong result or failed."""
    w, x = rows_of(5, 3), rows_of(8, 5)
    assert_same(jax.jit(rewriting(step, "", 4))(w, x), jax.jit(step)(w, x))


def all_pairs(w: Any, x: Any) -> Any:
    h = (x @ w).sum(-1)
    a, b = jnp.meshgrid(h, h)
    return jnp.exp(-((a - b) ** 2)).mean()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (all_pairs, "rows"),
        (
            lambda w, x: jax.lax.scan(
                lambda h, _: (jax.debug.print("{}", h.sum()) or jnp.tanh(h), None), x, None, 2
            )[0].sum(),
            r"debug_(print|callback) .*has side effects .*print\) inside a loop: remove it from",
        ),
        (
            lambda w, x: (jax.debug.print("{}", x), (x @ w).sum())[1],
            r"debug_(print|callback) .*has side effects .*print\): remove it, or omit micro",
        ),
    ],
)
def test_unsupported_steps_are_refused(step: Callable[..., Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        jax.jit(rewriting(step, "", 4))(rows_of(5, 3), rows_of(8, 5))


def test_loss_is_printed_once_for_whole_batch(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: Any, x: Any) -> Any:
        loss = jnp.sum(x @ w)
        jax.debug.print("loss {:.3f}", loss)
        return loss

    w, x = rows_of(5, 3), rows_of(8, 5)
    loss = float(jax.jit(rewriting(step, "", 4))(w, x))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == [f"loss {loss:.3f}", ""]


def test_every_divisor_of_the_batch_is_tried() -> None:
    params, (x, y) = params_and_batch()
    many = np.concatenate([x, x])[:100]
    closed, inputs = traced(step_of(unrolled), params, (many, np.concatenate([y, y])[:100]))
    whole = plan(steps_of(closed, inputs), engines(1, 1), Planning()).memory
    for part in (2, 4):
        budget = whole.total - whole.margin - whole.activations * part // 10
        found = plan(steps_of(closed, inputs), engines(1, 1), Planning(budget=budget))
        assert 100 % found.micro == 0
        assert found.micro > 1


@pytest.mark.full  # eleven seconds; tests/planner checks the texts
def test_step_is_planned_or_refused_for_every_budget() -> None:
    """Microbatches do not help if activations do not cause the peak memory."""

    def step(state: Any, batch: Any) -> Any:
        params, momentum = state
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean((unrolled(p, batch[0]) - batch[1]) ** 2)
        )(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        return loss, (jax.tree.map(lambda p, m: p - 0.1 * m / norm, params, momentum), momentum)

    params, batch = params_and_batch()
    closed, inputs = traced(step, (params, params), batch)
    for budget in range(1_200_000, 2_400_000, 100_000):
        with contextlib.suppress(PlanError):
            assert plan(steps_of(closed, inputs), hardware("4xA100"), Planning(budget=budget))
    found = plan(steps_of(closed, inputs), hardware("4xA100"), Planning(budget=1_800_000))
    assert found.memory.total <= 1_800_000


def test_stored_values_of_parameters_are_reused() -> None:
    """The forward scan stores a scale, shaped like rows, for the backward scan."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            def layer(h: Any, own: Any) -> Any:
                scale, up = own
                return h + jnp.tanh((h * scale) @ up), None

            return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()

        value, grads = jax.value_and_grad(loss_of)(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = np.full((3, WIDTH), 1.5, np.float32), rows_of(3, WIDTH, WIDTH) / 8
    batch = rows_of(8, 5, WIDTH)
    assert_same(jax.jit(rewriting(step, "", 4))(params, batch), jax.jit(step)(params, batch))
