"""Strategies that a cell constructs, on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    reference = plainly({"one": TUTORIAL}, "tensorflow", "keras")["one"]
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


def test_session_is_cleared_after_an_import_of_version_1(cluster: nbdist.Cluster) -> None:
    """The import replaces the module `tf.compat.v1`, as Keras's `TensorBoard` does."""
    cell = """
import keras, tensorflow as tf, tensorflow.compat.v1
keras.backend.clear_session()
tf.distribute.get_strategy() is strategy
"""
    assert set(cluster.run(cell).results.values()) == {"True"}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("TPUStrategy()", "supports TPUs on JAX"),
        pytest.param(
            *("experimental.TPUStrategy()", "supports TPUs on JAX"), marks=pytest.mark.full
        ),
        ("ParameterServerStrategy(None)", "has workers and no parameter servers"),
        pytest.param(
            *("experimental.ParameterServerStrategy(None)", "has workers and no parameter servers"),
            marks=pytest.mark.full,
        ),
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


PLAIN = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
y = (x @ np.arange(4.0)[:, None]).astype("float32")
model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
loss_fn = keras.losses.MeanSquaredError()
"""
STEP = """
with tf.GradientTape() as tape:
    loss = loss_fn(y, model(x, training=True))
gradients = tape.gradient(loss, model.trainable_variables)
optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""
WEIGHTS = "outcome = [w.tolist() for w in model.get_weights()]"
UPDATES = {
    "sgd": PLAIN + "optimizer = keras.optimizers.SGD(0.1, momentum=0.9)" + STEP * 2 + WEIGHTS,
    "adam": PLAIN + "optimizer = keras.optimizers.Adam(0.05)" + STEP * 2 + WEIGHTS,
    "apply": PLAIN
    + """
optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True, global_clipnorm=0.5)
with tf.GradientTape() as tape:
    loss = loss_fn(y, model(x))
gradients = tape.gradient(loss, model.trainable_weights)
optimizer.apply(gradients, model.trainable_weights)
optimizer.apply(gradients)
outcome = [np.asarray(v).tolist() for v in model.variables + optimizer.variables]
""",
    "scaled loss": PLAIN
    + """
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05))
with tf.GradientTape() as tape:
    loss = optimizer.scale_loss(loss_fn(y, model(x)))
optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
"""
    + WEIGHTS,
    "compiled": PLAIN
    + """
optimizer = keras.optimizers.Adam(0.05)
@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
losses = [float(train_step(x, y)), float(train_step(x, y))]
outcome = [losses, *(w.tolist() for w in model.get_weights())]
""",
    "layers with state": PLAIN
    + """
layers = [keras.layers.Embedding(9, 4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
model = keras.Sequential([layers[0], keras.layers.Flatten(), *layers[1:]])
optimizer, x = keras.optimizers.SGD(0.1), np.arange(40).reshape(20, 2) % 9
y = y[:20]
"""
    + STEP * 2
    + WEIGHTS,
    "variables": """
import tensorflow as tf
weights, bias = tf.Variable([1.0, 2.0]), tf.Variable(0.5)
for _ in range(3):
    with tf.GradientTape(persistent=True) as tape:
        values = weights**2 + bias
        loss = tf.reduce_sum(values)
    slopes = tape.gradient(loss, {"weights": weights, "others": [bias]})
    rows = tape.jacobian(values, weights)
    weights.assign_sub(0.1 * slopes["weights"])
    bias.assign_sub(slopes["others"][0] * 0.1)
with tf.GradientTape(watch_accessed_variables=False) as tape:
    tape.watch([weights])
    loss = tf.reduce_sum(weights**3) * bias
watched = tape.gradient(loss, [weights, bias])
assert watched[1] is None
outcome = [v.numpy().tolist() for v in (weights, bias, rows, watched[0])]
""",
}


def in_one_process(case: str) -> Any:
    return plainly({case: UPDATES[case]}, "tensorflow", "keras")[case]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.full if c in ("sgd", "scaled loss") else ())
        for c in UPDATES
    ],
)
def test_plain_cell_updates_variables_as_in_one_process(cluster: nbdist.Cluster, case: str) -> None:
    cluster.run(UPDATES[case])
    own, other = (values["outcome"] for values in cluster.pull(["outcome"]).values())
    assert own == other
    for a, b in zip(own, in_one_process(case), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


TWO_DEVICES = """
import numpy as np, tensorflow as tf
from nbdist.worker.tensorflow.keras import fit_patch
from nbdist.worker.tensorflow.runtime import running_strategy
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
running_strategy.apply()
fit_patch.apply()
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
results = {}
for name, cell in CELLS.items():
    space = {}
    with strategy.scope():
        exec(cell, space)
    owners = [space[n] for n in ("model", "optimizer") if n in space]
    variables = [getattr(v, "value", v) for owner in owners for v in owner.variables]
    variables += [space[n] for n in ("weights", "bias") if n in space]
    assert all(len(v.values) == 2 for v in variables)
    for variable in variables:
        np.testing.assert_array_equal(*(part.numpy() for part in variable.values))
    results[name] = space["outcome"]
outcome = results
"""


@pytest.mark.full  # test_lifted_step.py has two devices
def test_all_devices_of_a_worker_receive_the_updates() -> None:
    program = f"CELLS = {UPDATES!r}\n" + TWO_DEVICES
    results = plainly({"all": program}, "tensorflow", "keras")["all"]
    for case, outcome in results.items():
        for a, b in zip(outcome, in_one_process(case), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=case)


def test_gradients_in_replicas_remain_those_of_each_replica(cluster: nbdist.Cluster) -> None:
    cell = """
import tensorflow as tf
weights = tf.Variable([1.0, 2.0])
def slope():
    factor = 1 + tf.distribute.get_replica_context().replica_id_in_sync_group
    with tf.GradientTape() as tape:
        loss = tf.cast(factor, tf.float32) * tf.reduce_sum(weights**2)
    return tape.gradient(loss, weights)
strategy.reduce("SUM", strategy.run(slope), axis=None).numpy().tolist()
"""
    assert set(cluster.run(cell).results.values()) == {"[6.0, 12.0]"}


def test_other_tensorflow_version_is_not_patched(cluster: nbdist.Cluster) -> None:
    cell = """
import tensorflow as tf
from nbdist.private_api.tested_versions import TESTED
from nbdist.worker.tensorflow import strategy as backend
from nbdist.worker.tensorflow.runtime import running_strategy as r
before = tf.distribute.MirroredStrategy.__init__
kept, TESTED["TensorFlow"] = TESTED["TensorFlow"], ("9.9.",)
r.apply.cache_clear()
backend._apply_optional_patches()
TESTED["TensorFlow"] = kept
tf.distribute.MirroredStrategy.__init__ is before
"""
    assert set(cluster.run(cell).results.values()) == {"True"}
