"""Keras's backend: the first importing cell chooses it, and `fit` uses all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.cluster import environment
from nbdist.records import ClusterRequest, Host
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

ASKS = 'import os\nos.environ["KERAS_BACKEND"] = "{}"\n'
FIT = """
import keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.arange(128, dtype="float32").reshape(32, 4) / 128
losses = model.fit(x, x.sum(1) / 2, epochs=2, batch_size=16, verbose=0, shuffle=False)
losses = losses.history["loss"]
"""
BACKEND = "__import__('keras').backend.backend()"
IS_LOADED = "import sys\n'keras' in sys.modules"


@pytest.fixture(scope="module")
def both() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="both") as running:
        yield running


@pytest.fixture
def fresh(both: nbdist.Cluster) -> nbdist.Cluster:
    """Return workers that have not imported Keras."""
    both.restart()
    return both


def refused(cluster: nbdist.Cluster, source: str, strategy: str) -> str:
    with pytest.raises(nbdist.CellError) as caught:
        cluster.run(source, strategy=strategy)
    assert "finished" not in str(caught.value), "on any rank"
    return caught.value.evalue


def trains(cluster: nbdist.Cluster, strategy: str) -> str:
    """Train on all ranks together; check that metrics are global and weights are equal."""
    run = cluster.run(FIT + "model.get_weights()[0].ravel().tolist()", strategy=strategy)
    assert len(set(run.results.values())) == 1
    assert run.names == ("loss",)
    return run.results[0]


def test_the_first_cell_that_imports_it_decides(fresh: nbdist.Cluster) -> None:
    assert set(fresh.run("import tensorflow as tf\n" + IS_LOADED).results.values()) == {"False"}
    cell = ASKS.format("jax") + FIT + "keras.distribution.distribution() is not None"
    assert set(fresh.run(cell, strategy="pjrt").results.values()) == {"True"}
    assert set(fresh.run(BACKEND).results.values()) == {"'jax'"}


@pytest.mark.parametrize(("strategy", "backend"), [("pjrt", "jax"), ("mirrored", "tensorflow")])
def test_left_out_it_is_that_of_the_strategy(
    fresh: nbdist.Cluster, strategy: str, backend: str
) -> None:
    trains(fresh, strategy)
    assert set(fresh.run(BACKEND).results.values()) == {f"'{backend}'"}


def test_keras_of_tensorflow_is_there_without_an_import(fresh: nbdist.Cluster) -> None:
    names = "from tensorflow.keras.layers import Dense\nimport tensorflow as tf\n"
    run = fresh.run(names + "tf.keras.layers.Dense is Dense, tf.keras.backend.backend()")
    assert set(run.results.values()) == {"(True, 'tensorflow')"}


def test_another_backend_than_is_loaded_is_refused_before_the_cell_runs(
    fresh: nbdist.Cluster,
) -> None:
    trains(fresh, "mirrored")
    for asks in (
        ASKS.format("jax"),
        "import os\nos.environ.setdefault('KERAS_BACKEND', 'jax')\n",
        "import os\nos.environ.update(KERAS_BACKEND='jax')\n",
        "import os\nos.environ.update({'KERAS_BACKEND': 'jax'})\n",
        "%env KERAS_BACKEND=jax\n",
    ):
        said = refused(fresh, f"ran = True\n{asks}{FIT}", "pjrt")
        assert "KERAS_BACKEND=jax, but Keras is loaded on tensorflow" in said
        assert "%dist_restart" in said
        assert "%%dist_run --strategy pjrt" in said
    assert set(fresh.run("'ran' in globals()").results.values()) == {"False"}
    fresh.run(ASKS.format("tensorflow") + FIT, strategy="mirrored")


def test_a_backend_that_the_strategy_does_not_train_is_refused_at_the_import(
    fresh: nbdist.Cluster,
) -> None:
    said = refused(fresh, ASKS.format("jax") + FIT, "mirrored")
    assert "Keras on jax is distributed over the workers by pjrt" in said
    assert "%%dist_run --strategy pjrt" in said
    assert set(fresh.run(IS_LOADED, strategy="pjrt").results.values()) == {"False"}
    said = refused(fresh, ASKS.format("torch") + FIT, "pjrt")
    assert "Keras on torch is distributed over the workers by no strategy" in said
    fresh.run(ASKS.format("jax") + FIT, strategy="pjrt")


def test_a_fit_that_is_not_of_all_workers_is_refused(fresh: nbdist.Cluster) -> None:
    trains(fresh, "mirrored")
    said = refused(fresh, FIT, "pjrt")
    assert "`fit` would train each worker by itself: Keras is on tensorflow" in said
    assert "%%dist_run --strategy mirrored" in said
    fresh.run(FIT.replace("losses =", "pass #"), ranks="0")
    fresh.run(FIT.replace("losses =", "pass #"), ranks="1")
    said = refused(fresh, "model.fit(x, x.sum(1), verbose=0)", "mirrored")
    assert "`fit` would train each worker by itself: the model was created outside" in said
    fresh.run("model.fit(x, x.sum(1), verbose=0)", ranks="1")


def test_a_distribution_that_was_unset_is_noted(fresh: nbdist.Cluster) -> None:
    cell = FIT.replace("\nmodel =", "\nkeras.distribution.set_distribution(None)\nmodel =")
    notes = [note.text for note in fresh.run(cell, strategy="pjrt").notes]
    assert any("`fit` trains each worker by itself" in text for text in notes)


@pytest.mark.parametrize(
    ("framework", "backend", "strategy", "says"),
    [
        ("tensorflow", "jax", "mirrored", "%dist_start 2 hosts --framework jax"),
        ("jax", "tensorflow", "pjrt", "%dist_start 2 hosts --framework tensorflow"),
    ],
)
def test_where_the_other_framework_is_not_wired(
    framework: str, backend: str, strategy: str, says: str
) -> None:
    # Use a new cluster: the preloaded parent of a reused one may have imported Keras on JAX.
    with nbdist.Cluster(hosts=2, framework=framework) as cluster:
        if framework == "jax":  # TensorFlow imports Keras and tolerates a refusal
            run = cluster.run(f"{ASKS.format(backend)}import tensorflow\n{IS_LOADED}")
            assert set(run.results.values()) == {"False"}
        assert says in refused(cluster, ASKS.format(backend) + FIT, strategy)
        trains(cluster, strategy)


def test_workers_of_both_frameworks_start_without_a_choice() -> None:
    def request(*frameworks: str) -> ClusterRequest:
        return ClusterRequest(hosts=(Host(),), frameworks=frameworks)  # type: ignore[arg-type]

    assert environment.shared(request("jax"))["KERAS_BACKEND"] == "jax"
    assert environment.shared(request("tensorflow"))["KERAS_BACKEND"] == "tensorflow"
    assert "KERAS_BACKEND" not in environment.shared(request("tensorflow", "jax"))
