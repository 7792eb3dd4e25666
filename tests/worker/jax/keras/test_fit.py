"""Keras 3 on JAX over real engines, compared with Keras on JAX in one process."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.telemetry.run_reader import stored_runs
from tests import clusters
from tests.keras_programs import (
    DATASETS,
    FIT,
    MODEL,
    NO_DROPOUT,
    OUTCOME,
    SINGLE,
    TENSORFLOW,
    WHOLE,
    one_process,
    references,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AFTER_FIT = ("history", "evaluate", "predict", "weights")
ONE_DEVICE = pytest.param(1, marks=pytest.mark.full, id="one_device")
BOTH = pytest.mark.parametrize(
    "cluster", [ONE_DEVICE, pytest.param(2, id="two_devices")], indirect=True
)


@pytest.fixture(scope="module", params=[2], ids=["two_devices"])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax", devices_per_host=request.param) as running:
        yield running


def outcomes(cluster: nbdist.Cluster, code: str) -> list[Any]:
    cluster.run(code)
    return [objects["outcome"] for objects in cluster.pull(["outcome"]).values()]


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare numbers, and lists and dicts of numbers, in float32."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            assert_same(ours[name], value)
    elif theirs and isinstance(theirs, list) and isinstance(theirs[0], list):
        assert len(ours) == len(theirs)
        for ours_item, theirs_item in zip(ours, theirs, strict=True):
            assert_same(ours_item, theirs_item)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def after_fit() -> dict[str, Any]:
    """Return the outcome of one process before its single batches."""
    return {name: references()["arrays"][name] for name in AFTER_FIT}


def test_keras_uses_jax_with_framework_jax(cluster: nbdist.Cluster) -> None:
    run = cluster.run("import keras\nkeras.backend.backend()")
    assert set(run.results.values()) == {"'jax'"}


@BOTH
def test_arrays_give_the_results_of_one_process(cluster: nbdist.Cluster) -> None:
    """Include shuffling, dropout, batch normalization and a last batch that does not divide.

    Single batches follow.
    """
    for outcome in outcomes(cluster, MODEL + FIT + OUTCOME + SINGLE):
        assert_same(outcome, references()["arrays"])


@pytest.mark.full
def test_scope_of_the_user_gives_the_same_results(cluster: nbdist.Cluster) -> None:
    head, model = MODEL.split("model = ", 1)
    scoped = textwrap.indent("model = " + model, "    ")
    code = (
        f"{head}import nbdist\nstrategy = nbdist.PjRTStrategy()\nwith strategy.scope():\n{scoped}"
    )
    for outcome in outcomes(cluster, code + FIT + OUTCOME):
        assert_same(outcome, after_fit())


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "generator" else pytest.mark.full) for k in DATASETS]
)
@pytest.mark.filterwarnings("ignore")
def test_shards_per_process_give_results_of_one_process(cluster: nbdist.Cluster, kind: str) -> None:
    """With 961 samples, one rank has one sample more than the other."""
    code = NO_DROPOUT + textwrap.dedent(DATASETS[kind])
    code += "dataset = strategy.distribute_datasets_from_function(own)\n"
    code += FIT.replace("images, labels, batch_size=96", "dataset", 1)
    code += OUTCOME.replace(
        "model.evaluate(images, labels, batch_size=96", "model.evaluate(dataset"
    )
    for outcome in outcomes(cluster, code):
        assert_same(outcome, references()["without dropout"])


@pytest.mark.parametrize(
    "define",
    [
        TENSORFLOW,
        pytest.param(  # test_strategy.py distributes such data
            WHOLE + "data = strategy.experimental_distribute_dataset(batches)\n",
            marks=pytest.mark.full,
        ),
    ],
    ids=["tf.data", "experimental_distribute_dataset"],
)
def test_global_batches_give_results_of_one_process(cluster: nbdist.Cluster, define: str) -> None:
    fit = FIT.replace("images, labels, batch_size=96", "data, shuffle=False", 1)
    for outcome in outcomes(cluster, NO_DROPOUT + define + fit + OUTCOME):
        assert_same(outcome, references()["without dropout"])


MAPPED = """
import tensorflow as tf
calls = []
def count(x):
    calls.append(1)
    return x
def counted(x, y):
    return tf.ensure_shape(tf.numpy_function(count, [x], tf.float32, stateful=False), [64]), y
data = tf.data.Dataset.from_tensor_slices((images, labels)).map(counted).batch(96)
"""


def test_a_rank_maps_its_own_samples_of_a_dataset(cluster: nbdist.Cluster) -> None:
    """It also maps the first batch of each pass, which ranks compare, and the last one.

    Keras builds the model with the first batch of a further pass.
    """
    fit = FIT.replace("images, labels, batch_size=96", "data", 1)
    outcome = OUTCOME.replace("images, labels, batch_size=96", "data", 1)
    for found in outcomes(cluster, NO_DROPOUT + MAPPED + fit + outcome):
        assert_same(found, references()["without dropout"])
    passes = 3 + 1
    for objects in cluster.pull(["calls"]).values():
        own = passes * (960 // 2 + 1 + 96)
        assert own <= len(objects["calls"]) < own + 3 * 96 < 0.7 * passes * 961
    (run, *_) = stored_runs(cluster.settings.runs_path)
    assert "each worker maps its own samples only" in run.state().split


def test_ranks_with_other_samples_below_a_map_are_refused(cluster: nbdist.Cluster) -> None:
    code = NO_DROPOUT + "images = images + rank" + MAPPED + "model.fit(data, verbose=0)"
    with pytest.raises(nbdist.CellError, match="the ranks were given different data"):
        cluster.run(code)


@BOTH
def test_unseeded_model_is_the_same_on_every_rank(cluster: nbdist.Cluster) -> None:
    """Forked engines start with the same state of Python's generator."""
    unlike = "import random\nrandom.seed(rank)\nnp.random.seed(rank)"
    code = MODEL.replace("keras.utils.set_random_seed(1)", unlike) + FIT + OUTCOME
    first, second = outcomes(cluster, code)
    assert_same(second, first)


def test_different_data_on_ranks_are_refused(cluster: nbdist.Cluster) -> None:
    code = MODEL + "images = images + rank\n" + FIT
    with pytest.raises(nbdist.CellError, match="the ranks were given different data"):
        cluster.run(code)
    code = "dataset = strategy.distribute_datasets_from_function(lambda ctx: own[rank:])\n"
    with pytest.raises(nbdist.CellError, match="rank 1 has no batch"):
        cluster.run("own = [(images[:2], labels[:2])]\n" + code + "list(dataset)")
    assert set(cluster.run("1").results.values()) == {"1"}


def test_epochs_are_shown_with_the_global_loss(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cluster.run(MODEL + FIT.replace(", verbose=0", ""))
    epochs = [line for line in capsys.readouterr().out.splitlines() if "  loss" in line]
    assert [line.split()[1] for line in epochs] == ["1", "2", "3"]
    assert all(not m.own for m in run.metrics), "a rank reports a loss of its own"
    assert [m.shared["loss"] for m in run.metrics if m.rank == 0] == pytest.approx(
        references()["arrays"]["history"]["loss"], rel=1e-5
    )


TIMED = """
import keras, numpy as np, time
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.08)
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(1.6)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", steps_per_execution=4)
model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8, epochs=3, callbacks=[Slow()]);
"""


def test_step_time_excludes_callbacks_of_the_user(cluster: nbdist.Cluster) -> None:
    cluster.run(TIMED, ranks="0")
    run = stored_runs(cluster.settings.runs_path)[0]
    table = next(t for t in run.tables() if "step_s" in t.columns.measures)
    rows = run.array(table)
    np.testing.assert_array_equal(rows[:, table.columns.names.index("step")], range(4, 25, 4))
    step_s = rows[1:, table.columns.names.index("step_s")]  # the first step includes compilation
    assert (step_s > 0.015).all()
    assert (step_s < 0.3).all()


LOAD = """
import keras, numpy as np
from sklearn.datasets import load_digits
images = (load_digits().data[:961] / 16).astype("float32")
model = keras.models.load_model(PATH)
outcome = model.predict(images[:97], verbose=0).tolist()
"""


@pytest.mark.full
def test_saved_model_loads_in_a_plain_process(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    whole, weights = tmp_path / "model.keras", tmp_path / "model.weights.h5"
    code = (
        f"model.save({str(whole)!r})\nmodel.save_weights({str(weights)!r})\n"
        f"again = keras.models.load_model({str(whole)!r})\n"
        "outcome = np.asarray(model.predict(images[:97], verbose=0)).tolist()\n"
        "model.set_weights([0 * w for w in model.get_weights()])\n"
        f"model.load_weights({str(weights)!r})\n"
        "third = np.asarray(again.predict(images[:97], verbose=0)).tolist()\n"
        "second = np.asarray(model.predict(images[:97], verbose=0)).tolist()\n"
        "alike = np.allclose(outcome, second) and np.allclose(outcome, third)\n"
    )
    run = cluster.run(MODEL + FIT + code + "alike")
    assert set(run.results.values()) == {"True"}
    plain = one_process({"load": LOAD.replace("PATH", repr(str(whole)))})["load"]
    assert_same(cluster.pull(["outcome"])[1]["outcome"], plain)


@BOTH
def test_only_rank_0_writes(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    code = (
        "import pathlib\n"
        f"model.save(pathlib.Path({str(tmp_path)!r}) / f'{{rank}}.keras')\n"
        f"if rank == 0:\n    model.save(pathlib.Path({str(tmp_path)!r}) / 'alone.keras')\n"
    )
    # Each rank gives another path here, and rank 1 waits for a file that rank 0 never writes.
    setup = "from nbdist.worker.jax.keras import saving\nsaving._WAIT_S = 0.5\n"
    with pytest.raises(nbdist.CellError, match="rank 0 did not save"):
        cluster.run(MODEL + setup + code)
    assert not (tmp_path / "1.keras").exists()
    alone = str(tmp_path / "alone.keras")
    cluster.run(f"saving._WAIT_S = 600\nif rank == 0:\n    model.save({alone!r})")
    assert {path.name for path in tmp_path.iterdir()} == {"0.keras", "alone.keras"}


@pytest.mark.full  # the test above saves a model
def test_fit_writes_a_checkpoint(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    callback = f"callbacks=[keras.callbacks.ModelCheckpoint({str(tmp_path / 'm.keras')!r})]"
    run = cluster.run(
        MODEL
        + FIT.replace("verbose=0", f"verbose=0, {callback}")
        + f"kept = keras.models.load_model({str(tmp_path / 'm.keras')!r})\n"
        "all(np.allclose(a, b) for a, b in zip(kept.get_weights(), model.get_weights()))"
    )
    assert set(run.results.values()) == {"True"}


def test_scope_restores_previous_distribution(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "import keras, nbdist\n"
        "now = keras.distribution.distribution\n"
        "outer = now()\n"
        "with nbdist.PjRTStrategy().scope():\n"
        "    inner = now()\n"
        "after = now()\n"
        "seen = [outer is not None, inner is not outer, after is outer]"
    )
    assert cluster.pull(["seen"])[0]["seen"] == [True, True, True]
    assert set(cluster.run("now() is None", ranks="0").results.values()) == {"True"}


@pytest.mark.full  # `worker/tensorflow/keras/test_fit.py` trains on one rank of several
def test_single_rank_trains_alone(cluster: nbdist.Cluster) -> None:
    run = cluster.run(MODEL + FIT + OUTCOME, ranks="1")
    assert_same(cluster.pull(["outcome"], ranks="1")[1]["outcome"], after_fit())
    assert not run.results


@pytest.mark.full  # rare
def test_cleared_session_still_trains_on_all_ranks(cluster: nbdist.Cluster) -> None:
    for outcome in outcomes(
        cluster, "import keras\nkeras.utils.clear_session()\n" + MODEL + FIT + OUTCOME
    ):
        assert_same(outcome, after_fit())
    run = cluster.run("model.layers[0].kernel.value.sharding.is_fully_addressable")
    assert set(run.results.values()) == {"False"}


@pytest.mark.full  # `fit` keeps two steps in flight; `test_backend.py` has enough to deadlock
def test_many_steps_on_virtual_devices_do_not_deadlock(cluster: nbdist.Cluster) -> None:
    run = cluster.run(
        MODEL + "history = model.fit(images, labels, batch_size=8, epochs=4, verbose=0)\n"
        "len(history.history['loss'])"
    )
    assert set(run.results.values()) == {"4"}


def test_endless_dataset_uses_steps_per_epoch(cluster: nbdist.Cluster) -> None:
    code = (
        "import itertools\n"
        "def own(ctx):\n"
        "    for i in itertools.count():\n"
        "        yield images[i % 90 : i % 90 + 8], labels[i % 90 : i % 90 + 8]\n"
        "dataset = strategy.distribute_datasets_from_function(own)\n"
        "history = model.fit(dataset, epochs=2, steps_per_epoch=7, verbose=0)\n"
        "int(model.optimizer.iterations.value)"
    )
    assert set(cluster.run(MODEL + code).results.values()) == {"14"}


def test_class_weight_with_distributed_dataset_is_refused(cluster: nbdist.Cluster) -> None:
    code = "data = strategy.experimental_distribute_dataset([(images[:8], labels[:8])])\n"
    with pytest.raises(
        nbdist.CellError, match="class_weight cannot be passed with a distributed dataset"
    ):
        cluster.run(MODEL + code + "model.fit(data, class_weight={0: 2.0})")


UNDO = {
    "p.keras_trainer._distribute_data = p._distribute_data_upstream": (
        "model.train_on_batch(images[:97], labels[:97])"
    ),
    "p.keras_trainer.JAXEpochIterator._get_distributed_iterator = p._iterator_upstream": (
        "d = strategy.experimental_distribute_dataset([(images[:8], labels[:8])])\nmodel.fit(d)"
    ),
    "p.data_adapters.get_data_adapter = p._adapter_upstream": (
        "d = strategy.experimental_distribute_dataset([(images[:8], labels[:8])])\nmodel.fit(d)"
    ),
    "p.keras_trainer.JAXTrainer.make_predict_function = p._make_predict_upstream": (
        "model.predict(images[:96])"
    ),
    "p.distribution_lib.distribute_tensor = p._distribute_tensor_upstream": (
        "model.layers[0].bias.assign(np.full(16, rank))\n"
        "assert not np.asarray(model.layers[0].bias).any()"
    ),
    "p.keras_core.JaxVariable._initialize_with_initializer = p._initialize_upstream": (
        "import random, zlib\nfrom nbdist.worker.jax.runtime import processes\nrandom.seed(rank)\n"
        "layer = keras.layers.Dense(4)\nlayer.build((None, 3))\n"
        "sums = processes.agree([zlib.crc32(np.asarray(layer.kernel).tobytes())])\n"
        "assert sums[0] == sums[1]"
    ),
    "keras.utils.clear_session = p._clear_upstream": (
        "keras.utils.clear_session()\nkeras.distribution.distribution().device_mesh"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["two_devices"])
@pytest.mark.parametrize(("undo", "code"), UNDO.items())
def test_keras_fails_without_the_patch(cluster: nbdist.Cluster, undo: str, code: str) -> None:
    """If this fails, Keras has fixed the issue: remove that part of the patch."""
    cluster.run(f"{MODEL}\nfrom nbdist.worker.jax.keras import patch as p\n{undo}")
    try:
        with pytest.raises(nbdist.CellError):
            cluster.run(code)
    finally:
        cluster.run("p.apply.__wrapped__()")


@pytest.mark.full
def test_every_rank_writes_without_the_patch(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """If this fails, Keras has fixed the issue: remove `worker/jax/keras/saving.py`."""
    run = cluster.run(
        f"{MODEL}\nfrom keras.src.saving import saving_lib\nours = saving_lib.save_model\n"
        "saving_lib.save_model = ours.__wrapped__\n"
        f"model.save({str(tmp_path)!r} + f'/{{rank}}.keras')\nsaving_lib.save_model = ours"
    )
    assert not run.results
    assert len(list(tmp_path.iterdir())) == 2


def test_other_keras_version_is_not_patched(cluster: nbdist.Cluster) -> None:
    run = cluster.run(
        "import keras, nbdist\nfrom nbdist.worker.jax.keras import patch as p\n"
        "from nbdist.private_api.tested_versions import TESTED\n"
        "kept, TESTED['Keras'] = TESTED['Keras'], ('9.9.',)\np.apply.cache_clear()\n"
        "with nbdist.PjRTStrategy().scope():\n    inside = p.current()\n"
        "TESTED['Keras'] = kept\np.apply.cache_clear()\nrepr(inside)",
        ranks="0",
    )
    assert run.results == {0: "'None'"}


WITHOUT_CALL = """
import jax, keras, numpy as np
from keras import layers, ops
x = np.random.default_rng(0).normal(size=(70, 8)).astype("float32")
keras.utils.set_random_seed(1)
class Bare(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((8,)), layers.Dense(4, "tanh"), layers.Dense(8)])
    def train_step(self, state, x):
        trained, fixed, optimizer, metrics = state
        def loss_fn(trained):
            return ops.mean(ops.square(self.net.stateless_call(trained, fixed, x)[0] - x))
        loss, gradients = jax.value_and_grad(loss_fn)(trained)
        trained, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trained)
        return {"loss": loss}, (trained, fixed, optimizer, metrics)
model = Bare()
model.compile(keras.optimizers.Adam(0.01))
"""


@pytest.mark.full  # rare
def test_model_without_call_trains_if_it_is_built(cluster: nbdist.Cluster) -> None:
    code = (
        WITHOUT_CALL + "model.built = True\nhistory = model.fit(x, epochs=2, verbose=0)\n"
        "outcome = {'history': history.history,"
        " 'weights': [w.tolist() for w in model.get_weights()]}\n"
    )
    reference = one_process({"it": code})["it"]
    for ours in outcomes(cluster, code):
        assert_same(ours, reference)


def test_unbuilt_model_without_call_is_refused(cluster: nbdist.Cluster) -> None:
    message = (
        r"Bare has no call\(\), and Keras on JAX builds a model by a call: define call\(\), or set "
        "`built = True` after all its layers are built"
    )
    with pytest.raises(nbdist.CellError, match=message):
        cluster.run(WITHOUT_CALL + "model.fit(x, verbose=0)")
