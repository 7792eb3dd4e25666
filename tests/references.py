"""Training by hand on one device, in plain TensorFlow and plain JAX: what step cells must equal."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

EPOCHS, BATCH = 2, 96

DATA = textwrap.dedent("""
    import numpy as np
    from sklearn.datasets import load_digits
    digits = load_digits()
    images = digits.data[:1001] / 16
    labels = digits.target[:1001]
    train = images, labels
""")
"""1001 digits: the last of 11 batches has 41, which no number of replicas here divides."""

OPTIMIZERS = {
    "sgd": "keras.optimizers.SGD(0.1, momentum=0.9)",
    "adam": "keras.optimizers.Adam(0.01)",
    "adamw, clipped": "keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.1)",
}

TF_MODEL = textwrap.dedent("""
    import keras, tensorflow as tf
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(24, activation="tanh"),
                              keras.layers.Dense(10)])
    optimizer = OPTIMIZER
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
""")

TF_STEP = {
    "Keras's own loss": textwrap.dedent("""
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    """),
    "a loss of one's own": textwrap.dedent("""
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    """),
}

JAX_MODEL = textwrap.dedent("""
    import jax, jax.numpy as jnp
    jax.config.update("jax_enable_x64", True)
    k1, k2, key = jax.random.split(jax.random.key(5), 3)
    params = {"w1": jax.random.normal(k1, (64, 24)) / 8, "b1": jnp.zeros(24),
              "w2": jax.random.normal(k2, (24, 10)) / 5, "b2": jnp.zeros(10)}
    moments = jax.tree.map(lambda p: (jnp.zeros_like(p), jnp.zeros_like(p)), params)
    count = 0
    decay = np.full((), 1e-4)

    def loss_of(params, x, y, key):
        h = jnp.tanh(x @ params["w1"] + params["b1"])
        h = h + 0.01 * jax.random.normal(key, (24,))
        logits = h @ params["w2"] + params["b2"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    def adam(p, g, m, t):
        first, second = 0.9 * m[0] + 0.1 * g, 0.999 * m[1] + 0.001 * g * g
        return p - 0.01 * (first / (1 - 0.9**t)) / (jnp.sqrt(second / (1 - 0.999**t)) + 1e-8), (
            first, second)
""")

JAX_STEP = textwrap.dedent("""
    x, y = batch
    key, noise = jax.random.split(key)
    count += 1
    loss, grads = jax.value_and_grad(loss_of)(params, x, y, noise)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    both = {n: adam(params[n] * (1 - decay), grads[n] / jnp.maximum(1, norm), moments[n], count)
            for n in params}
    params = {n: new for n, (new, _) in both.items()}
    moments = {n: m for n, (_, m) in both.items()}
    {"loss": loss, "norm": norm}
""")

LOOP = textwrap.dedent("""
    losses = []
    for epoch in range({epochs}):
        for start in range(0, len(labels), {batch}):
            batch = images[start : start + {batch}], labels[start : start + {batch}]
    {step}
            losses.append(float(loss))
    outcome = {{"losses": losses, "weights": {weights}}}
""")


def by_hand(setup: str, step: str, weights: str) -> dict[str, Any]:
    """Losses of every step and final weights, from a process that knows nothing of nbdist."""
    body = textwrap.indent(textwrap.dedent(step).strip(), " " * 8)
    loop = LOOP.format(epochs=EPOCHS, batch=BATCH, step=body, weights=weights)
    program = f"{DATA}\n{setup}\n{loop}\nimport json\nprint(json.dumps(outcome))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


TF_WEIGHTS = "[w.tolist() for w in model.get_weights()]"
JAX_WEIGHTS = "[np.asarray(params[n]).tolist() for n in sorted(params)]"
