"""The guard compares mirrored variables over the ranks after a plain cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.records import StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """
import numpy as np, tensorflow as tf, keras
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x[:, :1]
def drawn(model):
    return [np.random.default_rng(rank).normal(size=w.shape) for w in model.get_weights()]
def built(*layers, optimizer="adam"):
    ends = keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="last")
    model = keras.Sequential([keras.Input((4,)), ends[0], *layers, ends[1]], name="net")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model
def norm(**options):
    return keras.layers.BatchNormalization(name="norm", **options)
model, other = built(), built(optimizer="sgd")
large = keras.Sequential([keras.Input((1 << 9,)), keras.layers.Dense(1 << 10, name="wide")])
bare, count = tf.Variable([0.0, 0.0]), tf.Variable(0, trainable=False)
part = tf.Variable(
    0.0, trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
    aggregation=tf.VariableAggregation.SUM)
data = x, y
models = {"a": [built()]}
class Trainer:
    def __init__(self, model):
        self._model = model
    def step(self):
        if rank == 0:
            self._model.layers[0].bias.assign_add([1.0, 1.0, 1.0])
trainer = Trainer(built())
def spoil():
    other.set_weights(drawn(other))
@tf.function
def add(value):
    bare.assign_add(tf.cast(value, tf.float32))
def closure():
    held = built()
    return lambda: held.set_weights(drawn(held))
spoil_held = closure()
def each(model, data):
    @tf.function
    def step(batch):
        def one(rows, targets):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(rows, training=True) - targets) ** 2) / 8
            weights = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        strategy.run(one, args=batch)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(8)
    for batch in strategy.experimental_distribute_dataset(batches):
        step(batch)
"""


FIT_AND_EVALUATE = """
net = built(norm(), keras.layers.Dropout(0.5))
net.fit(x, y, batch_size=5, epochs=2, verbose=0)
net.evaluate(x, y, verbose=0)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, seed=3) as running:
        running.run(SETUP, strategy="mirrored")
        yield running


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (
            "model.set_weights(drawn(model))",
            ["`model: net/first/kernel`", "`model: net/last/bias`"],
        ),
        ("net = built()\nnet.set_weights(drawn(net))", ["`net: net/first/kernel` (line 2)"]),
        ("if rank == 1:\n    bare.assign([1.0, 2.0])", ["`bare`"]),
        ("model.optimizer.learning_rate.assign(0.1 + 0.1 * rank)", ["`model.optimizer: adam"]),
        (
            "one = models['a'][0]\none.layers[0].kernel.assign(drawn(one)[0])",
            ["`models['a'][0]: net/first/kernel`", "`one: net/first/kernel` (line 2)"],
        ),
        ("trainer.step()", ["`trainer._model: net/first/bias`"]),
        ("spoil()", ["`other: net/first/kernel`"]),
        ("add(np.random.default_rng(rank).normal(size=2))", ["`bare`"]),
        ("spoil_held()", ["`spoil_held.held: net/first/kernel`"]),
        ("large.layers[0].kernel.assign(drawn(large)[0]);", ["`large: sequential/wide/kernel`"]),
        (
            "drop = built(keras.layers.Dropout(0.5))\nout = drop(x, training=True) if rank else 0",
            ["`drop: seed_generator"],
        ),
        (
            "import asyncio\nawait asyncio.sleep(0)\nbare.assign(drawn(model)[1][:2])",
            ["`bare`"],
        ),
        pytest.param(
            "mean = built(norm())\neach(mean, (x, y))",
            ["`mean: net/norm/moving_mean`"],
            marks=pytest.mark.full,  # 10 s
        ),
    ],
)
def test_differing_variable_is_named(
    cluster: nbdist.Cluster, source: str, names: list[str]
) -> None:
    with pytest.raises(nbdist.CellError) as caught:
        cluster.run(source, strategy="mirrored", header="%%dist_run")
    error = caught.value
    assert (error.rank, error.ename) == (1, "StepError")
    for name in names:
        assert name in error.evalue
    assert "but TensorFlow treats them as mirrored" in error.evalue
    assert "Rank 1 differs from rank 0" in error.evalue
    assert "the generators of NumPy" in error.evalue
    assert "--guard 0" in error.evalue
    assert "jax" not in error.evalue


@pytest.mark.parametrize(
    "source",
    [
        "net = built()\nnet.fit(x, y, batch_size=8, epochs=2, verbose=0)",
        pytest.param(FIT_AND_EVALUATE, marks=pytest.mark.full),  # 8 s
        "net = built()\nnet.train_on_batch(x, y)\nnet.predict(x, verbose=0)",
        pytest.param(
            "net = built(norm(synchronized=True), keras.layers.Dropout(0.5))\neach(net, (x, y))",
            marks=pytest.mark.full,  # 20 s
        ),
        "net = built()\nnet.set_weights([np.random.rand(*w.shape) for w in net.get_weights()])",
        "steady = keras.layers.Normalization()\nsteady.adapt(x)",
        "seen = keras.metrics.Mean()\nseen.update_state(float(rank))",
        "own = tf.Variable(float(rank))",
        "count.assign(rank)\nown = np.full(3, rank)",
        "part.assign(float(rank))",
        "loose = tf.Variable([1.0], shape=tf.TensorShape(None))\nloose.assign([[2.0]])",
        "gen = tf.random.Generator.from_seed(1)\ndraw = gen.normal([2])",
    ],
    ids=[
        *("fit", "moving means, masks and metrics", "batches", "synchronized", "equal seeds"),
        *("adapt", "metric", "initial value", "rank-local", "per replica", "any shape"),
        "generator",
    ],
)
def test_equal_or_rank_local_values_pass(cluster: nbdist.Cluster, source: str) -> None:
    cluster.run(source, strategy="mirrored")


def test_cell_on_one_rank_may_change_variables(cluster: nbdist.Cluster) -> None:
    cluster.run("own = built()\nown.set_weights(drawn(own))", strategy="mirrored", ranks="1")
    cluster.run("mine = built()", strategy="mirrored")
    cluster.run("mine.layers[0].bias.assign([1.0, 2.0, 3.0])", ranks="1")
    cluster.run("print(own.__class__)", strategy="mirrored", ranks="1")


@pytest.mark.parametrize("ranks", ["1", None])
def test_next_cell_reports_changes_of_an_unchecked_cell(
    cluster: nbdist.Cluster, ranks: str | None
) -> None:
    """The first cell runs on one rank or fails, so no comparison follows it."""
    cluster.run("left = built()\nleft.evaluate(x, y, verbose=0);", strategy="mirrored")
    change = "left.layers[0].bias.assign([1.0 + rank, 2.0, 3.0])"
    if ranks:
        cluster.run(change, ranks=ranks)
    else:
        with pytest.raises(nbdist.CellError, match="ZeroDivisionError"):
            cluster.run(f"{change}\n1 / 0", strategy="mirrored")
    with pytest.raises(nbdist.CellError, match="`left: net/first/bias`\\."):
        cluster.run("left.evaluate(x, y, verbose=0);", strategy="mirrored")


def test_difference_is_reported_once_and_when_it_changes(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match="`old: net/first/kernel`"):
        cluster.run("old = built()\nold.set_weights(drawn(old))", strategy="mirrored")
    cluster.run("old.count_params()", strategy="mirrored")
    with pytest.raises(nbdist.CellError, match="`old: net/first/kernel`"):
        cluster.run("old.layers[0].kernel.assign_add(np.ones((4, 3)))", strategy="mirrored")


def test_guard_0_disables_the_comparison(cluster: nbdist.Cluster) -> None:
    cluster.run("loose = built()\nloose.set_weights(drawn(loose))", strategy="mirrored", guard=0)
    cluster.run("loose.count_params()", strategy="mirrored")


@pytest.mark.parametrize(
    "layer", ["norm()", pytest.param("norm(synchronized=True)", marks=pytest.mark.full)]
)
def test_moving_means_are_equal_after_steps(cluster: nbdist.Cluster, layer: str) -> None:
    """In a step cell the normalization uses the rows of all replicas."""
    cluster.run(f"stepped = built({layer}, keras.layers.Dropout(0.5))", strategy="mirrored")
    cluster.run(
        "\nrows, targets = batch\n"
        "with tf.GradientTape() as tape:\n"
        "    loss = tf.reduce_mean((stepped(rows, training=True) - targets) ** 2)\n"
        "weights = stepped.trainable_variables\n"
        "stepped.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))\n"
        "loss",
        strategy="mirrored",
        step=StepOptions(data="data", batch=8, epochs=3),
        guard=1,
    )


def test_sample_is_equal_on_host_and_device(cluster: nbdist.Cluster) -> None:
    """NumPy reads CPU buffers directly and copies only the sample from other devices."""
    source = """
from nbdist.worker.checkpoint import digest
from nbdist.worker.tensorflow import mirrored_variables
wide = large.layers[0].kernel.value.values[0]
assert 4 * wide.shape.num_elements() > digest.WHOLE_BYTES
wide.assign(np.random.default_rng(0).normal(size=wide.shape).astype("float32"))
of_host = mirrored_variables._digest(wide)
mirrored_variables._is_in_host_memory = lambda component: False
of_device = mirrored_variables._digest(wide)
wide.assign(wide + 1)
of_host == of_device, of_device != mirrored_variables._digest(wide)
"""
    assert set(cluster.run(source, strategy="mirrored").results.values()) == {"(True, True)"}
