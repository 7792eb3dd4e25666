"""Random numbers of mirrored steps: separate for rows, the same for weights on all replicas."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.records import StepOptions
from tests import clusters
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

MODEL = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
data = tf.data.Dataset.from_tensor_slices(x).batch(16)
kernel = tf.Variable(np.ones((8, 3), "float32"))
optimizer = keras.optimizers.SGD(0.1)
optimizer.build([kernel])
"""
STEP = """
noise = tf.random.stateless_normal([8, 3], [1, 2])
rows = tf.random.stateless_normal(SHAPE, [3, 4])
again = tf.random.stateless_uniform(kernel.shape, [5, 6])
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(((batch + rows) @ (kernel * (again + noise))) ** 2)
optimizer.apply([tape.gradient(loss, kernel)], [kernel])
{"loss": loss}
"""
OUTCOME = "outcome = kernel.numpy().tolist()\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


@pytest.mark.parametrize(
    "shape", ["tf.shape(batch)", pytest.param("(tf.shape(batch)[0], 8)", marks=pytest.mark.full)]
)
def test_noise_for_weights_differs_from_noise_for_rows(cluster: nbdist.Cluster, shape: str) -> None:
    """Each replica has 8 rows, and the weights have 8 rows too."""
    step = STEP.replace("SHAPE", shape)
    loop = "for batch in data:" + textwrap.indent(step, "    ") + OUTCOME
    reference = plainly({"it": MODEL + loop}, "tensorflow", "keras")["it"]
    cluster.run(MODEL)
    cluster.run(step, step=StepOptions(data="data"))
    cluster.run(OUTCOME)
    for objects in cluster.pull(["outcome"]).values():
        np.testing.assert_allclose(objects["outcome"], reference, rtol=1e-5)


FIXED = """
made = tf.reshape(batch, [8, 2, 4])
rows = tf.random.stateless_normal([8, 3], [1, 2])
loss = tf.reduce_mean(tf.reduce_sum(made, [1, 2]) * rows[:, 0]) + 0 * tf.reduce_sum(kernel)
{"loss": loss}
"""


def test_step_for_one_row_count_keeps_its_trace(cluster: nbdist.Cluster) -> None:
    """The step has no trace for another number, so each replica draws for its own rows."""
    cluster.run(MODEL)
    run = cluster.run(FIXED, step=StepOptions(data="data"))
    assert run.loss.shape == (4,)
    draws = cluster.run("tf.random.stateless_normal([16, 3], [1, 2]).numpy()[:, 0].tolist()")
    drawn = np.array([float(n) for n in draws.results[0].strip("[]").split(",")])
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    expected = [float((x[i : i + 16].sum(1) * drawn).mean()) for i in range(0, 64, 16)]
    np.testing.assert_allclose(run.loss, expected, rtol=1e-4, atol=1e-5)
