"""Strategies that a cell constructs, on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import nbdist
from tests import clusters
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

TUTORIAL = """
import tensorflow as tf, keras, numpy as np
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.arange(64.0).reshape(16, 4) / 64
model.fit(x, np.ones(16), batch_size=8, epochs=2, shuffle=False, verbose=0)
outcome = [w.tolist() for w in model.get_weights()]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


def test_new_mirrored_strategy_is_the_running_one(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("running = strategy")
    cluster.run(TUTORIAL + "tf.distribute.MirroredStrategy()\nassert strategy is running")
    output = "".join(capsys.readouterr())
    line = (
        "tf.distribute.MirroredStrategy() returns the running `strategy`, with 2 replicas on "
        "2 workers"
    )
    assert output.count(line) == 1
    reference = plainly({"one": TUTORIAL}, "tensorflow")["one"]
    for objects in cluster.pull(["outcome"]).values():
        for ours, theirs in zip(objects["outcome"], reference, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_new_synchronous_strategies_are_the_running_one(cluster: nbdist.Cluster) -> None:
    cell = """
import tensorflow as tf
made = [
    tf.distribute.MultiWorkerMirroredStrategy(),
    tf.distribute.experimental.MultiWorkerMirroredStrategy(),
    tf.distribute.OneDeviceStrategy("/gpu:0"),
    tf.distribute.OneDeviceStrategy(device="/cpu:0"),
    tf.distribute.MirroredStrategy(devices=["/gpu:0", "/gpu:1"]),
    tf.distribute.experimental.CentralStorageStrategy(),
]
alike = all(one is strategy for one in made)
total = float(strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None))
alike, total, isinstance(strategy, tf.distribute.MirroredStrategy)
"""
    assert set(cluster.run(cell).results.values()) == {"(True, 2.0, False)"}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("TPUStrategy()", "supports TPUs on JAX"),
        ("experimental.TPUStrategy()", "supports TPUs on JAX"),
        ("ParameterServerStrategy(None)", "has workers and no parameter servers"),
        ("experimental.ParameterServerStrategy(None)", "has workers and no parameter servers"),
    ],
)
def test_other_strategies_are_refused(cluster: nbdist.Cluster, made: str, reason: str) -> None:
    with pytest.raises(nbdist.CellError, match=reason) as error:
        cluster.run(f"import tensorflow as tf\ntf.distribute.{made}")
    assert "remove the line and use `strategy`" in str(error.value)


def test_cell_on_some_ranks_constructs_its_own_strategy(cluster: nbdist.Cluster) -> None:
    cell = "import tensorflow as tf\ntf.distribute.OneDeviceStrategy('/cpu:0') is strategy"
    assert cluster.run(cell, ranks="0").results == {0: "False"}
    for made in ("MirroredStrategy()", "MultiWorkerMirroredStrategy()"):
        with pytest.raises(nbdist.CellError, match="run the cell without --ranks"):
            cluster.run(f"tf.distribute.{made}", ranks="0")


@pytest.mark.parametrize("decorator", ["", "@tf.function"])
def test_gradients_outside_of_replicas_are_refused(cluster: nbdist.Cluster, decorator: str) -> None:
    cell = f"""
import tensorflow as tf
weights = tf.Variable([1.0, 2.0])
{decorator}
def gradient():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights**2)
    return tape.gradient(loss, weights)
gradient()
"""
    with pytest.raises(nbdist.CellError, match=r"run the body of the loop as a step cell"):
        cluster.run(cell)


def test_other_tensorflow_version_is_not_patched(cluster: nbdist.Cluster) -> None:
    cell = """
import tensorflow as tf
from nbdist.worker.tensorflow.runtime import running_strategy as r
before = tf.distribute.MirroredStrategy.__init__
r.PATCHED_SERIES, kept = "9.9.", r.PATCHED_SERIES
r.apply.__wrapped__()
r.PATCHED_SERIES = kept
tf.distribute.MirroredStrategy.__init__ is before
"""
    assert set(cluster.run(cell).results.values()) == {"True"}
