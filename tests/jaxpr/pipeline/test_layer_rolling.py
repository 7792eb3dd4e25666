"""Equal layers one by one, as scans: the same results, in one stage and in several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from nbdist.errors import PlanError
from nbdist.jaxpr.pipeline.build import as_pipeline, for_stages, layers_of
from nbdist.jaxpr.pipeline.layer_rolling import with_layer_scans
from nbdist.jaxpr.planner_model import model_of
from nbdist.records import Staging
from nbdist.worker.planning.rewrite import rewriting
from tests.jaxpr.pipeline.test_build import assert_same_in_stages, stacked, training
from tests.jaxpr.test_microbatches import rows_of
from tests.jaxpr.test_remat import (
    LAYERS,
    WIDTH,
    block,
    checkpointed,
    dropped_out,
    params_and_batch,
    scanned,
    step_of,
    traced,
    unrolled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Remat

FULL = pytest.mark.full
STAGINGS = [Staging(), Staging("1f1b"), Staging("gpipe", 1, "last")]


def lengths(step: Callable[..., Any], params: Any, batch: Any) -> tuple[int, ...]:
    """Return the layers of the scans that stages divide."""
    closed, inputs = traced(step, params, batch)
    return layers_of(for_stages(closed, inputs), inputs)


def assert_same_on_mesh(
    step: Callable[..., Any], params: Any, batch: Any, remat: Remat, staging: Staging
) -> None:
    """Compare four stages on a mesh of eight devices with one device, with exact numbers."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=kinds)

    def spec(array: Any) -> jax.NamedSharding:
        largest = np.argmax(array.shape) if array.ndim else 0
        axes = [None] * largest + ["stage"] * (array.ndim > 0 and array.shape[largest] % 4 == 0)
        return jax.NamedSharding(mesh, jax.P(*axes))

    with jax.enable_x64(True), jax.set_mesh(mesh):
        params, batch = jax.tree.map(np.float64, (params, batch))
        laid = jax.tree.map(spec, params)
        rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
        run = rewriting(step, remat, 8, 4, staging=staging)
        made = jax.jit(run, out_shardings=(None, laid))(jax.device_put(params, laid), rows)
    with jax.enable_x64(True):
        wanted = jax.jit(step)(params, batch)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("forward", [unrolled, checkpointed, dropped_out])
def test_layers_after_the_first_are_scans(forward: Callable[..., Any]) -> None:
    """The first layer has no gradient of its input."""
    assert lengths(step_of(forward), *params_and_batch()) == (LAYERS - 1, LAYERS - 1)


def test_step_with_a_scan_is_unchanged() -> None:
    closed, inputs = traced(step_of(scanned), *params_and_batch())
    assert for_stages(closed, inputs) is closed


def test_side_effects_prevent_scans() -> None:
    def forward(params: Any, x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return unrolled(params, x)

    assert with_layer_scans(*traced(step_of(forward), *params_and_batch())) is None


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("forward", [unrolled, pytest.param(dropped_out, marks=FULL)])
def test_stages_give_the_results_of_one_device(
    forward: Callable[..., Any], staging: Staging
) -> None:
    assert_same_in_stages(step_of(forward), *params_and_batch(), 4, 8, "selective", staging)


@pytest.mark.parametrize("remat", [pytest.param("", marks=FULL), "full", "selective"])
@pytest.mark.parametrize(
    "staging", [STAGINGS[0], *(pytest.param(s, marks=FULL) for s in STAGINGS[1:])]
)
@pytest.mark.parametrize("forward", [unrolled, checkpointed, dropped_out])
def test_stages_on_a_mesh_give_the_results_of_one_device(
    forward: Callable[..., Any], staging: Staging, remat: Remat
) -> None:
    assert_same_on_mesh(step_of(forward), *params_and_batch(), remat, staging)


def test_layer_of_another_width_stays_outside() -> None:
    def forward(params: Any, x: Any) -> Any:
        first, middle, rest = params
        return unrolled(rest, jnp.tanh(unrolled(first, x) @ middle["in"]) @ middle["out"])

    own, batch = params_and_batch()
    middle = {"in": np.ones((WIDTH, 8), np.float32) / 8, "out": np.ones((8, WIDTH), np.float32) / 8}
    params = own[:4], middle, own[4:]
    assert lengths(step_of(forward), params, batch) == (8, 8)
    assert_same_in_stages(step_of(forward), params, batch, 4, 8)


def test_layers_of_different_widths_have_no_stages() -> None:
    def forward(params: Any, x: Any) -> Any:
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return x

    sizes = [(np.ones((WIDTH, n), np.float32), np.ones((n, WIDTH), np.float32)) for n in (3, 5, 7)]
    with pytest.raises(PlanError, match="no scan over layers"):
        lengths(step_of(forward), sizes, params_and_batch()[1])


def test_layers_with_another_constant_stay_outside() -> None:
    def forward(params: Any, x: Any) -> Any:
        for number, layer in enumerate(params):
            x = block(x, layer) * (1.5 if number < 5 else 0.5)
        return x

    params, batch = params_and_batch()
    assert lengths(step_of(forward), params, batch) == (7, 7)
    assert_same_in_stages(step_of(forward), params, batch, 4, 8)


def cycled(every: int) -> Callable[..., Any]:
    """Return a step with layers of which each uses the parameters of the one `every` before it."""

    def forward(params: Any, x: Any) -> Any:
        for number in range(8):
            x = block(x, params[number % every])
        return x

    return step_of(forward)


def test_layers_that_share_all_parameters_have_no_stages() -> None:
    params, batch = params_and_batch()
    with pytest.raises(PlanError, match="no scan over layers"):
        lengths(cycled(1), params[:1], batch)


def test_layers_that_take_turns_with_parameters() -> None:
    """A gradient is the sum over the layers that use an array."""
    params, batch = params_and_batch()
    assert_same_in_stages(cycled(2), params[:2], batch, 2, 8)


def test_layers_that_share_one_of_their_arrays() -> None:
    def forward(params: Any, x: Any) -> Any:
        own, shared = params
        for layer in own:
            x = block(x, layer) + jnp.sin(x @ shared)
        return x

    own, batch = params_and_batch()
    params = own, np.eye(WIDTH, dtype=np.float32)
    assert lengths(step_of(forward), params, batch)
    assert_same_on_mesh(step_of(forward), params, batch, "", Staging())


def test_results_of_layers_that_the_loss_reads() -> None:
    def forward(params: Any, x: Any) -> Any:
        found = []
        for layer in params:
            x = block(x, layer)
            found.append(x)
        return x + found[4] * 0.1, jnp.stack([one.mean() for one in found[3:]]), 0.0

    params, batch = params_and_batch()
    assert_same_in_stages(training(forward), params, batch, 4, 8)


def test_stack_of_the_user_counts_as_no_layer() -> None:
    """Only layers that nbdist stacks have stages; others change no plan."""
    closed, inputs = traced(step_of(scanned), *params_and_batch())
    model = model_of(closed, inputs)
    assert (model.layers, model.stacked) == (frozenset(), frozenset())


def test_several_rounds_are_refused() -> None:
    closed, inputs = traced(step_of(unrolled), *params_and_batch())
    made = for_stages(closed, inputs)
    with pytest.raises(PlanError, match="applied one by one run in one round"):
        as_pipeline(made, inputs, 2, 8, Staging("gpipe", 2), stacks_layers=True)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.linear = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(self.norm(x)))


def nnx_model() -> tuple[Any, Any]:
    rngs = nnx.Rngs(0)
    model = nnx.List([Block(rngs) for _ in range(5)])
    graph, params = nnx.split(model)

    def forward(params: Any, x: Any) -> Any:
        for layer in nnx.merge(graph, params):
            x = layer(x)
        return x, None, 0.0

    return forward, nnx.to_pure_dict(params)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(5):
            h = linen.LayerNorm()(x)
            x = x + linen.Dense(8)(jax.nn.gelu(linen.Dense(16)(h)))
        return linen.Dense(8)(x)


def linen_model() -> tuple[Any, Any]:
    model = Linen()
    params = model.init(jax.random.key(0), jnp.zeros((1, 8)))
    return (lambda params, x: (model.apply(params, x), None, 0.0)), params


@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_flax_models(make: Callable[[], tuple[Any, Any]]) -> None:
    forward, params = make()
    rows = rows_of(2, 8, 8)
    batch = rows[0], rows[1]
    assert lengths(training(forward), params, batch) == (4, 4)
    assert_same_in_stages(training(forward), params, batch, 2, 4)


def test_own_scan_over_time_beside_the_layers() -> None:
    def forward(params: Any, x: Any) -> Any:
        for own in params:
            x = block(x, own)
        sums, _ = jax.lax.scan(lambda s, now: (s + now, None), x[0], jnp.sin(x).mean(0)[None])
        return x, sums, 0.0

    params = [jax.tree.map(lambda a, n=n: a[n], stacked(5)) for n in range(5)]
    rows = rows_of(2, 8, 5)
    assert_same_in_stages(training(forward), params, (rows[0], rows[1]), 2, 4)
