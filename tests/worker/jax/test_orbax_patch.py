"""Orbax in cells that were written for one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import nbdist
from tests import clusters
from tests.clusters import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETUP = """
import pathlib, tempfile
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
state = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(0), "step": 3}
"""
SAVE = """
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", {"w": state["w"], "step": state["step"]})
    checkpointer.wait_until_finished()
    template = {"w": jnp.zeros((2, 3)), "step": 0}
    restored = checkpointer.restore(folder / "state", template)
outcome = [np.asarray(restored["w"]).tolist(), int(restored["step"])]
"""
MANAGER = """
options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager(folder / "run", options=options) as manager:
    for step in range(3):
        manager.save(step, args=ocp.args.StandardSave({"w": state["w"] + step}))
    manager.wait_until_finished()
    last = manager.restore(2, args=ocp.args.StandardRestore({"w": jnp.zeros((2, 3))}))
outcome = [np.asarray(last["w"]).tolist(), manager.all_steps()]
"""
EXPECTED = np.arange(6.0).reshape(2, 3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        running.run(SETUP)
        yield running


@pytest.fixture(params=[pytest.param("own", marks=pytest.mark.full), "common"])
def folder(request: pytest.FixtureRequest, cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """Give each rank a folder: one of its own, or the same."""
    path = "tempfile.mkdtemp()" if request.param == "own" else repr(str(tmp_path))
    cluster.run(f"folder = pathlib.Path({path})")


@pytest.mark.usefixtures("folder")
def test_arrays_of_each_process_are_saved_and_restored(cluster: nbdist.Cluster) -> None:
    cluster.run(SAVE)
    for objects in cluster.pull(["outcome"]).values():
        assert objects["outcome"] == [EXPECTED.tolist(), 3]
    beside = "restored['w'] + jax.device_put(jnp.ones((2, 3)), jax.NamedSharding(mesh, jax.P()))"
    assert evaluate(cluster, f"float(({beside}).sum())") == "21.0"


@pytest.mark.usefixtures("folder")
def test_manager_keeps_the_newest_checkpoints(cluster: nbdist.Cluster) -> None:
    cluster.run(MANAGER)
    for objects in cluster.pull(["outcome"]).values():
        assert objects["outcome"] == [(EXPECTED + 2).tolist(), [1, 2]]


def test_sharded_arrays_are_saved_and_restored(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "rows = jax.NamedSharding(mesh, jax.P('data'))\n"
        "split = jax.device_put(np.arange(6.0).reshape(2, 3), rows)"
    )
    cluster.run(
        "with ocp.StandardCheckpointer() as checkpointer:\n"
        "    checkpointer.save(folder / 'split', {'w': split})\n"
        "    checkpointer.wait_until_finished()\n"
        "    restored = checkpointer.restore(folder / 'split', {'w': jnp.zeros_like(split)})"
    )
    assert evaluate(cluster, "restored['w'].sharding == rows") == "True"
    for objects in cluster.pull(["restored"]).values():
        np.testing.assert_array_equal(objects["restored"]["w"], EXPECTED)


@pytest.mark.full
def test_orbax_still_refuses_arrays_of_one_process(cluster: nbdist.Cluster) -> None:
    """If this test fails, Orbax accepts them itself, and a part of the patch can be removed."""
    cluster.run("alone = jnp.ones(3)")
    cluster.run(
        "from nbdist.worker.jax import orbax_patch\n"
        "from orbax.checkpoint._src.serialization import types\n"
        "info = types.ParamInfo(name='w', parent_dir=pathlib.Path('/'))\n"
        "handler = ocp.type_handlers.ArrayHandler()\n"
        "serialize = orbax_patch._serialize_upstream(handler, [alone], [info])"
    )
    with pytest.raises(nbdist.CellError, match="Cannot serialize host local"):
        cluster.run("await serialize")
