"""Training with Flax NNX, Equinox and Optax, as step cells and as plain one-device programs."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

X64 = textwrap.dedent("""
    import jax, jax.numpy as jnp
    jax.config.update("jax_enable_x64", True)
""")


EPOCHS, BATCH = 2, 96
DATA = """
import numpy as np
from sklearn.datasets import load_digits
digits = load_digits()
images, labels = digits.data[:1001] / 16, digits.target[:1001]
train = images, labels
"""


class Program(NamedTuple):
    """A training.

    Attributes:
        setup: cell that runs once.
        step: step cell.
        train_step: the same step as in the framework's own documentation.
        plain: code that calls `train_step`.
        weights: expression for the final weights as lists of floats.
    """

    setup: str
    step: str
    train_step: str
    plain: str
    weights: str


def _text(source: str) -> str:
    return textwrap.dedent(source)


NNX = Program(
    setup=X64
    + _text("""
    import optax
    from flax import nnx
    wide = dict(dtype=jnp.float64, param_dtype=jnp.float64)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(24, 16, use_bias=False, rngs=rngs, **wide)
            self.norm = nnx.BatchNorm(16, rngs=rngs, **wide)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.last = nnx.Linear(16, 10, rngs=rngs, **wide)
            self.scale = jnp.full((), 0.5)

        def __call__(self, x):
            return self.scale * self.last(self.drop(nnx.tanh(self.norm(self.first(x)))))

    features = nnx.Linear(64, 24, rngs=nnx.Rngs(1), **wide)
    model = Net(nnx.Rngs(params=2, dropout=3))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    metrics = nnx.MultiMetric(mean=nnx.metrics.Average("loss"))
    """),
    step=_text("""
    x, y = batch
    def loss_fn(model):
        logits = model(features(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss.astype(jnp.float32))
    """),
    train_step=_text("""
    @nnx.jit
    def train_step(model, optimizer, metrics, features, x, y):
        def loss_fn(model):
            logits = model(features(x))
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss.astype(jnp.float32))
        return loss
    """),
    plain="loss = train_step(model, optimizer, metrics, features, *batch)",
    weights="[np.asarray(leaf).tolist() for leaf in jax.tree.leaves(nnx.state((model, optimizer,"
    " features), nnx.filterlib.Not(nnx.RngKey)))]",
)

EQUINOX = Program(
    setup=X64
    + _text("""
    import equinox as eqx, optax

    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        drop: eqx.nn.Dropout
        last: eqx.nn.Linear

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first = eqx.nn.Linear(64, 16, use_bias=False, key=one)
            self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
            self.drop = eqx.nn.Dropout(0.2)
            self.last = eqx.nn.Linear(16, 10, key=two)

        def __call__(self, x, state, key):
            x, state = self.norm(self.first(x), state)
            return self.last(self.drop(jnp.tanh(x), key=key)), state

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(4))
    key = jax.random.key(6)
    # Optax warms up in float32: these rates it has exactly, however XLA fuses their arithmetic.
    schedule = optax.warmup_cosine_decay_schedule(1 / 1024, 1 / 64, 4, 11)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, mask=None))
    tx = optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation()
    tx = optax.apply_if_finite(tx, max_consecutive_errors=3)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, state, x, y, key):
        forward = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        logits, state = forward(x, state, jax.random.split(key, len(x)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state

    traced = []
    def note(x):
        traced.append(x.shape)
        return x
    """),
    step=_text("""
    x, y = batch
    key, own = jax.random.split(key)
    (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(
        model, state, note(x), y, own)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    model = eqx.apply_updates(model, updates)
    """),
    train_step=_text("""
    @eqx.filter_jit
    def train_step(model, state, opt_state, x, y, key):
        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(
            model, state, x, y, key)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return loss, eqx.apply_updates(model, updates), state, opt_state
    """),
    plain=_text("""
    key, own = jax.random.split(key)
    loss, model, state, opt_state = train_step(model, state, opt_state, *batch, own)
    """),
    weights="[np.asarray(leaf).tolist() for leaf in jax.tree.leaves((eqx.filter(model,"
    " eqx.is_inexact_array), state, opt_state)) if eqx.is_array(leaf)]",
)
