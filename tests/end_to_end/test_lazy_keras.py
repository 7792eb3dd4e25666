"""Late import of Keras on JAX: same behaviour as an import at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("own_folders")

IS_LOADED = "import sys\n'keras' in sys.modules"
FIT = """
import numpy as np
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.arange(256, dtype="float32").reshape(64, 4) / 256
model.fit(x, x.sum(1), epochs=2, batch_size=16, verbose=0, shuffle=False).history["loss"]
"""
MESH_SIZES = "{v.value.sharding.mesh.size for v in model.variables}"


@pytest.fixture
def cluster() -> Iterator[nbdist.Cluster]:
    with nbdist.Cluster(hosts=2, framework="jax") as cluster:
        yield cluster


def test_keras_is_loaded_when_a_cell_uses_it(cluster: nbdist.Cluster) -> None:
    assert cluster.run(IS_LOADED).results == {0: "False", 1: "False"}
    run = cluster.run(f"import keras\n{FIT}", strategy="pjrt")
    assert len(run.loss) == 2, "the run reports the epochs of the fit"
    assert run.results[0] == run.results[1]
    mesh_sizes = cluster.run(MESH_SIZES, strategy="pjrt").results
    assert mesh_sizes == dict.fromkeys((0, 1), "{2}")
    fork_server = cluster._worker_group.engines.fleet.home

    def restart_loads_keras() -> bool:
        cluster.restart()
        return cluster.run(IS_LOADED).results == {0: "True", 1: "True"}

    assert repeat_until(restart_loads_keras, 30), (
        "workers forked after the import have Keras loaded"
    )
    assert fork_server.runs()
    rerun = cluster.run(f"import keras\n{FIT}", strategy="pjrt")
    assert rerun.results == run.results


@pytest.mark.full
def test_import_on_one_rank_and_within_a_scope(cluster: nbdist.Cluster) -> None:
    """The import waits for no other rank, and an open scope applies to Keras."""
    cluster.run("if rank == 1: import keras", strategy="pjrt")
    cell = "with strategy.scope():\n    import keras\n" + FIT.replace("\n", "\n    ")
    assert len(cluster.run(cell + "\nNone", strategy="pjrt").loss) == 2
    mesh_sizes = cluster.run(MESH_SIZES, strategy="pjrt").results
    assert mesh_sizes == dict.fromkeys((0, 1), "{2}")
    expression = "__import__('keras').distribution.distribution()"
    assert cluster._worker_group.engines.apply(eval, expression) == [None, None], (
        "no scope stays open"
    )
