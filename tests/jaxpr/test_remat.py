"""Rematerialised activations: the same results with less memory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from packaging.version import Version

from nbdist.errors import PlanError
from nbdist.jaxpr.planner_model import model_of
from nbdist.jaxpr.remat import rematerialised
from nbdist.planner.graph.remat_segments import segments
from nbdist.planner.search.search import plan
from nbdist.planner.search.step_variants import REMATS, Steps
from nbdist.records import GPIPE, Planning, Staging
from nbdist.worker.planning.rewrite import rewriting, rewritten
from tests.plan_models import engines, hardware
from tests.plan_programs import BATCH, PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.extend.core import ClosedJaxpr

    from nbdist.planner.graph.model import Model, Role
    from nbdist.records import PlannedMemory, Remat

ROWS, WIDTH, LAYERS = 64, 32, 12


def layers() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return np.float32(rng.normal(size=shape) * shape[0] ** -0.5)

    return [
        {"up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH)} for _ in range(LAYERS)
    ]


def block(x: Any, layer: Any) -> Any:
    return x + jnp.tanh(jax.nn.gelu(x @ layer["up"])) @ layer["down"]


def unrolled(params: Any, x: Any) -> Any:
    for layer in params:
        x = block(x, layer)
    return x


def checkpointed(params: Any, x: Any) -> Any:
    for layer in params:
        x = jax.checkpoint(block)(x, layer)
    return x


def scanned(params: Any, x: Any) -> Any:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    return jax.lax.scan(lambda x, layer: (block(x, layer), None), x, stacked)[0]


def checkpointed_scan(params: Any, x: Any) -> Any:
    return jax.checkpoint(scanned)(params, x)


def dropped_out(params: Any, x: Any) -> Any:
    key = jax.random.key(7)
    for number, layer in enumerate(params):
        x = block(x, layer)
        x = x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
    return x


def step_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean((forward(params, batch[0]) - batch[1]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def params_and_batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return layers(), (rows[0], rows[1])


def traced(step: Callable[..., Any], params: Any, batch: Any) -> tuple[ClosedJaxpr, Any]:
    inputs: list[tuple[str, Role]] = [("", "carried") for _ in jax.tree.leaves(params)]
    inputs += [("", "batch") for _ in jax.tree.leaves(batch)]
    return jax.make_jaxpr(step)(params, batch), inputs


def steps_of(closed: ClosedJaxpr, inputs: Any) -> Steps:
    def remodel(how: Remat, micro: int) -> Model:
        return model_of(rewritten(closed, inputs, how, micro), inputs)

    return Steps(model_of(closed, inputs), remodel)


def memory(closed: ClosedJaxpr, inputs: Any, how: Remat) -> PlannedMemory:
    return plan(steps_of(closed, inputs), hardware("1xA100"), Planning(remat=how)).memory


@pytest.mark.parametrize("how", ["full", pytest.param("selective", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "forward",
    [pytest.param(unrolled, marks=pytest.mark.full), scanned, checkpointed_scan, dropped_out],
)
def test_remat_gives_the_same_results(forward: Callable[..., Any], how: Remat) -> None:
    params, batch = params_and_batch()
    step = step_of(forward)
    kept = jax.jit(step)(params, batch)
    recomputed = jax.jit(rewriting(step, how, 1))(params, batch)
    assert jax.tree.structure(kept) == jax.tree.structure(recomputed)
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def models(*quick: str) -> pytest.MarkDecorator:
    """Parametrize over the eight models; mark the others as `full`."""
    marks = {name: () if name in quick else pytest.mark.full for name in PROGRAMS}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


@models("transformer", "CNN", "LSTM")
@pytest.mark.parametrize("how", ["full", pytest.param("selective", marks=pytest.mark.full)])
def test_every_model_trains_as_without_remat(name: str, how: Remat) -> None:
    assert plain_loss(name) != pytest.approx(0)
    assert second_loss(name, how) == pytest.approx(plain_loss(name), rel=1e-5)


@cache
def set_up(name: str) -> dict[str, Any]:
    """Return the variables of a program's set-up cell. Its step does not change them."""
    space: dict[str, Any] = {}
    exec(PROGRAMS[name].setup, space)
    return space


@cache
def plain_loss(name: str) -> float:
    """Return the loss of the second step of a program as it is."""
    return second_loss(name, "")


def second_loss(
    name: str,
    how: Remat,
    micro: int = 1,
    stages: int = 1,
    staging: Staging = GPIPE,
) -> float:
    """Return the loss of the second step; it depends on the state that the first one left."""
    program, space = PROGRAMS[name], set_up(name)
    names = program.given.split(", ")
    graph, state = nnx.split(tuple(space[name] for name in names), graph=True)
    code = compile(program.step, "step", "exec")

    def step(state: Any, batch: Any) -> Any:
        values = nnx.merge(graph, state)
        own = space | dict(zip(names, values, strict=True), batch=batch)
        exec(code, own)
        return own["loss"], nnx.state(tuple(own[name] for name in names), graph=True)

    step = jax.jit(rewriting(step, how, micro, stages, staging=staging))
    loss = 0.0
    for start in (0, BATCH):
        batch = jax.tree.map(lambda rows: rows[start : start + BATCH], space["train"])  # noqa: B023
        loss, state = step(state, batch)
    return float(loss)


@pytest.mark.parametrize("forward", [unrolled, scanned])
def test_remat_takes_less_memory(forward: Callable[..., Any]) -> None:
    closed, inputs = traced(step_of(forward), *params_and_batch())
    memories = {how: memory(closed, inputs, how) for how in REMATS}
    assert (
        memories["full"].activations < memories["selective"].activations < memories[""].activations
    )
    assert memories["full"].activations < memories[""].activations / 4
    assert len({memory.arguments for memory in memories.values()}) == 1


def test_recomputed_products_are_counted() -> None:
    closed, inputs = traced(step_of(unrolled), *params_and_batch())
    flops = {
        how: products(rematerialised(closed, inputs, how)) if how else products(closed)
        for how in REMATS
    }
    assert flops[""] == 6 * LAYERS - 1  # the input of the first layer needs no gradient
    assert flops["selective"] == flops[""]
    assert 6 * LAYERS < flops["full"] <= 8 * LAYERS


def products(closed: ClosedJaxpr) -> int:
    return sum(eqn.primitive.name == "dot_general" for eqn in closed.jaxpr.eqns)


def test_cpu_compiler_of_earlier_versions_removes_recomputation() -> None:
    """It removes barriers first. On CPUs remat then saves nothing, and is not planned."""
    params, batch = params_and_batch()
    steps = [step_of(unrolled), step_of(checkpointed), rewriting(step_of(unrolled), "full", 1)]
    programs = [jax.jit(step).lower(params, batch).compile() for step in steps]
    whole, *others = (program.as_text().count(" dot(") for program in programs)
    stored, *left = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert whole
    if Version(jax.__version__) < Version("0.11"):
        assert [*others, *left] == [whole, whole, stored, stored]
    else:
        assert min(others) > whole
        assert max(left) < stored


def test_remat_is_planned_if_it_saves_memory() -> None:
    closed, inputs = traced(step_of(unrolled), *params_and_batch())
    step = steps_of(closed, inputs)
    memories = {how: memory(closed, inputs, how) for how in REMATS}
    for how in REMATS:
        available = int(1.05 * (memories[how].total - memories[how].margin))
        budget = Planning(budget=available, fixed={"micro": 1})
        found = plan(step, hardware("1xA100"), budget)
        assert found.remat == how
        assert found.title == "one device" + f", {how} remat" * bool(how)
        if how:
            with pytest.raises(PlanError, match="the step does not fit"):
                plan(step, engines(1, 1), budget)


def test_recomputation_does_not_count_for_mfu() -> None:
    """MFU does not count recomputed operations."""
    closed, inputs = traced(step_of(unrolled), *params_and_batch())
    kept, recomputed = (
        plan(steps_of(closed, inputs), hardware("1xA100"), Planning(remat=how)).time
        for how in ("", "full")
    )
    assert recomputed.step > kept.step
    assert recomputed.mfu * recomputed.step == pytest.approx(kept.mfu * kept.step)


@pytest.mark.parametrize("how", REMATS[1:])
def test_barriers_do_not_hold_broadcast_values(how: Remat) -> None:
    """XLA would materialise it: for a large vocabulary, another array of the logits' size."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            table = jnp.concatenate([params[0]["up"]] * 8, axis=1)
            log = jax.nn.log_softmax(scanned(params, batch[0]) @ table)
            return -jnp.take_along_axis(log, batch[1], axis=-1).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params, (x, _) = params_and_batch()
    batch = x, np.arange(ROWS, dtype=np.int32)[:, None] % WIDTH
    closed, inputs = traced(step, params, batch)
    recomputed = rewritten(closed, inputs, how, 1)
    makers = {var: eqn for eqn in recomputed.eqns for var in eqn.outvars}
    barriers = [eqn for eqn in recomputed.eqns if eqn.primitive.name == "optimization_barrier"]
    assert barriers
    passed = [makers[var].primitive.name for eqn in barriers for var in eqn.invars if var in makers]
    assert "broadcast_in_dim" not in passed
    kept, made = (jax.jit(s)(params, batch) for s in (step, rewriting(step, how, 1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), made, kept)


@jax.custom_vjp
def masked(y: Any, mask: Any) -> Any:
    return jnp.sin(y) * mask


masked.defvjp(
    lambda y, mask: (masked(y, mask), (jnp.tanh(y * mask), mask)),
    lambda kept, slope: (slope * (kept[0] * jnp.broadcast_to(kept[1], slope.shape)), None),
)


@pytest.mark.parametrize("how", REMATS[1:])
def test_barrier_outputs_are_all_used(how: Remat) -> None:
    """Includes values that the backward pass recomputes and inputs of the forward pass."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            x, mask = batch
            for layer in params[:6]:
                x = masked(x + jnp.tanh(x @ layer["up"]) @ layer["down"], mask)
            return jnp.mean(x**2)

        return jax.grad(loss_of)(params)

    params, (x, _) = params_and_batch()
    batch = x, np.ones((ROWS, 1), np.float32)
    recomputed = rewritten(*traced(step, params, batch), how, 1)
    used = {id(var) for eqn in recomputed.eqns for var in eqn.invars}
    barriers = [eqn for eqn in recomputed.eqns if eqn.primitive.name == "optimization_barrier"]
    assert barriers
    assert all(id(var) in used for eqn in barriers for var in eqn.outvars)
    kept, made = (jax.jit(s)(params, batch) for s in (step, rewriting(step, how, 1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), made, kept)


def test_debug_print_runs_once(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(params: Any, x: Any) -> Any:
        jax.debug.print("forward {}", x.shape[0])
        return unrolled(params, x)

    params, batch = params_and_batch()
    jax.block_until_ready(jax.jit(rewriting(step_of(forward), "full", 1))(params[:4], batch))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("forward") == 1


def test_checkpoints_of_the_user_are_kept() -> None:
    params, batch = params_and_batch()
    step = step_of(checkpointed)
    kept, recomputed = (jax.jit(s)(params, batch)[0] for s in (step, rewriting(step, "full", 1)))
    assert float(recomputed) == pytest.approx(float(kept), rel=1e-6)
    closed, inputs = traced(step, params, batch)
    assert memory(closed, inputs, "full").activations <= memory(closed, inputs, "").activations


def test_loop_over_microbatches_is_rematerialised() -> None:
    def step(params: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda rows: rows.reshape(-1, 4, WIDTH).swapaxes(0, 1), batch)

        def one(total: Any, part: Any) -> Any:
            loss, after = step_of(unrolled)(params, part)
            return jax.tree.map(jnp.add, total, after), loss

        zero = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(one, zero, parts)

    params, batch = params_and_batch()
    closed, inputs = traced(step, params, batch)
    assert memory(closed, inputs, "full").activations < memory(closed, inputs, "").activations / 2
    kept, recomputed = (jax.jit(s)(params, batch)[1] for s in (step, rewriting(step, "full", 1)))
    np.testing.assert_allclose(kept, recomputed, rtol=1e-6)


def test_segments_minimise_memory() -> None:
    """Equal layers give about the root of their number: 2 kept per border, 32 per layer."""
    waiting, crossing = [16, 16] * 64, [64, 2] * 64
    ends = segments(waiting, crossing)
    assert all(place % 2 for place in ends)
    lengths = {b - a for a, b in zip((-1, *ends), (*ends, 127), strict=True)}
    longest = max(lengths) * 16
    assert longest + 2 * len(ends) < sum(waiting) / 6
    assert segments([1, 1], [5, 5]) == ()
    assert segments([], []) == ()


def test_remat_of_fixed_model_is_refused() -> None:
    closed, inputs = traced(step_of(unrolled), *params_and_batch())
    with pytest.raises(PlanError, match="this step cannot be rewritten for remat or microbatches"):
        plan(model_of(closed, inputs), hardware("1xA100"), Planning(remat="full"))


def test_rematerialised_jaxprs_are_well_formed() -> None:
    for forward in (unrolled, scanned, dropped_out):
        closed, inputs = traced(step_of(forward), *params_and_batch())
        for how in REMATS[1:]:
            made = rematerialised(closed, inputs, how)
            jax.extend.core.check_jaxpr(made.jaxpr)
            assert [v.aval for v in made.jaxpr.invars] == [v.aval for v in closed.jaxpr.invars]
            jaxpr_as_fun(made)
