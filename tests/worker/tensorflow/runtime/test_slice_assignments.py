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
SCATTER = """
bank.scatter_nd_update([[0], [3]], [[3.0], [4.0]])
bank.scatter_nd_add([[3, 0]], [2.0])
bank.scatter_nd_sub(tf.constant([[0]]), tf.constant([[0.5]]))
bank.scatter_nd_max([[5]], [[7.0]])
bank.scatter_nd_min([[6], [6]], [[-1.0], [-2.0]])
after = bank.scatter_update(tf.IndexedSlices([[8.0]], [8]))
after = bank.scatter_nd_update([[9]], [[9.0]])
assert float(after[9, 0]) == 9
bank.scatter_add(tf.IndexedSlices(tf.ones((2, 1)), [8, 8]))
table = tf.Variable(tf.zeros((2, 3)))
table.batch_scatter_update(tf.IndexedSlices([[5.0], [6.0]], [[1], [2]]))
bank[10:12].assign(tf.reduce_sum(table, 1, keepdims=True))
bank[12].assign(bank.gather_nd([0]) + bank.sparse_read([3])[0])

@tf.function
def fill(rows, value):
    bank.scatter_nd_update(rows, value)
    return tf.reduce_sum(bank)

total = float(fill([[14], [15]], tf.ones((2, 1))))
bank[13].assign([total])
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
    "scatter": SCATTER,
    "scatter in a loop": f"""
for step, (xb, yb) in enumerate(data):
{STEP}
    rows = tf.range(step % 2 * 8, step % 2 * 8 + 8)
    bank.scatter_nd_update(rows[:, None], z)
    bank.scatter_add(tf.IndexedSlices(yb, rows))
""",
    "scatter in a function": f"""
@tf.function
def train_step(xb, yb, rows):
{STEP}
    bank.scatter_nd_update(rows, z)
    return loss

for step, (xb, yb) in enumerate(data):
    loss = train_step(xb, yb, tf.range(step, step + 8)[:, None])
""",
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


UNEQUAL = {
    "own mean": "bank[0:1].assign([[loss]])",
    "own rows": "own = z\nbank[0:4].assign(own)",
    "scatter": "bank.scatter_nd_update([[0]], [[loss]])",
    "scatter at own rows": "bank.scatter_nd_update(tf.cast(z > 0, tf.int32), tf.ones((4, 1)))",
    "branch": "\nif step_count > 0:\n    bank[0:1].assign([[loss]])",
    "own branch": "\nif loss > -1e9:\n    bank[0:1].assign([[3.0]])",
    "loop": "\nfor i in tf.range(2):\n    bank[i : i + 1].assign([[loss]])",
    "carried": "\nkept = 0.0\nfor i in tf.range(2):\n"
    "    bank[i : i + 1].assign([[kept]])\n    kept = loss",
    "own loop": "\nfor i in tf.range(100 + tf.cast(loss, tf.int32)):\n    bank[0].assign([1.0])",
}
COMMON = """
for i in tf.range(2):
    loss = loss + tf.reduce_mean(z)
    if step_count > 0:
        bank[i : i + 1].assign([[3.0]])
        bank.scatter_nd_add([[i + 2]], [[1.0]])
"""


@pytest.mark.parametrize("name", UNEQUAL)
def test_step_cell_refuses_values_of_a_replica(cluster: nbdist.Cluster, name: str) -> None:
    cluster.run(SETUP + "step_count = tf.Variable(1, trainable=False)")
    step = f"xb, yb = batch\nz = model(xb)\nloss = tf.reduce_mean(z); {UNEQUAL[name]}"
    with pytest.raises(nbdist.CellError, match=r"line [4-7]: each replica would assign a value of"):
        cluster.run(step, data="train", batch=8)
    cluster.run("outcome = bank.numpy().tolist()")
    assert not np.any([values["outcome"] for values in cluster.pull(["outcome"]).values()])


def test_step_cell_assigns_common_values_in_branches(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + "step_count = tf.Variable(1, trainable=False)")
    step = f"xb, yb = batch\nz = model(xb)\nloss = tf.reduce_mean(z){COMMON}"
    cluster.run(step, data="train", batch=8)
    cluster.run("outcome = bank.numpy().ravel().tolist()")
    for objects in cluster.pull(["outcome"]).values():
        assert objects["outcome"] == [3, 3, 5, 5, *[0] * 12]


def test_scatter_refuses_aggregations(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + "means = tf.Variable(tf.zeros(2), aggregation=tf.VariableAggregation.MEAN)")
    with pytest.raises(nbdist.CellError, match="scatter_nd_update is only supported for mirrored"):
        cluster.run("means.scatter_nd_update([[0]], [1.0])")


def test_slices_cannot_be_assigned_without_the_patch(cluster: nbdist.Cluster) -> None:
    """If this fails, TensorFlow assigns slices of mirrored variables itself: remove the patch."""
    run = cluster.run(
        SETUP + "from nbdist.worker.tensorflow.runtime import slice_assignments as s\n"
        "s.DistributedVariable.__getitem__ = s._getitem_upstream\n"
        "inherited = [name for name in vars(tf.Variable) if 'scatter_nd' in name]\n"
        "for name in inherited:\n    delattr(s.DistributedVariable, name)\n"
        "needed = not hasattr(bank[0:2], 'assign')\n"
        "try:\n    bank.scatter_nd_update([[0]], [[1.0]])\n    needed = False\n"
        "except NotImplementedError:\n    pass\n"
        "s.apply()\nneeded"
    )
    assert set(run.results.values()) == {"True"}
