"""The same small training in four forms, with all kinds of state that a checkpoint contains.

It has dropout, moments, a running metric, shuffled data, and a last batch that cannot be divided
evenly. Each form is a set-up cell, a training cell, and an expression for the result: a digest of
every bit of the weights and of the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.records import StepOptions

if TYPE_CHECKING:
    import nbdist
    from nbdist.execution.result import Run

SAMPLES, BATCH, EPOCHS = 94, 12, 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)
"""Total number of steps. The last batch of an epoch has 10 samples."""

FIT_SAMPLES = 96
"""Number of samples for `fit`. Keras weights a smaller last batch incorrectly."""

_DATA = f"""
import hashlib, os, signal, time
import numpy as np
def digest(arrays):
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:16]
draw = np.random.default_rng(3)
x = draw.normal(size=({SAMPLES}, 8)).astype("float32")
y = (x[:, :1] * 2 + draw.normal(size=({SAMPLES}, 1)) / 10).astype("float32")
train = (x, y)
def at(step):
    pass
class Batches:
    def __init__(self):
        self.order = np.random.default_rng(11)
        self.step = 0
    def __len__(self):
        return -(-len(x) // {BATCH})
    def __iter__(self):
        rows = self.order.permutation(len(x))
        for start in range(0, len(x), {BATCH}):
            self.step += 1
            at(self.step)
            part = rows[start:start + {BATCH}]
            yield x[part], y[part]
batches = Batches()
"""
_KERAS = """
import keras
from nbdist.worker.runtime import context as state
keras.utils.set_random_seed(7)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.25),
        keras.layers.Dense(1),
    ])
"""
_NORMED = _KERAS.replace(
    "keras.layers.Dropout", "keras.layers.BatchNormalization(), keras.layers.Dropout"
)
"""Model with moving means. In a `fit`, each rank has its own."""

_OF_KERAS = "digest([v.numpy() for v in (*model.variables, *optimizer.variables)])"
_FIT = f"""
class At(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        at(state.current().progress.step + 1)
model.fit(x, y, batch_size={BATCH}, epochs={EPOCHS}, verbose=0, callbacks=[At()])
"""


@dataclass(frozen=True)
class Form:
    """One way to write the training.

    Attributes:
        strategy: strategy of the cells.
        setup: cell that creates all objects.
        cell: cell that trains. It calls `at(step)` before each step if it can.
        digest: expression for the digest.
        is_step: True if the cell is the body of a step.
    """

    strategy: str
    setup: str
    cell: str
    digest: str
    is_step: bool

    @property
    def framework(self) -> str:
        """Framework of the cluster, because Keras has one backend."""
        return {"mirrored": "tensorflow", "pjrt": "jax"}[self.strategy]

    def run(
        self, cluster: nbdist.Cluster, epochs: int = EPOCHS, data: str = "train", **options: Any
    ) -> Run:
        """Train on arrays, or on `batches`. Each rank calls `at` before each step of `batches`."""
        if data == "train":
            step = StepOptions(data="train", batch=BATCH, epochs=epochs, shuffle=5)
        else:
            step = StepOptions(data=data, epochs=epochs)
        return cluster.run(
            self.cell.replace(f"epochs={EPOCHS}", f"epochs={epochs}"),
            strategy=self.strategy,
            step=step if self.is_step else None,
            **options,
        )

    def digest_of(self, cluster: nbdist.Cluster) -> str:
        """Return the digests of all ranks."""
        return str(sorted(cluster.run(self.digest, strategy=self.strategy).results.items()))


def forms(*short: str) -> pytest.MarkDecorator:
    """Parametrize a test with all forms. Forms other than `short` run only with `--full`."""
    params = [pytest.param(name, marks=() if name in short else pytest.mark.full) for name in FORMS]
    return pytest.mark.parametrize("form", params, indirect=True)


FORMS = {
    "mirrored step": Form(
        "mirrored",
        f"""{_DATA}{_KERAS}
import tensorflow as tf
with strategy.scope():
    optimizer = keras.optimizers.Adam(0.01)
    seen = keras.metrics.Mean()
""",
        """
inputs, targets = batch
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
grads = tape.gradient(loss, model.trainable_variables)
optimizer.apply(grads, model.trainable_variables)
seen.update_state(loss)
{"loss": loss, "seen": seen.result()}
""",
        f"{_OF_KERAS}",
        is_step=True,
    ),
    "pjrt step": Form(
        "pjrt",
        f"""{_DATA}
import jax, jax.numpy as jnp, optax
optimizer = optax.adam(0.01)
key = jax.random.key(7)
params = {{"w": jnp.asarray(draw.normal(size=(8, 16))), "v": jnp.zeros((16, 1))}}
opt_state = optimizer.init(params)
count = 0
def error(params, key, x, y):
    hidden = jax.nn.relu(x @ params["w"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.75, hidden.shape), hidden / 0.75, 0)
    return jnp.mean((hidden @ params["v"] - y) ** 2)
""",
        """
inputs, targets = batch
key, here = jax.random.split(key)
loss, grads = jax.value_and_grad(error)(params, here, inputs, targets)
updates, opt_state = optimizer.update(grads, opt_state)
params = optax.apply_updates(params, updates)
count = count + 1
{"loss": loss, "count": count}
""",
        "digest([*jax.tree.leaves((params, opt_state)), jax.random.key_data(key), count])",
        is_step=True,
    ),
    "mirrored fit": Form(
        "mirrored",
        f"""{_DATA.replace(str(SAMPLES), str(FIT_SAMPLES))}{_NORMED}
optimizer = keras.optimizers.Adam(0.01)
with strategy.scope():
    model.compile(optimizer, "mse", metrics=["mae"])
""",
        _FIT,
        _OF_KERAS,
        is_step=False,
    ),
    "keras on jax": Form(
        "pjrt",
        f"""{_DATA.replace(str(SAMPLES), str(FIT_SAMPLES))}{_KERAS}
optimizer = keras.optimizers.Adam(0.01)
model.compile(optimizer, "mse", metrics=["mae"])
""",
        _FIT,
        _OF_KERAS,
        is_step=False,
    ),
}
