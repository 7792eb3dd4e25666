"""Training loops beside loops over models, optimizers and learning rates, which have no batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import clusters
from tests.end_to_end.test_lifted_loops import SETUP, expected, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

PAIR = """
def made(seed):
    start = keras.initializers.GlorotUniform(seed=seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=start)])
first, second = made(1), made(2)
optimizers = {"first": keras.optimizers.Adam(0.01), "second": keras.optimizers.SGD(0.02)}
@tf.function
def train_step(xb, yb):
    with tf.GradientTape(persistent=True) as tape:
        one = tf.reduce_mean((first(xb) - yb) ** 2)
        two = tf.reduce_mean((second(xb) + first(xb) - yb) ** 2)
    for key, net, loss in (("first", first, one), ("second", second, two)):
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizers[key].apply_gradients(zip(gradients, net.trainable_variables))
    return {"one": one, "two": two}
for xb, yb in data:
    found = train_step(xb, yb)
    losses.append([float(value) for value in found.values()])
outcome = losses
"""
ENSEMBLE = """
models = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in range(2)]
optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.02)]
@tf.function
def train_step(xb, yb):
    found = []
    for net, rule in zip(models, optimizers):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(xb) - yb) ** 2)
        gradients = tape.gradient(loss, net.trainable_variables)
        rule.apply_gradients(zip(gradients, net.trainable_variables))
        found.append(loss)
    return tf.stack(found)
for xb, yb in data:
    losses.append(train_step(xb, yb).numpy().tolist())
outcome = losses
"""
LAYERS = """
class Part(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, kernel_initializer="ones")
        self.rule = keras.optimizers.SGD(0.02)
    def learn(self, rows):
        with tf.GradientTape() as tape:
            made = tf.tanh(self.dense(rows))
            loss = tf.reduce_mean(tf.reduce_sum(made ** 2, 1))
        variables = self.dense.trainable_variables
        self.rule.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return tf.stop_gradient(made), loss
parts = [Part(), Part()]
parts[1].dense.build((None, 3))
parts[0].dense.build((None, 4))
@tf.function
def train_step(xb):
    for part in parts:
        xb, loss = part.learn(xb)
    return loss
for xb, yb in data:
    losses.append(float(train_step(xb)))
outcome = losses
"""
ATTACK = """
net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
rule = keras.optimizers.SGD(0.02)
for xb, yb in data:
    attacked = tf.Variable(xb)
    for step in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(attacked) - yb) ** 2)
        attacked.assign_add(0.1 * tf.sign(tape.gradient(loss, attacked)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(attacked) - yb) ** 2)
    gradients = tape.gradient(loss, net.trainable_variables)
    rule.apply_gradients(zip(gradients, net.trainable_variables))
    losses.append(float(loss))
outcome = losses
"""
RATES = """
for rate in [0.01, 0.05]:
    w = tf.Variable(tf.fill((4, 1), 0.1))
    for step in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - y) ** 2)
        w.assign_sub(rate * tape.gradient(loss, w))
        losses.append(loss.numpy().item())
outcome = losses
"""
SEEDS = """
seeds = [1, 2]
for seed in seeds:
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    rule = keras.optimizers.SGD(0.01 * seed)
    for epoch in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - y) ** 2)
        gradients = tape.gradient(loss, net.trainable_variables)
        rule.apply_gradients(zip(gradients, net.trainable_variables))
        losses.append(float(loss))
outcome = losses
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


@pytest.mark.parametrize("cell", [PAIR, ENSEMBLE, LAYERS], ids=["pair", "ensemble", "layers"])
def test_step_that_loops_over_models_is_divided(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    cluster.run(SETUP)
    np.testing.assert_allclose(outcome(cluster, cell), expected(cell), rtol=1e-5)
    text = capsys.readouterr()
    assert "steps over `data` on 2 replicas, 8 samples a batch, 4 on each" in text.out + text.err


@pytest.mark.parametrize("cell", [RATES, SEEDS], ids=["rates", "seeds"])
def test_loop_around_trainings_is_no_loop_over_batches(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    """Its passes are trainings, so the loop in it is that of the steps."""
    cluster.run(SETUP)
    np.testing.assert_allclose(outcome(cluster, cell), expected(cell), rtol=1e-5)
    text = capsys.readouterr()
    assert "is inside the statement that takes the gradient" not in text.out + text.err
    assert "the loop passes no batch to them" in text.out + text.err


def test_loop_that_attacks_its_batches_is_the_loop_of_the_steps(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pass creates a variable, which an inner loop changes, but trains a model that stays."""
    cluster.run(SETUP)
    np.testing.assert_allclose(outcome(cluster, ATTACK), expected(ATTACK), rtol=1e-5)
    text = capsys.readouterr()
    assert "line 3: " in text.out + text.err, "the line of the outer loop"
