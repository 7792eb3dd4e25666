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

pytestmark = pytest.mark.processes

SET_BACKEND = 'import os\nos.environ["KERAS_BACKEND"] = "{}"\n'
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
def running_cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="both") as running:
        yield running


@pytest.fixture
def restarted(running_cluster: nbdist.Cluster) -> nbdist.Cluster:
    """Return workers that have not imported Keras."""
    running_cluster.restart()
    return running_cluster


def refusal(cluster: nbdist.Cluster, source: str, strategy: str) -> str:
    with pytest.raises(nbdist.CellError) as caught:
        cluster.run(source, strategy=strategy)
    assert "finished" not in str(caught.value), "a rank finished the cell"
    return caught.value.evalue


def assert_trains(cluster: nbdist.Cluster, strategy: str) -> str:
    """Train on all ranks together; check that metrics are global and weights are equal."""
    run = cluster.run(FIT + "model.get_weights()[0].ravel().tolist()", strategy=strategy)
    assert len(set(run.results.values())) == 1
    assert run.names == ("loss",)
    return run.results[0]


def test_first_importing_cell_chooses_the_backend(restarted: nbdist.Cluster) -> None:
    assert set(restarted.run("import tensorflow as tf\n" + IS_LOADED).results.values()) == {"False"}
    cell = SET_BACKEND.format("jax") + FIT + "keras.distribution.distribution() is not None"
    assert set(restarted.run(cell, strategy="pjrt").results.values()) == {"True"}
    assert set(restarted.run(BACKEND).results.values()) == {"'jax'"}


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [("pjrt", "jax"), pytest.param("mirrored", "tensorflow", marks=pytest.mark.full)],
)
def test_default_backend_follows_the_strategy(
    restarted: nbdist.Cluster, strategy: str, backend: str
) -> None:
    assert_trains(restarted, strategy)
    assert set(restarted.run(BACKEND).results.values()) == {f"'{backend}'"}


def test_keras_of_tensorflow_needs_no_import(restarted: nbdist.Cluster) -> None:
    names = "from tensorflow.keras.layers import Dense\nimport tensorflow as tf\n"
    run = restarted.run(names + "tf.keras.layers.Dense is Dense, tf.keras.backend.backend()")
    assert set(run.results.values()) == {"(True, 'tensorflow')"}


def test_other_backend_is_refused_before_the_cell_runs(
    restarted: nbdist.Cluster,
) -> None:
    assert_trains(restarted, "mirrored")
    for choice in (
        SET_BACKEND.format("jax"),
        "import os\nos.environ.setdefault('KERAS_BACKEND', 'jax')\n",
        "import os\nos.environ.update(KERAS_BACKEND='jax')\n",
        "import os\nos.environ.update({'KERAS_BACKEND': 'jax'})\n",
        "%env KERAS_BACKEND=jax\n",
    ):
        message = refusal(restarted, f"ran = True\n{choice}{FIT}", "pjrt")
        assert "KERAS_BACKEND=jax, but Keras is loaded on tensorflow" in message
        assert "%dist_restart" in message
        assert "%%dist_run --strategy pjrt" in message
    assert set(restarted.run("'ran' in globals()").results.values()) == {"False"}
    restarted.run(SET_BACKEND.format("tensorflow") + FIT, strategy="mirrored")


def test_backend_without_strategy_is_refused_at_import(
    restarted: nbdist.Cluster,
) -> None:
    message = refusal(restarted, SET_BACKEND.format("jax") + FIT, "mirrored")
    assert "Keras on jax is distributed over the workers by pjrt" in message
    assert "%%dist_run --strategy pjrt" in message
    assert set(restarted.run(IS_LOADED, strategy="pjrt").results.values()) == {"False"}
    message = refusal(restarted, SET_BACKEND.format("torch") + FIT, "pjrt")
    assert "Keras on torch is distributed over the workers by no strategy" in message
    restarted.run(SET_BACKEND.format("jax") + FIT, strategy="pjrt")


def test_fit_that_would_train_workers_alone_is_refused(restarted: nbdist.Cluster) -> None:
    assert_trains(restarted, "mirrored")
    message = refusal(restarted, FIT, "pjrt")
    assert "`fit` would train each worker by itself: Keras is on tensorflow" in message
    assert "%%dist_run --strategy mirrored" in message
    restarted.run(FIT.replace("losses =", "pass #"), ranks="0")
    restarted.run(FIT.replace("losses =", "pass #"), ranks="1")
    message = refusal(restarted, "model.fit(x, x.sum(1), verbose=0)", "mirrored")
    assert "`fit` would train each worker by itself: the model was created outside" in message
    restarted.run("model.fit(x, x.sum(1), verbose=0)", ranks="1")


def test_unset_distribution_is_noted(restarted: nbdist.Cluster) -> None:
    cell = FIT.replace("\nmodel =", "\nkeras.distribution.set_distribution(None)\nmodel =")
    notes = [note.text for note in restarted.run(cell, strategy="pjrt").notes]
    assert any("`fit` trains each worker by itself" in text for text in notes)


@pytest.mark.parametrize(
    ("framework", "backend", "strategy", "message"),
    [
        pytest.param(
            *("tensorflow", "jax", "mirrored", "%dist_start 2 hosts --framework jax"),
            marks=pytest.mark.full,
        ),
        ("jax", "tensorflow", "pjrt", "%dist_start 2 hosts --framework tensorflow"),
    ],
)
@pytest.mark.full  # magics/test_dist.py names a missing framework
def test_missing_framework_is_named(
    framework: str, backend: str, strategy: str, message: str
) -> None:
    # Use a new cluster: the preloaded parent of a reused one may have imported Keras on JAX.
    with nbdist.Cluster(hosts=2, framework=framework) as cluster:
        if framework == "jax":  # TensorFlow imports Keras and tolerates a refusal
            run = cluster.run(f"{SET_BACKEND.format(backend)}import tensorflow\n{IS_LOADED}")
            assert set(run.results.values()) == {"False"}
        assert message in refusal(cluster, SET_BACKEND.format(backend) + FIT, strategy)
        assert_trains(cluster, strategy)


def test_workers_of_both_frameworks_start_without_backend() -> None:
    def request(*frameworks: str) -> ClusterRequest:
        return ClusterRequest(hosts=(Host(),), frameworks=frameworks)  # type: ignore[arg-type]

    assert environment.shared(request("jax"))["KERAS_BACKEND"] == "jax"
    assert environment.shared(request("tensorflow"))["KERAS_BACKEND"] == "tensorflow"
    assert "KERAS_BACKEND" not in environment.shared(request("tensorflow", "jax"))
