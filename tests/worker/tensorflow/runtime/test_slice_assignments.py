"""Assignments to slices of variables, compared with one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from tests import clusters
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(2)
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
y = (x @ np.arange(4.0)[:, None]).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
train = x, y
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.05)
bank = tf.Variable(tf.zeros((16, 1)), trainable=False)
"""
OUTCOME = "\noutcome = [bank.numpy().tolist(), [w.tolist() for w in model.get_weights()]]"
EAGER = """
bank[0:2].assign([[3.0], [4.0]])
bank[4].assign([7.0])
last = bank[-1, 0].assign(9.0)
assert float(last[-1, 0]) == 9
at = tf.constant(8)

@tf.function
def fill(value):
    bank[at : at + 2].assign(value)
    return tf.reduce_sum(bank)

assert float(fill(tf.ones((2, 1)))) == 25
"""
STEP = """
    with tf.GradientTape() as tape:
        z = model(xb, training=True)
        near = tf.matmul(z, bank, transpose_b=True)
        loss = tf.reduce_mean((z - yb) ** 2) + 0.01 * tf.reduce_mean(near**2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""
PROGRAMS = {
    "eager": EAGER,
    "loop": f"""
for step, (xb, yb) in enumerate(data):
{STEP}
    at = step % 2 * 8
    bank[at : at + 8].assign(z)
""",
    "function": f"""
@tf.function
def train_step(xb, yb):
{STEP}
    bank[8:16].assign(z)
    bank[0].assign([loss])
    return loss

for xb, yb in data:
    loss = train_step(xb, yb)
""",
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param, framework="tensorflow") as running:
        yield running


def same(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_slices_are_assigned_as_in_one_process(cluster: nbdist.Cluster, name: str) -> None:
    cluster.run(SETUP)
    cluster.run(PROGRAMS[name] + OUTCOME)
    expected = plainly({name: SETUP + PROGRAMS[name] + OUTCOME}, "tensorflow", "keras")[name]
    for objects in cluster.pull(["outcome"]).values():
        same(objects["outcome"], expected)


def test_step_cell_assigns_a_slice_on_all_replicas(cluster: nbdist.Cluster) -> None:
    """The aggregation of a variable applies to its slices too."""
    cluster.run(SETUP + "means = tf.Variable(tf.zeros(2), aggregation=tf.VariableAggregation.MEAN)")
    step = """
xb, yb = batch
bank[0:2].assign([[3.0], [4.0]])
means[1:2].assign([tf.reduce_mean(xb)])
loss = tf.reduce_mean(model(xb))
"""
    cluster.run(step, data="train", batch=8)
    cluster.run("outcome = means.numpy().tolist(), bank.numpy().ravel().tolist(), x[-8:].mean()")
    for objects in cluster.pull(["outcome"]).values():
        means, bank, mean = objects["outcome"]
        np.testing.assert_allclose(means, [0, mean], rtol=1e-5)
        assert bank == [3, 4, *[0] * 14]


@pytest.mark.parametrize("line", ["bank[0:1].assign([[loss]])", "own = z\nbank[0:4].assign(own)"])
def test_step_cell_refuses_values_of_a_replica(cluster: nbdist.Cluster, line: str) -> None:
    cluster.run(SETUP)
    step = f"xb, yb = batch\nz = model(xb)\nloss = tf.reduce_mean(z); {line}"
    with pytest.raises(nbdist.CellError, match=r"line [45]: each replica would assign to a slice"):
        cluster.run(step, data="train", batch=8)
    cluster.run("outcome = bank.numpy().tolist()")
    assert not np.any([values["outcome"] for values in cluster.pull(["outcome"]).values()])


def test_slices_cannot_be_assigned_without_the_patch(cluster: nbdist.Cluster) -> None:
    """If this fails, TensorFlow assigns slices of mirrored variables itself: remove the patch."""
    run = cluster.run(
        SETUP + "from nbdist.worker.tensorflow.runtime import slice_assignments as s\n"
        "s.DistributedVariable.__getitem__ = s._getitem_upstream\n"
        "needed = not hasattr(bank[0:2], 'assign')\ns.apply()\nneeded"
    )
    assert set(run.results.values()) == {"True"}
