"""Exported programs give the notebook's numbers in double precision, and with other libraries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import clusters
from tests.end_to_end.test_exported_programs import (
    ARRAYS,
    SINGLE_TRAININGS,
    STEP,
    TRAININGS,
    Training,
    export,
    in_float64,
    launch,
    run_cells,
    with_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

pytestmark = pytest.mark.full  # test_exported_programs.py and test_exported_changes.py

VARIABLES = """
import numpy as np
import tensorflow as tf
w = tf.Variable(tf.random.normal((4, 1), dtype=tf.float64))
b = tf.Variable(tf.zeros(1, tf.float64))
"""
VARIABLES_STEP = """
x, y = batch
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((tf.tanh(x @ w + b) - y) ** 2)
for variable, grad in zip((w, b), tape.gradient(loss, (w, b))):
    variable.assign_sub(tf.constant(0.1, tf.float64) * grad)
"""
NNX_MODEL = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        dtype = jnp.float32
        self.first = nnx.Linear(4, 8, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, param_dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 1, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.tanh(self.norm(self.first(x)))))

def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)
"""
NNX_STATE = """
model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
"""
NNX_STEP = """
loss, grads = nnx.value_and_grad(loss_of)(model, *batch)
optimizer.update(model, grads)
loss
"""
NNX_LOOP = """
@nnx.jit
def update(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss

losses = []
for epoch in range(2):
    order = np.random.default_rng().permutation(100)
    for i in range(0, 100, 20):
        rows = order[i : i + 20]
        losses.append(float(update(model, optimizer, train[0][rows], train[1][rows])))
"""
EQUINOX_MODEL = """
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

def loss_of(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)
"""
EQUINOX_STATE = """
model = eqx.nn.MLP(4, 1, width_size=8, depth=2, key=jax.random.key(3))
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, 20)))
opt_state = tx.init(eqx.filter(model, eqx.is_array))
"""
EQUINOX_STEP = """
loss, grads = eqx.filter_value_and_grad(loss_of)(model, *batch)
updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
model = eqx.apply_updates(model, updates)
loss
"""
EQUINOX_LOOP = """
@eqx.filter_jit
def update(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss

losses = []
for epoch in range(2):
    for i in range(0, 100, 20):
        x, y = train[0][i : i + 20], train[1][i : i + 20]
        model, opt_state, loss = update(model, opt_state, x, y)
        losses.append(float(loss))
"""
NNX_WEIGHTS = "jax.tree.leaves(nnx.state(model, nnx.Param))"
EQUINOX_WEIGHTS = "jax.tree.leaves(eqx.filter(model, eqx.is_array))"

OTHER_TRAININGS = {
    "mirrored variables": Training(
        "mirrored",
        [(VARIABLES, {}), (ARRAYS, {}), (VARIABLES_STEP, STEP)],
        'job_history["loss"]',
        "[w.numpy(), b.numpy()]",
    ),
    "nnx step": Training(
        "pjrt",
        [(NNX_MODEL, {}), (ARRAYS, {}), (NNX_STATE, {}), (NNX_STEP, STEP)],
        'job_history["loss"]',
        NNX_WEIGHTS,
    ),
    "nnx loop": Training(
        "pjrt",
        [(NNX_MODEL, {}), (ARRAYS, {}), (NNX_STATE, {}), (NNX_LOOP, {})],
        "losses",
        NNX_WEIGHTS,
    ),
    "equinox step": Training(
        "pjrt",
        [(EQUINOX_MODEL, {}), (ARRAYS, {}), (EQUINOX_STATE, {}), (EQUINOX_STEP, STEP)],
        'job_history["loss"]',
        EQUINOX_WEIGHTS,
    ),
    "equinox loop": Training(
        "pjrt",
        [(EQUINOX_MODEL, {}), (ARRAYS, {}), (EQUINOX_STATE, {}), (EQUINOX_LOOP, {})],
        "losses",
        EQUINOX_WEIGHTS,
    ),
}


JAX, TENSORFLOW = ("jax", 2, 1), ("tensorflow", 2, 1)
"""Framework, workers, and devices of each worker."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    framework, hosts, devices = request.param
    own = {"devices_per_host": devices} if devices > 1 else {}
    with clusters.cluster(hosts=hosts, framework=framework, **own) as running:
        yield running


def numbers_of(
    cluster: nbdist.Cluster, training: Training
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Run the cells on fresh workers, and return the losses and weights of each rank."""
    run = run_cells(cluster, training)
    is_step = "job_history" in training.loss
    losses = "" if is_step else f"losses_of_run = numpy.array({training.loss})\n"
    cluster.run(
        f"import numpy\n{losses}"
        f"weights = numpy.concatenate([numpy.ravel(w) for w in {training.weights}])",
        strategy=training.strategy,
    )
    found = cluster.pull(["weights"] if is_step else ["weights", "losses_of_run"])
    of_step = dict(enumerate(run.history.get("loss", ())))  # one list for all ranks under pjrt
    return {
        rank: (
            np.array(of_step[min(rank, len(of_step) - 1)]) if is_step else own["losses_of_run"],
            own["weights"],
        )
        for rank, own in found.items()
    }


@pytest.mark.parametrize(
    ("cluster", "name", "dtype"),
    [
        (JAX, "nnx loop", "float32"),
        (JAX, "equinox step", "float64"),
        (JAX, "nnx loop", "float64"),
        (JAX, "nnx step", "float32"),
        (JAX, "nnx step", "float64"),
        (JAX, "equinox step", "float32"),
        (JAX, "equinox loop", "float32"),
        (JAX, "equinox loop", "float64"),
        (JAX, "pjrt step", "float64"),
        (JAX, "pjrt fit", "float64"),
        (JAX, "pjrt loop", "float64"),
        (TENSORFLOW, "mirrored fit", "float64"),
        (TENSORFLOW, "mirrored step", "float64"),
        (TENSORFLOW, "mirrored loop", "float64"),
        (TENSORFLOW, "mirrored variables", "float64"),
        (("jax", 4, 1), "pjrt step", "float32"),
        (("jax", 4, 1), "pjrt fit", "float32"),
        (("jax", 4, 1), "nnx loop", "float32"),
        (("jax", 2, 2), "pjrt step", "float32"),
        (("jax", 2, 2), "pjrt fit", "float32"),
        (("jax", 2, 2), "pjrt loop", "float32"),
        (("tensorflow", 4, 1), "mirrored fit", "float32"),
        (("tensorflow", 4, 1), "mirrored step", "float32"),
        (("tensorflow", 4, 1), "mirrored loop", "float32"),
    ],
    indirect=["cluster"],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_program_gives_the_numbers_of_the_notebook(
    cluster: nbdist.Cluster, tmp_path: Path, name: str, dtype: str
) -> None:
    training = {**TRAININGS, **SINGLE_TRAININGS, **OTHER_TRAININGS}[name]
    if dtype == "float64":
        training = in_float64(training)
        cells = [(cell.replace("jnp.float32", "jnp.float64"), own) for cell, own in training.cells]
        training = replace(training, cells=cells)
    expected = numbers_of(cluster, training)
    text = export(cluster, tmp_path / "train", cell=len(training.cells))
    with_results(tmp_path / "train", training)
    ended = launch(tmp_path / "train", hosts=len(expected))
    assert ended.returncode == 0, f"{ended.stderr}\n{text}"
    for rank, (losses, weights) in expected.items():
        found = np.load(tmp_path / "train" / f"result{rank}.npz")
        assert found["weights"].dtype == weights.dtype == dtype
        np.testing.assert_array_equal(found["loss"], losses)
        np.testing.assert_array_equal(found["weights"], weights)
