"""Keras's `fit`, `evaluate` and `predict` on workers, compared with one process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs

import nbdist
from nbdist.records import Saving
from tests import clusters
from tests.fit_programs import FITS, PLAIN, START
from tests.references import plainly
from tests.runs import latest
from tests.whole_batch_programs import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet

SIZES = [2, pytest.param(4, marks=pytest.mark.full)]
REPEATED = {
    "a GAN without call()",
    "a loss that a layer adds",
    "a model of the batch's mean within a model",
    "a model that takes its shape from the data",
    "a session that is cleared",
    "a shuffled data set",
    "a subclassed model",
    "a term that comes in the second epoch",
    "a train_step compiled with tf.function",
    "drop_remainder and repeat",
    "embeddings of positions",
    "embeddings, a mask and a recurrent layer",
    "float64",
    "global_clipnorm and class weights",  # test_fit_property.py has both
    "maps of samples",  # test_each_worker_maps_its_own_samples runs it
    "rows that are compared with each other",
    "several outputs",
    "triplets, of which call() cannot take the first alone",
    "a mask that begins in a later batch",  # the test of late falls back runs it
}
"""Programs whose parts are also those of other programs; `make test-full` runs them."""

TOLERANCES = {"float64": 1e-9, "float16": 1e-2}
"""Tolerances that differ from the tolerance of float32."""


@pytest.fixture(scope="module", params=SIZES)
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param, framework="tensorflow") as running:
        yield running


def cases(names: Iterable[str]) -> list[ParameterSet]:
    return [
        pytest.param(name, marks=pytest.mark.full if name in REPEATED else ()) for name in names
    ]


@cache
def reference(name: str) -> Any:
    code = FITS[name] if name in FITS else WHOLE[name][1]
    return plainly({name: code}, "tensorflow", "keras")[name]


def assert_close(ours: Any, reference: Any, tolerance: float, path: str = "") -> None:
    """Compare values relative to the largest number of an array."""
    if isinstance(reference, dict):
        assert ours.keys() == reference.keys(), path
        for name, part in reference.items():
            assert_close(ours[name], part, tolerance, f"{path}/{name}")
    elif path.endswith("/weights"):
        for n, (own, one) in enumerate(zip(ours, reference, strict=True)):
            assert_close(own, one, tolerance, f"{path}/{n}")
    else:
        allowed = tolerance * max(1e-2, float(np.abs(np.asarray(reference)).max()))
        np.testing.assert_allclose(ours, reference, rtol=0, atol=allowed, err_msg=path)


def outcomes(cluster: nbdist.Cluster, code: str) -> list[Any]:
    cluster.run(code)
    return [objects["outcome"] for objects in cluster.pull(["outcome"]).values()]


@pytest.mark.parametrize("name", cases(FITS))
def test_fit_gives_the_results_of_one_process(cluster: nbdist.Cluster, name: str) -> None:
    run = cluster.run(FITS[name])
    assert not any("computes all rows" in note.text for note in run.notes)
    for objects in cluster.pull(["outcome"]).values():
        assert_close(objects["outcome"], reference(name), TOLERANCES.get(name, 1e-5))


@pytest.mark.full  # another size
@pytest.mark.parametrize(
    "name",
    [
        "everything",
        "accumulated gradients and an average of weights",
    ],
)
def test_one_worker_gives_the_results_of_one_process(name: str) -> None:
    with clusters.cluster(hosts=1, framework="tensorflow") as one:
        (outcome,) = outcomes(one, FITS[name])
    assert_close(outcome, reference(name), 1e-5)


def test_one_rank_of_several_trains_alone(cluster: nbdist.Cluster) -> None:
    name = "accumulated gradients and an average of weights"
    cluster.run(FITS[name], ranks="0")
    (objects,) = cluster.pull(["outcome"], ranks="0").values()
    assert_close(objects["outcome"], reference(name), 1e-5)


@pytest.mark.parametrize("name", cases(WHOLE))
def test_step_that_cannot_be_split_runs_on_all_workers(cluster: nbdist.Cluster, name: str) -> None:
    reason, code = WHOLE[name]
    run = cluster.run(code)
    assert any(
        reason in note.text and "every worker computes all rows" in note.text for note in run.notes
    )
    for objects in cluster.pull(["outcome"]).values():
        assert_close(objects["outcome"], reference(name), 1e-5)


def test_cell_that_fell_back_late_computes_all_rows_next_time(
    cluster: nbdist.Cluster,
) -> None:
    name = "a mask that begins in a later batch"
    reason, code = WHOLE[name]
    code += "# a cell of its own\n"
    for text in (reason, "needed all rows in an earlier run of this cell"):
        notes = [note.text for note in cluster.run(code).notes]
        found = cluster.pull(["outcome"]).values()
        assert [text in note for note in notes if "computes all rows" in note] == [True] * len(
            found
        )
        for objects in found:
            assert_close(objects["outcome"], reference(name), 1e-5)


SUMS = """
import keras, tensorflow as tf
class Product(keras.metrics.Metric):
    def __init__(self):
        super().__init__()
        self.product = self.add_weight(name="product", initializer="ones", dtype="int32")
    def update_state(self, numbers):
        self.product.assign(self.product * tf.reduce_prod(numbers))
    def result(self):
        return self.product
metric = Product()
outcome = [int(metric.result())]
metric.update_state([3, 5])
outcome += [int(metric.result())]
metric.product.assign(7)
outcome += [int(metric.result())]
"""


def test_metrics_in_a_plain_cell_are_global(cluster: nbdist.Cluster) -> None:
    for ours in outcomes(cluster, SUMS):
        assert ours == [1, 15, 7]


UNSEEDED = START.replace(
    "keras.utils.set_random_seed(3)",
    "from nbdist.worker.remote import setup\nfrom nbdist.worker.runtime import context\n"
    "setup.seed(context.current().identity.seed)",
)
"""Program with the initial seed of the workers, because other tests set seeds."""

ONES = """
model = keras.Sequential([
    keras.Input((512,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(keras.optimizers.SGD(0.5), loss=lambda y, p: p)
"""
SEEN = """
seen = model.get_weights()[0][:, 0] / (-0.5 / 32)
outcome = [seen.min(), seen.max()]
"""
SHUFFLED = {
    "arrays": "model.fit(np.eye(512, dtype='float32'), np.zeros((512, 1)), verbose=0)",
    "batches": (
        "model.fit(np.eye(512, dtype='float32'), np.zeros((512, 1)), shuffle='batch', verbose=0)"
    ),
    "a data set": (
        "data = tf.data.Dataset.from_tensor_slices((np.eye(512, dtype='float32'),"
        " np.zeros((512, 1), 'float32')))\n"
        "model.fit(data.shuffle(512).batch(32), verbose=0)"
    ),
}


@pytest.mark.parametrize(
    "data", [pytest.param(d, marks=() if d == "arrays" else pytest.mark.full) for d in SHUFFLED]
)
def test_unseeded_shuffle_uses_each_sample_once(cluster: nbdist.Cluster, data: str) -> None:
    """Check that a draw on one rank does not shift the draws of the others."""
    drawn = "np.random.rand(rank + 1)\nif rank == 0:\n    tf.random.normal([1])\n"
    for ours in outcomes(cluster, UNSEEDED + ONES + drawn + SHUFFLED[data] + SEEN + PLAIN):
        assert ours == [1, 1]


ORDERS = """
model = keras.Sequential([
    keras.Input((64,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
optimizer.build(model.trainable_variables)
model.compile(optimizer, loss=lambda y, p: p)
orders = []
class Order(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        orders.append(self.model.get_weights()[0][:, 0].argsort().tolist())
        self.model.set_weights([np.zeros((64, 1))])
        optimizer.variables[-1].assign(np.zeros((64, 1)))
model.fit(np.eye(64, dtype="float32"), np.zeros((64, 1)), batch_size=4, epochs=2, verbose=0,
          callbacks=[Order()])
orders[0] != orders[1]
"""
"""Program that derives the order of samples: momentum shows when a sample was used."""


@pytest.mark.parametrize(
    ("start", "differ"), [(UNSEEDED, True), pytest.param(START, False, marks=pytest.mark.full)]
)
def test_unseeded_epochs_have_different_orders(
    cluster: nbdist.Cluster, start: str, differ: bool
) -> None:
    """With a seed of the user, each epoch repeats Keras's order."""
    run = cluster.run(start + ORDERS)
    assert set(run.results.values()) == {str(differ)}
    first, *others = (objects["orders"] for objects in cluster.pull(["orders"]).values())
    assert all(orders == first for orders in others)


ORDERS_WITH_NESTED_FIT = ORDERS.replace(
    "        orders.append",
    "        if nested:\n"
    "            inner.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)\n"
    "        orders.append",
)


@pytest.mark.full  # rare
def test_fit_in_a_callback_keeps_order_of_outer_fit(cluster: nbdist.Cluster) -> None:
    orders = []
    for nested in (False, True):
        cluster.run(UNSEEDED + f"nested = {nested}\ninner = keras.Sequential([layers.Dense(1)])\n")
        cluster.run("inner.compile('sgd', 'mse')" + ORDERS_WITH_NESTED_FIT)
        orders.append(cluster.pull(["orders"])[0]["orders"])
    assert orders[0] == orders[1]


def test_losses_in_a_plain_cell_equal_one_device(cluster: nbdist.Cluster) -> None:
    run = cluster.run("import keras\nfloat(keras.losses.MeanSquaredError()([[1.]], [[0.]]))")
    assert set(run.results.values()) == {"1.0"}


OTHER_INPUTS = {
    "`x`": "x[0] += rank\nmodel.fit(x, y, verbose=0)",
    "`y`": "model.fit(x, np.random.default_rng(rank).normal(size=(71, 1)), verbose=0)",
    "`sample_weight`": "model.evaluate(x, y, sample_weight=np.ones(71) + rank, verbose=0)",
    "number of batches": (
        "data = tf.data.Dataset.from_tensor_slices(x).batch(16)\n"
        "model.predict(data.take(2 + rank), verbose=0)"
    ),
    "the batch": "model.train_on_batch(x[:8] + rank, y[:8])",
    "shuffle": (
        "if rank == 0:\n    tf.random.normal([1])  # after a seed of the user's\n"
        "data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(71).batch(16)\n"
        "model.fit(data, verbose=0)"
    ),
    "first batch": (
        "data = tf.data.Dataset.from_tensor_slices((x + rank, y)).batch(16)\n"
        "model.fit(data, verbose=0)"
    ),
}


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(
            name, marks=() if name in ("`x`", "number of batches", "shuffle") else pytest.mark.full
        )
        for name in OTHER_INPUTS
    ],
)
def test_inputs_that_differ_between_ranks_are_refused(cluster: nbdist.Cluster, named: str) -> None:
    compiled = "model = dense()\nmodel.compile('sgd', 'mse')\n"
    with pytest.raises(nbdist.CellError, match="is not the same on all ranks") as refused:
        cluster.run(START + compiled + OTHER_INPUTS[named])
    assert named in str(refused.value)
    assert "np.random.default_rng(0)" in str(refused.value)


def test_inputs_augmented_at_random_may_differ(cluster: nbdist.Cluster) -> None:
    """Parallel calls of a random function draw differently on each rank. Labels are equal."""
    found = outcomes(
        cluster,
        START + "model = dense()\nmodel.compile('sgd', 'mse')\n"
        "data = tf.data.Dataset.from_tensor_slices((x, y)).map(\n"
        "    lambda a, b: (a + tf.random.normal(tf.shape(a), seed=5 + rank), b)).batch(16)\n"
        "seen = next(iter(data))[0].numpy().tolist()\n"
        "history = model.fit(data, verbose=0, epochs=2).history\n"
        "outcome = {'seen': seen, 'history': history,\n"
        "           'weights': [w.tolist() for w in model.get_weights()]}",
    )
    first, *rest = found
    assert np.isfinite(first["history"]["loss"]).all()
    for other in rest:
        assert other["seen"] != first["seen"]
        assert_close(
            {n: other[n] for n in ("history", "weights")},
            {n: first[n] for n in ("history", "weights")},
            1e-9,
        )


def test_each_worker_maps_its_own_samples(cluster: nbdist.Cluster) -> None:
    """The last of five batches has 7 rows, and the cached validation data 33, 33 and 5."""
    cluster.run(FITS["maps of samples"])
    found = cluster.pull(["calls", "fitted", "outcome"]).values()
    for objects in found:
        assert_close(objects["outcome"], reference("maps of samples"), 1e-5)
    ranks = len(found)

    def mapped(*sizes: int) -> list[int]:
        return [
            sum(size // ranks + (rank < size % ranks) for size in sizes) for rank in range(ranks)
        ]

    compared = 4 * (3 + 1)  # four samples in each pass
    fitted = mapped(*[16, 16, 16, 16, 7] * 3, 33, 33, 5)
    assert [objects["fitted"] for objects in found] == [compared + own for own in fitted]
    predicted = [len(objects["calls"]) - objects["fitted"] for objects in found]
    least, most = mapped(33, 33, 5, 16, 16, 16), mapped(33, 33, 5, 16, 16, 16, 16, 7)
    for made, low, high in zip(predicted, least, most, strict=True):
        assert 8 + low <= made <= 8 + high  # `prefetch` may map batches after `steps`
    assert latest(cluster).state().split == "by element: each worker maps its own samples only"


@pytest.mark.full  # rare
def test_model_of_the_user_reads_whole_batches(cluster: nbdist.Cluster) -> None:
    own = "class Own(keras.Sequential):\n    pass\nmodel = Own([layers.Dense(1)])\n"
    code = FITS["maps of samples"].replace("model = dense", f"{own}dense")
    cluster.run(code)
    calls = [len(objects["calls"]) for objects in cluster.pull(["calls"]).values()]
    assert calls == [3 * 71 + 71] * len(calls)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("slices((x, y))", "slices((x + rank, y))"),
        pytest.param("* 2 + 1", "* 2 + rank", marks=pytest.mark.full),
    ],
)
def test_maps_of_different_data_are_refused(cluster: nbdist.Cluster, one: str, other: str) -> None:
    code = FITS["maps of samples"].replace(one, other)
    with pytest.raises(nbdist.CellError, match="the first batch is not the same on all ranks"):
        cluster.run(code)


OWN_RECORDS = """
import os, tempfile
folder = tempfile.mkdtemp()  # another one on each rank
path = os.path.join(folder, "rows.tfrecord")
with tf.io.TFRecordWriter(path) as writer:
    for row, target in zip(x, y):
        noise = f"{folder} " if parsed else ""
        text = " ".join(str(float(value)) for value in [*row, *target])
        writer.write(f"{noise};{text}")

def read(record):
    values = tf.strings.to_number(tf.strings.split(tf.strings.split(record, ";")[1]))
    return tf.reshape(values[:8], [8]), tf.reshape(values[8:], [1])

data = tf.data.TFRecordDataset(path).shuffle(71, seed=4).map(read).batch(16)
model = dense()
model.compile("sgd", "mse")
history = model.fit(data, epochs=2, verbose=0).history
outcome = {"loss": history["loss"], "weights": [w.tolist() for w in model.get_weights()]}
"""


@pytest.mark.full  # test_map_pushdown.py has such samples
def test_samples_may_have_another_form_on_each_rank_below_the_maps(cluster: nbdist.Cluster) -> None:
    own, equal = (
        outcomes(cluster, f"{START}parsed = {parsed}\n{OWN_RECORDS}") for parsed in (True, False)
    )
    assert own == equal
    assert latest(cluster).state().split == "by element: each worker maps its own samples only"


RESUMED_MAPS = """
class Breaks(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        seen.append(batch)
        if breaks and len(seen) == 8:
            raise ValueError("in the second epoch")
"""


@pytest.mark.full  # the next test resumes too
def test_resumed_run_maps_the_samples_after_its_checkpoint(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    code = FITS["maps of samples"].replace("fit(data,", "fit(data, callbacks=[Breaks()],")
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=1)
    cluster.run(START + RESUMED_MAPS + "seen, breaks = [], True")
    with pytest.raises(nbdist.CellError, match="in the second epoch"):
        cluster.run(code, saving=saving)
    cluster.run("seen, breaks = [], False")
    cluster.run(code, saving=structs.replace(saving, resume=True))
    for objects in cluster.pull(["outcome", "seen"]).values():
        assert objects["seen"] == [1, 2, 3, 4, 0, 1, 2, 3, 4]
        expected = reference("maps of samples")["weights"]
        assert_close({"weights": objects["outcome"]["weights"]}, {"weights": expected}, 1e-5)


CANCELLED_FIT = """
class Breaks(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if breaks and context.current().progress.step == 22:
            raise ValueError("in the second epoch")
model.fit(np.eye(64, dtype="float32"), np.zeros((64, 1)), batch_size=4, epochs=3, verbose=0,
          callbacks=[Breaks()])
"""


def test_resumed_run_keeps_the_order_of_samples(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """Test a shuffle without a seed. The checkpoint contains its order."""
    cluster.run(UNSEEDED + "breaks = True\n" + ONES.replace("512", "64"))
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=1)
    with pytest.raises(nbdist.CellError, match="in the second epoch"):
        cluster.run(CANCELLED_FIT, saving=saving)
    cluster.run("breaks = False")
    cluster.run(CANCELLED_FIT, saving=structs.replace(saving, resume=True))
    for seen in outcomes(cluster, SEEN.replace("32", "4") + PLAIN):
        assert seen == [3, 3]


def test_own_data_form_global_batches(cluster: nbdist.Cluster) -> None:
    own = (
        START
        + "model = dense()\nmodel.compile('sgd', 'mse', metrics=['mae'])\n"
        + "n = world_size\nx, y = x[:64], y[:64]\n"
    )
    fit = "history = model.fit({0}, batch_size={1}, epochs=2, shuffle=False, verbose=0)\n"
    fit += "outcome = [*history.history['mae'], *model.evaluate({0}, verbose=0)]\n"
    cluster.run(own + fit.format("x[rank::n], y[rank::n]", "32 // n") + PLAIN, own_data=True)
    together = [objects["outcome"] for objects in cluster.pull(["outcome"]).values()]
    for one in outcomes(cluster, own + fit.format("x, y", 32) + PLAIN):
        for ours in together:
            np.testing.assert_allclose(ours, one, rtol=1e-5)


def test_own_data_of_different_sizes_are_refused(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match="--own-data: ranks have batches of 16, 17"):
        cluster.run(
            START + "model = dense()\nmodel.compile('sgd', 'mse')\n"
            "model.fit(x[:16 + rank], y[:16 + rank], verbose=0)",
            own_data=True,
        )


@pytest.mark.full  # the next test distributes one
def test_dataset_distributed_by_the_user_is_accepted(cluster: nbdist.Cluster) -> None:
    """On 2 replicas, the parts of the last batch have 4 and 3 rows. Each row has equal weight."""
    compiled = START + "model = dense()\nmodel.compile('sgd', 'mse', metrics=['mae'])\n"
    fit = (
        "data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)\n"
        "history = model.fit(DATA, epochs=2, verbose=0)\n"
        "outcome = [history.history['loss'], history.history['mae']]\n" + PLAIN
    )
    distributed = fit.replace("DATA", "strategy.experimental_distribute_dataset(data)")
    each = outcomes(cluster, compiled + distributed)
    one, *_ = outcomes(cluster, compiled + fit.replace("DATA", "data"))
    for ours in each:
        np.testing.assert_allclose(ours, one, rtol=1e-5)


@pytest.mark.parametrize("drops", ["True", pytest.param("False", marks=pytest.mark.full)])
def test_rows_distributed_by_the_user_draw_separately(cluster: nbdist.Cluster, drops: str) -> None:
    """All rows are equal, so their order does not matter."""
    fit = """
keras.utils.set_random_seed(5)
model = keras.Sequential([
    keras.Input((64,)), layers.Dropout(0.5), layers.Dense(1, kernel_initializer="ones")])
model.compile("sgd", "mae")
data = tf.data.Dataset.from_tensor_slices((np.ones((16, 64), "float32"), np.zeros((16, 1))))
data = data.batch(16, drop_remainder=DROPS)
outcome = model.fit(DATA, verbose=0).history["loss"]
"""
    code = START + fit.replace("DROPS", drops)
    distributed = code.replace("DATA", "strategy.experimental_distribute_dataset(data)")
    ours, one = (outcomes(cluster, c)[0] for c in (distributed, code.replace("DATA", "data")))
    np.testing.assert_allclose(ours, one, rtol=1e-6)


def test_xla_compilation_on_several_cpus_is_refused(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match=r"jit_compile=True: .* remove it from `compile`"):
        cluster.run(
            START + "model = dense()\nmodel.compile('sgd', 'mse', jit_compile=True)\n"
            "model.fit(x, y, verbose=0)"
        )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("model.fit(x, y, verbose=0)", "train"),
        pytest.param("model.evaluate(x, y, verbose=0)", "test", marks=pytest.mark.full),
        pytest.param("model.predict(x, verbose=0)", "predict", marks=pytest.mark.full),
    ],
)
def test_model_without_call_is_refused_for_a_step_that_calls_it(
    cluster: nbdist.Cluster, code: str, kind: str
) -> None:
    message = (
        rf"Bare has no call\(\), but Keras's {kind}_step calls it: define call\(\) or {kind}_st"
    )
    with pytest.raises(nbdist.CellError, match=message):
        cluster.run(
            START + "class Bare(keras.Model):\n    pass\nmodel = Bare()\n"
            f"model.dense = layers.Dense(1)\nmodel.compile('sgd', 'mse')\n{code}"
        )
