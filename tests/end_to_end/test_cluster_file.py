"""State file that a cluster writes for the Jupyter server and all its pages."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import msgspec

from nbdist.cluster.fleet import Fleet
from nbdist.records import ClusterState

if TYPE_CHECKING:
    import pytest

    import nbdist


def test_state_file_describes_an_idle_cluster(cluster: nbdist.Cluster) -> None:
    path = cluster._folder / "cluster.json"
    state = msgspec.json.decode(path.read_bytes(), type=ClusterState)
    assert (state.id, state.frameworks, state.run) == (path.parent.name, ("jax",), "")
    assert [worker.state for worker in state.workers] == ["idle"] * 3
    assert all(worker.memory_bytes > 1e7 for worker in state.workers)
    assert json.loads(path.read_text())["writer"]["pid"] == os.getpid()


def test_state_file_shows_busy_ranks_during_a_cell(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, measure = [], Fleet.poll
    monkeypatch.setattr(Fleet, "poll", lambda self: measured.append(1) or measure(self))
    path = str(cluster._folder / "cluster.json")
    cell = (
        f"import json, time\ndef state(): return json.load(open({path!r}))\n"
        "for _ in range(1000):\n    if state()['run']: break\n    time.sleep(0.01)\n"
        "json.dumps(state())"
    )
    text = eval(cluster.run(cell, ranks="1").results[1])
    state = msgspec.json.decode(text, type=ClusterState)
    assert [worker.state for worker in state.workers] == ["idle", "busy", "idle"]
    assert state.run
    assert all(worker.memory_bytes > 1e7 for worker in state.workers)
    assert len(measured) == 1


def test_state_file_contains_the_placement(cluster: nbdist.Cluster) -> None:
    cluster.run("import numpy as np\ntable = np.zeros((4, 2))")
    picture = cluster.show("table")
    cluster._lifecycle._files.settle()
    state = msgspec.json.decode((cluster._folder / "cluster.json").read_bytes(), type=ClusterState)
    assert state.placement is not None
    assert state.placement.names == ("table",)
    assert (cluster._folder / "placement.html").read_text("utf-8") == picture.html()
