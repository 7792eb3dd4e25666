"""The 1F1B schedule: results equal to the original step, or a reason for the refusal."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from nbdist.errors import PlanError
from nbdist.jaxpr.pipeline.build import as_pipeline, check_1f1b
from nbdist.records import Staging
from tests.jaxpr.pipeline.test_build import assert_same_in_stages, stacked, training
from tests.jaxpr.pipeline.test_stages import run_on_eight_devices
from tests.jaxpr.test_microbatches import rows_of
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
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Remat


def through(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, p: (block(x, p), None), x, params)[0]


assert_same_in_1f1b = partial(assert_same_in_stages, staging=Staging("1f1b"))


@pytest.mark.parametrize(
    ("stages", "micro", "per", "own"),
    [(4, 2, 1, 3), (2, 9, 2, 1), pytest.param(3, 4, 1, 2, marks=pytest.mark.full)],
)
def test_1f1b_gives_the_results_of_one_stage(stages: int, micro: int, per: int, own: int) -> None:
    """Include fewer microbatches than stages, more than are stored, and uneven row counts."""
    assert_same_for_sizes(stages, micro, per, own)


@pytest.mark.full
@settings(max_examples=5, deadline=None)
@given(
    stages=st.integers(2, 4),
    micro=st.integers(2, 9),
    per=st.integers(1, 2),
    own=st.sampled_from([1, 2, 3, 4]),
)
def test_1f1b_of_any_sizes_gives_the_same_results(
    stages: int, micro: int, per: int, own: int
) -> None:
    assert_same_for_sizes(stages, micro, per, own)


def assert_same_for_sizes(stages: int, micro: int, per: int, own: int) -> None:
    rows = rows_of(2, own * micro, 3, 5)
    step = training(lambda params, x: (through(params, x), None, 0.0))
    assert_same_in_1f1b(step, stacked(stages * per), (rows[0], rows[1]), stages, micro)


@pytest.mark.parametrize(
    "remat", [*(pytest.param(r, marks=pytest.mark.full) for r in ("", "selective")), "full"]
)
def test_remat_with_1f1b_gives_the_same_results(remat: Remat) -> None:
    assert_same_in_1f1b(step_of(scanned), *params_and_batch(), 3, 8, remat)


@pytest.mark.parametrize("remat", [pytest.param("", marks=pytest.mark.full), "full"])
def test_transformer_trains_as_in_one_stage(remat: Remat) -> None:
    name = "tied transformer"
    loss = second_loss(name, remat, 8, 2, Staging("1f1b"))
    assert loss == pytest.approx(plain_loss(name), rel=1e-5)


def _loss_beside_rows(params: Any, batch: Any) -> Any:
    own, shared, head = params
    x, weights = batch
    mask = (x[:, 0] > 0).astype(x.dtype)

    def layer(carry: Any, own: Any) -> Any:
        h, key, count, loss = carry
        key, noise, drop = jax.random.split(key, 3)
        made = block(h, own) * mask[:, None] + h @ shared / (count + 1)
        made += 0.1 * jax.random.normal(noise, made.shape[-1:])
        made *= jax.random.bernoulli(drop, 0.8, made.shape)
        return (made, key, count + 1, loss + (made**2).sum()), own["up"].sum()

    start = x, jax.random.key(3), 0, jnp.float32(0.5)
    (out, key, count, loss), sums = jax.lax.scan(layer, start, own)
    logits = out @ head + x
    each = -jax.nn.log_softmax(logits)[:, 0] * weights
    return each.sum() / weights.sum() + 0.01 * loss, (logits, sums, count, key, each)


def beside_rows(params: Any, batch: Any) -> Any:
    """Step with keys, accumulated sums, masks, shared weights and a loss over all rows."""
    found, grads = jax.value_and_grad(_loss_beside_rows, has_aux=True)(params, batch)
    loss, (logits, sums, count, key, each) = found
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return loss, logits.mean(0), each, sums, count, jax.random.key_data(key), new


def params_and_batch_beside_rows(layers: int) -> tuple[Any, Any]:
    params = stacked(layers), rows_of(5, 5), rows_of(3, 5, 5)[0]
    return params, (rows_of(16, 5), np.abs(rows_of(2, 16)[1]))


@pytest.mark.parametrize("remat", [pytest.param("", marks=pytest.mark.full), "full"])
def test_layers_carry_keys_sums_and_shared_weights(remat: Remat) -> None:
    assert_same_in_1f1b(beside_rows, *params_and_batch_beside_rows(6), 3, 8, remat)


LAST = [Staging("gpipe", 1, "last"), Staging("1f1b", 1, "last")]


@pytest.mark.parametrize("staging", LAST)
def test_loss_on_the_last_stage_gives_the_same_results(staging: Staging) -> None:
    step, params = beside_rows, params_and_batch_beside_rows(6)
    assert_same_in_stages(step, *params, 3, 8, staging=staging)


@pytest.mark.parametrize("staging", LAST)
def test_rows_and_their_gradients_may_be_results(staging: Staging) -> None:
    """Gradients of the batch leave the first stage, and results of each row the last stage."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any, x: Any) -> Any:
            start = jnp.tanh(x @ params["first"])
            out = through({name: params[name] for name in ("up", "down")}, start)
            return jnp.mean((out - batch[1]) ** 2), out[:, 0]

        (loss, each), grads = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(params, batch[0])
        scale = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads[0])))
        return loss, each, each + batch[1][:, 0], grads[1] / scale, grads[0]

    rows = rows_of(2, 8, 5)
    params = {**stacked(4), "first": rows_of(5, 5)}
    assert_same_in_stages(step, params, (rows[0], rows[1]), 2, 4, staging=staging)


def test_loss_may_be_computed_in_pieces() -> None:
    """The loss scans over pieces of the sequence and accumulates the gradients of their logits."""

    def forward(params: Any, x: Any) -> Any:
        own, head = params

        @jax.checkpoint
        def piece(loss: Any, x: Any) -> Any:
            return loss + jax.nn.logsumexp(x @ head, -1).sum(), None

        out = through(own, x)
        pieces = jnp.moveaxis(out.reshape(len(out), 2, 3, 5), 1, 0)
        loss, _ = jax.lax.scan(piece, 0.0, pieces)
        return out, None, loss / out.size

    rows = rows_of(2, 8, 6, 5)
    params = stacked(4), rows_of(5, 9)
    assert_same_in_1f1b(training(forward), params, (rows[0], rows[1]), 2, 4)


@pytest.mark.parametrize("micro", [4, 8])
def test_constants_of_row_count_are_computed_before(micro: int) -> None:
    """Weights of the first rows, and weights that vary from row to row."""

    def forward(params: Any, x: Any) -> Any:
        out = through(params, x)
        first = jnp.concatenate([jnp.ones(3), jnp.zeros(5)])
        each = (out**2).mean(-1)
        return out * jnp.linspace(0, 1, 8)[:, None], (each * first).sum() / 3, 0.0

    rows = rows_of(2, 8, 5)
    assert_same_in_1f1b(training(forward), stacked(4), (rows[0], rows[1]), 2, micro)


@pytest.mark.parametrize("remat", ["", pytest.param("selective", marks=pytest.mark.full), "full"])
def test_masks_and_shared_inputs_do_not_wait_for_layers(remat: Remat) -> None:
    def step(params: Any, batch: Any) -> Any:
        x, labels = batch

        def loss_of(params: Any) -> Any:
            own, head = params
            start = jnp.tanh(x @ head)
            mask = (x[..., 0] > -1)[..., None]

            def layer(h: Any, p: Any) -> Any:
                return block(jnp.where(mask, h, 0.0), p) + 0.1 * start, None

            out, _ = jax.lax.scan(layer, start, own)
            out, _, _ = jax.lax.optimization_barrier((out, 2.0, labels))
            known = labels > 0
            each = jnp.where(known, -jax.nn.log_softmax(out)[..., 1], 0.0)
            return each.sum() / jnp.maximum(known.sum(), 1)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    labels = np.random.default_rng(0).integers(0, 3, (16, 3))
    assert_same_in_1f1b(step, (stacked(6), rows_of(5, 5)), (rows_of(16, 3, 5), labels), 3, 8, remat)


def test_idle_stages_do_not_change_results() -> None:
    def forward(params: Any, x: Any) -> Any:
        def layer(carry: Any, p: Any) -> Any:
            h, count = carry
            # In order, each layer receives its own first element; out of order the root is NaN.
            root = jnp.sqrt(h[:, :1] - count)
            made = h[:, 1:] + jnp.tanh(h @ p["up"] @ p["down"])[:, 1:] * root
            return (jnp.concatenate([h[:, :1] + 1, made], 1), count + 1.0), None

        (out, _), _ = jax.lax.scan(layer, (x.at[:, 0].set(0.5), 0.0), params)
        return out, None, 0.0

    rows = rows_of(2, 8, 5)
    assert_same_in_1f1b(training(forward), stacked(4), (rows[0], rows[1]), 4, 4)


def test_stage_keeps_only_microbatches_in_flight() -> None:
    stages, micro = 4, 16
    closed, inputs = traced(step_of(scanned), *params_and_batch())
    made = as_pipeline(closed, inputs, stages, micro, Staging("1f1b"))
    scans = [eqn for eqn in made.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in scans] == [stages - 1, 1, stages - 1]
    assert micro in [eqn.params.get("length") for eqn in scans[1].params["jaxpr"].eqns]
    shapes = {var.aval.shape for eqn in scans for var in eqn.outvars}
    own = (stages, 1, LAYERS // stages, ROWS // micro, 4 * WIDTH)
    assert (2 * stages - 1, *own) in shapes
    assert not [shape for shape in shapes if shape[1:] == own and shape[0] > 2 * stages - 1]


def two_passes(params: Any, x: Any) -> Any:
    return through(params, through(params, x))


def with_hidden_layer(params: Any, x: Any) -> Any:
    out, each = jax.lax.scan(lambda x, p: (block(x, p), x), x, params)
    return out + each[1]


def centred(params: Any, x: Any) -> Any:
    out = through(params, x)
    return out - out.mean(0)


def scaled_by_sum(params: Any, x: Any) -> Any:
    def layer(carry: Any, p: Any) -> Any:
        h, total = carry
        h = block(h, p)
        return (h, total + (h**2).sum()), None

    (out, total), _ = jax.lax.scan(layer, (x, 0.0), params)
    return out / total


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (two_passes, "the step needs exactly one scan over layers and its backward pass"),
        (with_hidden_layer, "stacked results of layers are used outside of the backward pass"),
        (centred, "needs the sum over all rows for each row"),
        (scaled_by_sum, "the backward pass needs a sum over all rows of the layers' results"),
    ],
)
def test_dependent_microbatches_are_refused(forward: Callable[..., Any], message: str) -> None:
    step = training(lambda params, x: (forward(params, x), None, 0.0))
    rows = rows_of(2, 8, 5)
    closed, inputs = traced(step, stacked(4), (rows[0], rows[1]))
    as_pipeline(closed, inputs, 2, 4)
    for refused in (
        lambda: check_1f1b(closed, inputs),
        lambda: as_pipeline(closed, inputs, 2, 4, Staging("1f1b")),
    ):
        with pytest.raises(PlanError, match=f"schedule=1f1b is not possible: .*{message}.*; use"):
            refused()


def test_step_without_backward_pass_is_refused() -> None:
    closed, inputs = traced(lambda params, x: through(params, x).sum(), stacked(4), rows_of(8, 5))
    with pytest.raises(
        PlanError,
        match="schedule=1f1b is not possible: the step needs exactly one scan over layers and",
    ):
        check_1f1b(closed, inputs)


HEAD = """
params["head"], SPECS["head"] = normal(WIDTH, 512), P()
def step(params, batch):
    def loss_of(params):
        out, _ = jax.lax.scan(layer, batch[0], {name: params[name] for name in ("up", "down")})
        return jnp.mean((out @ params["head"]) ** 2) + jnp.mean((out - batch[1]) ** 2)
    loss, grads = jax.value_and_grad(loss_of)(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
wanted = jax.jit(step)(params, batch)
SCHEDULE = "1f1b"
"""


EMBEDDING = """
params["embed"], SPECS["embed"] = normal(512, WIDTH), P()
params["head"], SPECS["head"] = normal(WIDTH, 512), P()
batch = tuple(np.random.default_rng(1).integers(0, 512, (2, ROWS, 6)).astype("int32"))
def step(params, batch):
    def loss_of(params):
        own = {name: params[name] for name in ("up", "down")}
        out, _ = jax.lax.scan(layer, params["embed"][batch[0]], own)
        logp = jax.nn.log_softmax(out @ params["head"])
        return -jnp.take_along_axis(logp, batch[1][..., None], -1).mean()
    loss, grads = jax.value_and_grad(loss_of)(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
wanted = jax.jit(step)(params, batch)
LOSS_STAGES = "last"
"""


@pytest.mark.processes
def test_only_neighbours_send_and_stages_share_the_loss() -> None:
    """Each stage computes the loss for four of the eight rows on its data shard."""
    found, dots = run_on_eight_devices(
        HEAD
        + r"""
text = on((2, 2, 2)).as_text()
pattern = r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)\(.*op_name=(.*)"
found = [
    [kind, json.loads(shape), "/while/" in name]
    for shapes, kind, name in re.findall(pattern, text)
    for shape in re.findall(r"f32(\[[\d,]*\])", shapes)
]
dots = re.findall(r"= f32(\[[\d,]*512\])\S* dot\(", text)
print(json.dumps([found, [json.loads(shape) for shape in dots]]))
"""
    )
    within = [(kind, shape) for kind, shape, is_within in found if is_within]
    row = ROWS // 4 // 2, WIDTH
    assert {kind for kind, _ in within} == {"all-reduce", "all-gather", "collective-permute"}
    # Activations of one microbatch only: gradients are summed after all have returned.
    assert {tuple(shape) for _, shape in within} == {(1, 1, *row), (1, *row)}
    after = [(kind, shape) for kind, shape, is_within in found if not is_within]
    assert {kind for kind, _ in after} == {"all-reduce"}
    assert ("all-reduce", [1, 4, WIDTH, 2 * WIDTH]) in after
    assert ("all-reduce", [WIDTH, 512]) in after
    assert dots == [[ROWS // 4 // 2 // 2, 512]]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "axes"),
    [
        ("1f1b", (2, 2, 2)),
        pytest.param("gpipe", (4, 2, 1), marks=pytest.mark.full),
        pytest.param("gpipe", (2, 2, 2), marks=pytest.mark.full),
        pytest.param("1f1b", (4, 2, 1), marks=pytest.mark.full),
    ],
)
def test_no_rows_leave_the_stage_of_the_loss(schedule: str, axes: tuple[int, int, int]) -> None:
    """Stages receive activations from their neighbours only, and add sums once at the end."""
    found = run_on_eight_devices(
        EMBEDDING
        + f"SCHEDULE, AXES = {schedule!r}, {axes}\n"
        + r"""
text = on(AXES).as_text()
pattern = r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)\(.*op_name=(.*)"
found = [
    [kind, json.loads(shape), "/while/" in name]
    for shapes, kind, name in re.findall(pattern, text)
    for shape in re.findall(r"f32(\[[\d,]*\])", shapes)
]
print(json.dumps(found))
"""
    )
    part = [1, 1, ROWS // 4 // 2, 6, WIDTH]  # rows of a microbatch on one device of a stage
    within = [(kind, shape) for kind, shape, is_within in found if is_within]
    assert ("collective-permute", part) in within
    assert all(shape == part for _, shape in within)
    kinds = {"collective-permute"} | ({"all-reduce"} if axes[2] > 1 else set())
    assert {kind for kind, _ in within} == kinds
    after = [(kind, shape) for kind, shape, is_within in found if not is_within]
    assert {kind for kind, _ in after} == {"all-reduce"}
    assert not [shape for _, shape in after if len(shape) > 4]  # rows have five dimensions
    assert ("all-reduce", [WIDTH, 512]) in after


@pytest.mark.processes
@pytest.mark.full  # test_stages.py tests another schedule
def test_rows_not_divisible_by_devices_are_correct() -> None:
    run_on_eight_devices(
        HEAD
        + """
batch = tuple(rows[:12] for rows in batch)
wanted = jax.jit(step)(params, batch)
on((2, 2, 2))
on((4, 2, 1), "full")
print(0)
"""
    )


@pytest.mark.full
def test_loss_section_may_constrain_its_sharding() -> None:
    run_on_eight_devices(
        HEAD
        + """
def saying(spec):
    def step(params, batch):
        def loss_of(params):
            layers = {name: params[name] for name in ("up", "down")}
            out, _ = jax.lax.scan(layer, batch[0], layers)
            if spec is not None:
                out = jax.lax.with_sharding_constraint(out, spec)
            return jnp.mean((out @ params["head"]) ** 2)
        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return step
wanted = jax.jit(saying(None))(params, batch)
for spec in (P("data", "model"), P(("data", "stage"))):
    step = saying(spec)
    on((2, 2, 2))
print(0)
"""
    )
