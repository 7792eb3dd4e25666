"""Signals of training under JAX on two workers, compared with a program in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import Histogram
from tests import clusters, references
from tests.end_to_end.test_signals import RECORDED, SIGNALS, remarks, squares, steps_of
from tests.runs import latest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

SETUP = """
import jax, jax.numpy as jnp, numpy as np, optax
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x @ np.arange(4.0)[:, None]).astype("float32")
params = {
    "w": jnp.asarray(rng.normal(size=(4, 8)), "float32"),
    "v": jnp.asarray(rng.normal(size=(8, 1)), "float32"),
}
tx = optax.inject_hyperparams(optax.adam)(optax.exponential_decay(0.05, 1, 0.9))
state = tx.init(params)
batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]

def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

@jax.jit
def train_step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_fn)(params, x, y)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss
"""
REFERENCE = """
def norm(tree):
    leaves = jax.tree.leaves(tree)
    return float(np.sqrt(sum((np.asarray(a, "float64") ** 2).sum() for a in leaves)))

outcome = []
for xb, yb in batches:
    gradients, before = jax.grad(loss_fn)(params, xb, yb), params
    params, state, _ = train_step(params, state, xb, yb)
    update = jax.tree.map(lambda a, b: a - b, params, before)
    rate = float(state.hyperparams["learning_rate"])
    outcome.append([norm(gradients), norm(before), norm(update) / norm(before), rate])
    outcome[-1].append([norm(gradients["w"]), norm(before["w"])])
"""
CELLS = {
    "jitted step": "xb, yb = batch\nparams, state, loss = train_step(params, state, xb, yb)",
    "plain step": """
xb, yb = batch
loss, gradients = jax.value_and_grad(loss_fn)(params, xb, yb)
updates, state = tx.update(gradients, state, params)
params = optax.apply_updates(params, updates)
""",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the signals of each step of one process, and norms of `w` and its gradient."""
    programs = {"signals": SETUP + REFERENCE}
    outcome: list[Any] = references.plainly(programs, "jax", "optax")["signals"]
    return outcome


@pytest.mark.parametrize(
    "kind", [pytest.param("jitted step", marks=pytest.mark.full), "plain step"]
)
def test_signals_are_those_of_one_process(
    cluster: nbdist.Cluster, expected: list[Any], kind: str
) -> None:
    cluster.run(SETUP + "train = (x, y)\ntrain_step(params, state, *batches[0])")
    is_step = kind.endswith("step")
    options = {"data": "train", "batch": 8} if is_step else {}
    cluster.run(CELLS[kind], watch=2, **options)
    run = latest(cluster)
    for i, name in enumerate(SIGNALS):
        values = [expected[step - 1][i] for step in RECORDED]
        np.testing.assert_allclose(steps_of(run, name), values, rtol=1e-4, err_msg=name)
    found = [item for item in run.media() if item.name.endswith("params['w']")]
    assert [(item.rank, item.step) for item in found] == [(0, 2), (0, 2), (0, 4), (0, 4)]
    for item in found:
        assert isinstance(item.content, Histogram)
        gradient, parameter = expected[item.step - 1][-1]
        norm = gradient if item.name.startswith("gradients/") else parameter
        assert squares(item.content) == pytest.approx(norm**2, rel=1e-3)


KERAS = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np
keras.utils.set_random_seed(2)
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x @ np.arange(4.0)[:, None]).astype("float32")
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(8, "tanh", name="hidden"), keras.layers.Dense(1)]
)
rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.9)
optimizer = keras.optimizers.Adam(rate)
model.compile(optimizer=optimizer, loss="mse")
"""
KERAS_REFERENCE = """
import jax

def norm(arrays):
    return float(np.sqrt(sum((np.asarray(a, "float64") ** 2).sum() for a in arrays)))

def loss_of(values, x, y):
    predicted, _ = model.stateless_call(values, model.non_trainable_variables, x)
    return ((predicted - y) ** 2).mean()

outcome = []
for i in range(0, 40, 8):
    xb, yb = x[i : i + 8], y[i : i + 8]
    before = [np.array(v) for v in model.trainable_variables]
    rate = float(optimizer.learning_rate)
    gradients = jax.grad(loss_of)(before, xb, yb)
    optimizer.apply(gradients, model.trainable_variables)
    update = [np.array(v) - b for v, b in zip(model.trainable_variables, before)]
    outcome.append([norm(gradients), norm(before), norm(update) / norm(before), rate])
    outcome[-1].append([norm([gradients[0]]), norm([before[0]])])
"""
FIT = "model.fit(x, y, batch_size=8, shuffle=False, verbose=0);"


@pytest.mark.full  # test_signals.py has fits
def test_signals_of_a_fit_with_keras_on_jax(cluster: nbdist.Cluster) -> None:
    programs = {"signals": KERAS + KERAS_REFERENCE}
    expected = references.plainly(programs, "jax", "keras", KERAS_BACKEND="jax")["signals"]
    cluster.run(KERAS + "weights = model.get_weights()")
    cluster.run(FIT)
    cluster.run(
        "model.set_weights(weights)\n"
        "for variable in optimizer.variables:\n"
        "    variable.assign(np.zeros(variable.shape, variable.dtype))"
    )
    cluster.run(FIT, watch=2)
    run = latest(cluster)
    for i, name in enumerate(SIGNALS):
        values = [expected[step - 1][i] for step in RECORDED]
        np.testing.assert_allclose(steps_of(run, name), values, rtol=1e-4, err_msg=name)
    found = [item for item in run.media() if item.name.endswith("hidden.kernel")]
    assert [(item.rank, item.step) for item in found] == [(0, 2), (0, 2), (0, 4), (0, 4)]
    for item in found:
        assert isinstance(item.content, Histogram)
        gradient, parameter = expected[item.step - 1][-1]
        norm = gradient if item.name.startswith("gradients/") else parameter
        assert squares(item.content) == pytest.approx(norm**2, rel=1e-3)


LOOPS = {
    "jitted": """
for xb, yb in batches:
    params, state, loss = train_step(params, state, xb, yb)
""",
    "eager": """
for xb, yb in batches:
    loss, gradients = jax.value_and_grad(loss_fn)(params, xb, yb)
    updates, state = tx.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
""",
    "donated": """
step = jax.jit(train_step, donate_argnums=(0, 1))
for xb, yb in batches:
    params, state, loss = step(params, state, xb, yb)
""",
}


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.full) for kind in ("jitted", "eager")), "donated"],
)
def test_signals_of_a_loop_are_those_of_one_process(
    cluster: nbdist.Cluster, expected: list[Any], kind: str
) -> None:
    cluster.run(SETUP)
    cluster.run(LOOPS[kind], watch=2)
    run = latest(cluster)
    for i, name in enumerate(SIGNALS):
        values = [expected[step - 1][i] for step in RECORDED]
        np.testing.assert_allclose(steps_of(run, name), values, rtol=1e-4, err_msg=name)
    found = [item for item in run.media() if item.name.endswith("params['w']")]
    assert [(item.rank, item.step) for item in found] == [(0, 2), (0, 2), (0, 4), (0, 4)]
    for item in found:
        assert isinstance(item.content, Histogram)
        gradient, parameter = expected[item.step - 1][-1]
        norm = gradient if item.name.startswith("gradients/") else parameter
        assert squares(item.content) == pytest.approx(norm**2, rel=1e-3)


def test_gradients_in_a_scan_are_left_out_with_a_line(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + "train = (x, y)")
    cluster.run(
        "xb, yb = batch\n"
        "def add(total, row):\n"
        "    return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, *row)), 0\n"
        "rows = xb.reshape(2, -1, 4), yb.reshape(2, -1, 1)\n"
        "gradients, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), rows)\n"
        "params = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)\n"
        "loss = loss_fn(params, xb, yb)\nloss",
        watch=True,
        data="train",
        batch=8,
    )
    gradients, rate = remarks(cluster)
    assert gradients == (
        "--watch: no gradient norm, parameter norm and update ratio: the step takes gradients in "
        "jax.lax.scan or lax.cond, in microbatches, or under jax.vmap"
    )
    assert rate == "--watch: no learning rate: use optax.inject_hyperparams"
    assert not steps_of(latest(cluster), "grad_norm").size


def test_a_fit_that_keras_does_not_compile_has_no_signals(cluster: nbdist.Cluster) -> None:
    cluster.run(KERAS.replace('loss="mse"', 'loss="mse", jit_compile=False'))
    cluster.run(FIT, watch=True)
    (line,) = remarks(cluster)
    assert line.startswith("--watch: no signals of training: nbdist does not compile")
