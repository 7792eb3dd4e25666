"""Training loops with updates in an `if`, such as every nth step, or in a loop over models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import clusters, references
from tests.end_to_end.test_lifted_loops_jax import assert_near, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

JAX_SETUP = """
import jax, jax.numpy as jnp, numpy as np
data = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
rng = np.random.default_rng(3)
w, v = jnp.ones((4, 2)) * 0.3, jnp.array([[1.0], [-2.0]])

@jax.jit
def critic_step(v, w, real, z):
    def loss(v):
        return jnp.mean((z @ w @ v) ** 2) + jnp.mean((real @ v - 1) ** 2)
    value, g = jax.value_and_grad(loss)(v)
    return v - 0.1 * g, value

@jax.jit
def generator_step(w, v, z):
    def loss(w):
        return -jnp.mean(jnp.tanh(z @ w) @ v)
    value, g = jax.value_and_grad(loss)(w)
    return w - 0.1 * g, value

losses = []
key = jax.random.key(1)
"""
JAX_LOOPS = {
    "the key is split again in the branch": """
for i in range(0, 64, 16):
    key, sub = jax.random.split(key)
    v, loss = critic_step(v, w, data[i : i + 16], jax.random.normal(sub, (16, 4)))
    losses.append(loss.item())
    if i % 32 == 16:
        key, sub = jax.random.split(key)
        w, value = generator_step(w, v, jax.random.normal(sub, (16, 4)))
        losses.append(value.item())
last = jax.random.key_data(sub)
""",
    "a name that only the branch binds": """
for i in range(0, 64, 16):
    z = rng.normal(size=(16, 4)).astype("float32")
    v, loss = critic_step(v, w, data[i : i + 16], z)
    losses.append(loss.item())
    if i % 32 == 16:
        latents = rng.normal(size=(16, 4)).astype("float32")
        w, value = generator_step(w, v, latents)
        losses.append(value.item())
last = latents
""",
    "items of one iterator in the branch and after it": """
noises = iter(rng.normal(size=(20, 16, 4)).astype("float32"))
for i in range(0, 64, 16):
    if i % 32 == 16:
        w, value = generator_step(w, v, next(noises))
        losses.append(value.item())
    v, loss = critic_step(v, w, data[i : i + 16], next(noises))
    losses.append(loss.item())
last = next(noises)
""",
    "a draw under a name that the first update reads": """
for i in range(0, 64, 16):
    z = rng.normal(size=(16, 4)).astype("float32")
    v, loss = critic_step(v, w, data[i : i + 16], z)
    if i % 32 == 16:
        z = rng.normal(size=(16, 4)).astype("float32")
        w, value = generator_step(w, v, z)
        losses.append(value.item())
last = z
""",
    "a sum that the first pass assigns": """
for i in range(0, 64, 16):
    real = data[i : i + 16]
    loss, g = jax.value_and_grad(lambda w: jnp.mean((real @ w.T) ** 2))(w)
    if i % 32 == 0:
        total = g
    else:
        total = total + g
        w = w - 0.1 * total
    losses.append(loss.item())
last = total
""",
}
JAX_RESULT = "outcome = [np.asarray(x).tolist() for x in (losses, w, v, last)]"

KERAS_SETUP = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
data = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
batches = tf.data.Dataset.from_tensor_slices(data).batch(16)
generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
critic = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
generator_optimizer, critic_optimizer = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
losses = []
"""
KERAS_LOOP = """
for i, real in enumerate(batches):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((critic(real) - 1) ** 2)
    gradients = tape.gradient(loss, critic.trainable_variables)
    critic_optimizer.apply_gradients(zip(gradients, critic.trainable_variables))
    losses.append(float(loss))
    if i % 2 == 1:
        noise = {noise}
        with tf.GradientTape() as tape:
            value = -tf.reduce_mean(critic(generator(noise)))
        gradients = tape.gradient(value, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables))
        losses.append(float(value))
"""
KERAS_ENSEMBLE = """
models, optimizers = [critic, generator], [critic_optimizer, generator_optimizer]
for i, real in enumerate(batches):
    for net, rule in zip(models, optimizers):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(tf.tile(real, [1, net.input_shape[1] // 2])) - 1) ** 2)
        gradients = tape.gradient(loss, net.trainable_variables)
        rule.apply_gradients(zip(gradients, net.trainable_variables))
    losses.append(float(loss))
losses.append(float(loss))
"""
KERAS_NAMES = """
penalty = part = sign = None
def weights():
    yield from (0.1, 0.2)

for i, real in enumerate(batches):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((critic(real) - 1) ** 2)
        if tf.__version__:
            penalty = 0.01 * tf.reduce_sum(critic.weights[0] ** 2)
            loss += penalty
        for weight in weights():
            part = weight * tf.reduce_mean(critic(real) ** 2)
            loss += part
    if i % 2:
        sign = "odd"
    gradients = tape.gradient(loss, critic.trainable_variables)
    critic_optimizer.apply_gradients(zip(gradients, critic.trainable_variables))
losses += [float(penalty), float(part), weight, len(sign)]
"""
KERAS_TENSORS = """
largest = part = None
for real in batches:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((critic(real) - 1) ** 2)
        for k in tf.range(2):
            part = tf.cast(k, tf.float32) * tf.reduce_mean(critic(real) ** 2)
            loss += part
        if loss > -1.0:
            largest = 2 * loss
    gradients = tape.gradient(loss, critic.trainable_variables)
    critic_optimizer.apply_gradients(zip(gradients, critic.trainable_variables))
losses += [float(part), float(largest)]
"""
KERAS_RESULT = "outcome = [losses, *(w.tolist() for w in generator.get_weights())]"
DIVIDED = "on 2 replicas, 16 samples a batch, 8 on each"
NOISES = {
    "tensors": "tf.random.stateless_normal((16, 4), [i, 1])",
    "arrays of NumPy": 'np.random.normal(size=(16, 4)).astype("float32")',
}


@pytest.fixture(scope="module")
def jax_cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        yield running


@pytest.fixture(scope="module")
def keras_cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


def assert_numbers(
    cluster: nbdist.Cluster, framework: str, setup: str, loop: str, result: str
) -> None:
    """Run a loop on the workers and in one process, and compare."""
    reference = references.plainly({"loop": setup + loop + result}, framework)
    cluster.run(setup)
    cluster.run(loop)
    cluster.run(result)
    assert_near(outcome(cluster), reference["loop"])


@pytest.mark.parametrize("name", JAX_LOOPS)
def test_jax_loop_has_the_numbers_of_one_device(
    jax_cluster: nbdist.Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_numbers(jax_cluster, "jax", JAX_SETUP, JAX_LOOPS[name], JAX_RESULT)
    assert DIVIDED in capsys.readouterr().out


@pytest.mark.parametrize("noise", NOISES)
def test_mirrored_loop_has_the_numbers_of_one_device(
    keras_cluster: nbdist.Cluster, noise: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = KERAS_LOOP.format(noise=NOISES[noise])
    assert_numbers(keras_cluster, "tensorflow", KERAS_SETUP, loop, KERAS_RESULT)
    assert DIVIDED in capsys.readouterr().out


@pytest.mark.parametrize("loop", [KERAS_ENSEMBLE, KERAS_NAMES], ids=["models", "branches"])
def test_names_that_the_step_assigns_have_values_after_the_loop(
    keras_cluster: nbdist.Cluster, loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_numbers(keras_cluster, "tensorflow", KERAS_SETUP, loop, KERAS_RESULT)
    assert DIVIDED in capsys.readouterr().out


def test_names_that_only_tensors_assign_are_computed_by_every_worker(
    keras_cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_numbers(keras_cluster, "tensorflow", KERAS_SETUP, KERAS_TENSORS, KERAS_RESULT)
    assert "a loop over tensors assigns a name" in capsys.readouterr().err


def test_draw_between_two_updates_under_one_name_is_computed_by_every_worker(
    keras_cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = KERAS_LOOP.replace("critic(real)", "critic(real + noise[:, :2])").replace(
        "for i, real in enumerate(batches):",
        "for i, real in enumerate(batches):\n    noise = np.random.normal(size=(16, 4))",
    )
    loop = loop.format(noise=NOISES["arrays of NumPy"])
    assert_numbers(keras_cluster, "tensorflow", KERAS_SETUP, loop, KERAS_RESULT)
    assert "Every worker computes the whole loop" in capsys.readouterr().err


UNBOUND = "`{name}` has no value before the loop. Every worker computes the whole loop"

KERAS_SUMS = """
for i, real in enumerate(batches):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((critic(real) - 1) ** 2)
    gradients = tape.gradient(loss, critic.trainable_variables)
    if i % 2 == 0:
        total = gradients
    else:
        total = [a + b for a, b in zip(total, gradients)]
        critic_optimizer.apply_gradients(zip(total, critic.trainable_variables))
    losses.append(float(loss))
losses.append(float(total[0][0, 0]))
"""


def test_mirrored_loop_whose_first_pass_assigns_a_sum_runs_as_written(
    keras_cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_numbers(keras_cluster, "tensorflow", KERAS_SETUP, KERAS_SUMS, KERAS_RESULT)
    assert UNBOUND.format(name="total") in capsys.readouterr().err
