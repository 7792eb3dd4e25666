"""Signals of training on two workers, compared with a program in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import SIGNAL_STEPS, SIGNALS, Histogram
from tests import clusters, references
from tests.runs import latest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from nbdist.telemetry.run_reader import StoredRun

RECORDED = (1, 2, 4)
"""Steps with signals: the first one, and those with histograms."""

SETUP = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(2)
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x @ np.arange(4.0)[:, None]).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(8, "tanh", name="hidden"), keras.layers.Dense(1)]
)
rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.9)
optimizer = keras.optimizers.Adam(rate)
"""
REFERENCE = """
def norm(arrays):
    return float(np.sqrt(sum((np.asarray(a, "float64") ** 2).sum() for a in arrays)))

outcome = []
for xb, yb in data:
    before = [v.numpy() for v in model.trainable_variables]
    learning_rate = float(optimizer.learning_rate)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    updates = [v.numpy() - b for v, b in zip(model.trainable_variables, before)]
    outcome.append([norm(gradients), norm(before), norm(updates) / norm(before), learning_rate])
    outcome[-1].append([norm([gradients[0]]), norm([before[0]])])
"""
STEP = """
xb, yb = batch
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
gradients = tape.gradient(loss, model.trainable_variables)
optimizer.apply(gradients, model.trainable_variables)
"""
LOOP = """
for xb, yb in data:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
"""
FIT = "model.compile(optimizer=optimizer, loss='mse')\nmodel.fit(data, verbose=0)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the signals of each step of one process, and norms of the first gradient and array."""
    outcome: list[Any] = references.plainly({"signals": SETUP + REFERENCE}, "tensorflow", "keras")[
        "signals"
    ]
    return outcome


def squares(histogram: Histogram) -> float:
    return histogram.size * (histogram.deviation**2 + histogram.mean**2)


def steps_of(run: StoredRun, name: str) -> np.ndarray:
    """Return the values of a signal by step. All ranks share them."""
    found: dict[float, set[float]] = {}
    for table in run.tables():
        if name in table.columns.shared:
            at = table.columns.names.index(name)
            for row in run.array(table):
                found.setdefault(row[2], set()).add(row[at])
    assert all(len(values) == 1 for values in found.values()), "ranks differ"
    return np.array([found[step].pop() for step in sorted(found)])


CELLS = {"step": STEP, "loop": LOOP, "fit": FIT}


@pytest.mark.parametrize(
    "kind", ["step", pytest.param("loop", marks=pytest.mark.full), "fit"]
)  # a loop is trained as a step
def test_signals_are_those_of_one_process(
    cluster: nbdist.Cluster, expected: list[Any], kind: str
) -> None:
    cluster.run(SETUP)
    cluster.run(CELLS[kind], watch=2, **({"data": "data"} if kind == "step" else {}))
    assert latest(cluster).state().signal_steps == SIGNAL_STEPS
    for i, name in enumerate(SIGNALS):
        values = steps_of(latest(cluster), name)
        np.testing.assert_allclose(
            values, [expected[step - 1][i] for step in RECORDED], rtol=1e-4, err_msg=name
        )
    found = [item for item in latest(cluster).media() if item.name.endswith("hidden/kernel")]
    assert [(item.rank, item.step) for item in found] == [(0, 2), (0, 2), (0, 4), (0, 4)]
    for item in found:
        assert isinstance(item.content, Histogram)
        gradient, parameter = expected[item.step - 1][-1]
        norm = gradient if item.name.startswith("gradients/") else parameter
        assert squares(item.content) == pytest.approx(norm**2, rel=1e-3)


WITHOUT_TAPE = """
xb, yb = batch
loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
bias = model.layers[-1].bias
bias.assign_sub(0.1 * tf.ones_like(bias))
"""
OWN_TRAIN_STEP = """
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = model

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        xb, yb = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.inner(xb, training=True) - yb) ** 2)
        weights = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

own = Own()
own.compile(optimizer=optimizer)
own.fit(data, verbose=0);
"""


def remarks(cluster: nbdist.Cluster) -> list[str]:
    """Return the lines of the last run about signals that are not recorded."""
    return [f.text for f in latest(cluster).state().findings if f.topic == "watch"]


def test_a_signal_that_cannot_be_recorded_is_left_out_with_a_line(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP)
    cluster.run(WITHOUT_TAPE + "loss", watch=True, data="data")
    (gradients, rate) = remarks(cluster)
    assert gradients.startswith("--watch: no gradient norm, parameter norm and update ratio: ")
    assert rate == "--watch: no learning rate: the step uses no Keras optimizer"
    names = {name for table in latest(cluster).tables() for name in table.columns.shared}
    assert not names & set(SIGNALS)


@pytest.mark.full  # another form of a fit
def test_an_own_train_step_has_signals(cluster: nbdist.Cluster, expected: list[Any]) -> None:
    cluster.run(SETUP)
    cluster.run(OWN_TRAIN_STEP, watch=True)
    assert not remarks(cluster)
    found = [steps_of(latest(cluster), name)[0] for name in SIGNALS]
    np.testing.assert_allclose(found, expected[0][:4], rtol=1e-4)


def test_a_model_that_has_been_fitted_is_fitted_with_signals(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + FIT)
    cluster.run("model.fit(data, verbose=0);")
    assert not latest(cluster).state().signal_steps
    assert not steps_of(latest(cluster), "grad_norm").size
    cluster.run("model.fit(data, verbose=0);", watch=True)
    assert steps_of(latest(cluster), "grad_norm").size == 1
