"""Push and pull of objects, and the start, restart and stop of a cluster."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.settings import Settings
from nbdist.utils.polling import repeat_until
from nbdist.utils.processes import await_ends
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# Objects.


def test_objects_are_pushed_and_pulled(cluster: nbdist.Cluster) -> None:
    cluster.push({"a": np.arange(3), "f": lambda x: x + 1})
    cluster.run("b = f(a) * rank")
    pulled = cluster.pull(["a", "b"])
    assert [objects["b"].tolist() for objects in pulled.values()] == [
        [0, 0, 0],
        [1, 2, 3],
        [2, 4, 6],
    ]
    assert list(cluster.pull(["b"], ranks="2")) == [2]


def test_jax_arrays_are_pulled_as_numpy(cluster: nbdist.Cluster) -> None:
    has_jax = "jax" in sys.modules  # another test may have imported JAX; `pull` must not
    cluster.run(
        "import jax\nimport jax.numpy as jnp\nlocal = {'w': jnp.ones(3)}\n"
        "whole = jax.device_put(jnp.arange(6.0), jax.NamedSharding(mesh, jax.P()))\n"
        "split = jax.device_put(jnp.arange(6.0), jax.NamedSharding(mesh, jax.P('data')))"
    )
    pulled = cluster.pull(["local", "whole"], ranks="1")[1]
    assert type(pulled["local"]["w"]) is np.ndarray
    assert pulled["whole"].tolist() == [0, 1, 2, 3, 4, 5]
    assert cluster.pull(["split"], ranks="1")[1]["split"].tolist() == [0, 1, 2, 3, 4, 5]
    trees = cluster.pull(["split", "local"]).values()
    assert [tree["split"].tolist() for tree in trees] == [[0, 1, 2, 3, 4, 5]] * len(trees)
    assert ("jax" in sys.modules) == has_jax


def test_pull_of_different_split_arrays_is_refused(cluster: nbdist.Cluster) -> None:
    """Ranks that gather different arrays would wait for each other."""
    cluster.run(
        "import jax, jax.numpy as jnp\n"
        "split = jax.device_put(jnp.arange(6.0), jax.NamedSharding(mesh, jax.P('data')))\n"
        "unlike = [split] if rank == 0 else 1"
    )
    with pytest.raises(nbdist.TransferError, match=r"(?s)rank 0: float\d+\[6\] .*rank 1: none"):
        cluster.pull(["unlike"])


def test_pull_of_an_undefined_name_is_refused(cluster: nbdist.Cluster) -> None:
    cluster.run("only_on_two = 1", ranks="2")
    with pytest.raises(nbdist.TransferError, match="rank 0: only_on_two; rank 1: only_on_two"):
        cluster.pull(["only_on_two"])


def test_push_with_an_unpicklable_object_transfers_nothing(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.TransferError) as error:
        cluster.push({"good": 1, "lock": threading.Lock()})
    assert "lock (lock) cannot be pickled" in str(error.value)
    assert cluster.run("'good' in globals()").results[0] == "False"
    cluster.run("import threading\nlock = threading.Lock()")
    with pytest.raises(nbdist.TransferError, match="rank 0: TypeError: cannot pickle"):
        cluster.pull(["lock"])


def test_pull_of_a_framework_object_does_not_import_it(cluster: nbdist.Cluster) -> None:
    cluster.run("import keras\nhistory = keras.callbacks.History()")
    with pytest.raises(nbdist.TransferError, match=r"needs keras.*\.history"):
        cluster.pull(["history"], ranks="0")
    assert "keras" not in sys.modules


# The cluster.


def test_status_lists_every_worker(cluster: nbdist.Cluster) -> None:
    status = cluster.status()
    assert status.title == f"nbdist: 3 workers, 3 idle, seed {cluster.request.seed}"
    pids = [worker.pid for worker in status.workers]
    assert all(psutil.Process(pid).is_running() for pid in pids)
    assert all(str(pid) in "\n".join(status.lines()) for pid in pids)
    assert "jax 0.10" in status.html()


def test_status_reports_the_memory_of_every_worker(cluster: nbdist.Cluster) -> None:
    """A busy host may miss the deadline of one query, so the test repeats the query."""
    deadline = time.monotonic() + 30
    while not all(worker.memory_bytes > 50e6 for worker in cluster.status().workers):
        assert time.monotonic() < deadline, cluster.status()


def test_logs_of_an_unknown_rank_are_refused(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.UsageError, match="no rank 3: use a rank from 0 to 2"):
        cluster.logs(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "2"}, "hosts '2': use a whole number"),
        ({"hosts": 2.5}, "hosts 2.5"),
        ({"hosts": 1, "env": {"A": 1}}, "env 'A'=1: both must be text"),
    ],
)
def test_options_of_the_wrong_type_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(nbdist.UsageError, match=message):
        nbdist.Cluster(framework="jax", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("mirrored", "needs tensorflow.*--framework both"), ("magic", "choose from mirrored, pjrt")],
)
def test_unavailable_strategy_is_refused(
    cluster: nbdist.Cluster, strategy: str, message: str
) -> None:
    with pytest.raises(nbdist.UsageError, match=message):
        cluster.run("1", strategy=strategy)


def test_misspelt_option_runs_nothing(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.UsageError, match=r"^epoch: .* did you mean epochs"):
        cluster.run("ran_misspelt = True", epoch=2)
    assert cluster.run("'ran_misspelt' in globals()").results[0] == "False"


def test_cells_leave_no_history_in_the_client(cluster: nbdist.Cluster) -> None:
    before = len(cluster._worker_group.engines.controller.client.history)
    for _ in range(5):
        cluster.run("1")
    assert len(cluster._worker_group.engines.controller.client.history) == before


@pytest.mark.full  # test_left_collectives.py and test_fail_fast.py
def test_rank_that_waits_in_a_collective_is_released(cluster: nbdist.Cluster) -> None:
    """Rank 0 waits in an all-reduce that the other ranks never join."""
    cell = """
import jax, jax.numpy as jnp
ones = jax.jit(lambda: jnp.ones(world_size), out_shardings=jax.NamedSharding(mesh, jax.P("data")))()
total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P())).lower(ones).compile()
if rank > 0:
    import time
    time.sleep(1)
    raise ValueError("left")
total(ones).block_until_ready()
"""
    with pytest.raises(nbdist.CellError, match="ValueError") as error:
        cluster.run(cell)
    assert "still running" not in str(error.value)
    assert [worker.state for worker in cluster.workers()] == ["idle"] * 3
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


def test_restart_replaces_an_unresponsive_rank(cluster: nbdist.Cluster) -> None:
    """Rank 0 blocks SIGINT in a C call, so only a restart ends the cell."""
    cell = """
import ctypes, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
if rank > 0:
    time.sleep(0.5)
    raise ValueError("left")
for i in range(100):
    ctypes.CDLL(None).poll(None, 0, 20_000)
"""
    with pytest.raises(nbdist.CellError, match="ValueError") as error:
        cluster.run(cell)
    assert "rank 0: still running" in error.value.notes[-1]
    assert [worker.state for worker in cluster.workers()] == ["busy", "idle", "idle"]
    with pytest.raises(nbdist.WorkerError, match="rank 0 is still in an earlier cell"):
        cluster.run("1")
    before = {worker.pid for worker in cluster.workers()}
    cluster.restart()
    assert before.isdisjoint(worker.pid for worker in cluster.workers())
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


def test_death_of_a_rank_ends_the_cell(cluster: nbdist.Cluster) -> None:
    with pytest.raises(
        nbdist.WorkerError,
        match=r"rank 1@.* died in the cell.*%dist_restart.*\n.*killed \(SIGKILL\)",
    ):
        cluster.run("import os, time\nif rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert [worker.state for worker in cluster.workers()] == ["idle", "dead", "idle"]
    with pytest.raises(nbdist.WorkerError, match="rank 1 is dead"):
        cluster.run("1")
    assert cluster.run("rank", ranks="0").results == {0: "0"}
    cluster.restart()
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


@pytest.fixture(scope="module")
def single_worker() -> Iterator[nbdist.Cluster]:
    """Cluster of one worker whose fork server and controller the tests may kill."""
    with nbdist.Cluster(
        hosts=1, framework="jax", cpus_per_worker=1, env={"SAID": "yes"}
    ) as running:
        yield running


def test_worker_has_its_cores_and_environment(single_worker: nbdist.Cluster) -> None:
    run = single_worker.run("import os\nos.environ['SAID'], len(os.sched_getaffinity(0))")
    assert run.results[0] == "('yes', 1)"


@pytest.mark.parametrize(
    "parts",
    [["controller"], pytest.param(["controller", "fork server"], marks=pytest.mark.full)],
    ids=str,
)
def test_restart_works_without_controller_and_fork_server(
    single_worker: nbdist.Cluster, parts: list[str]
) -> None:
    """The schedulers of the controller outlive it, and the fork server may be dead too."""
    engines = single_worker._worker_group.engines
    controllers = [psutil.Process(pid) for pid in engines.controller.pids]
    for part in parts:
        pid = engines.fleet.home.state.pid if part == "fork server" else controllers[0].pid
        os.kill(pid, signal.SIGKILL)
    assert repeat_until(lambda: not engines.can_restart(), 10)
    single_worker.restart()
    assert single_worker.run("rank").results == {0: "0"}
    assert not await_ends(controllers, 5)


def test_second_stop_has_no_effect(single_worker: nbdist.Cluster) -> None:
    single_worker.stop()
    single_worker.stop()
    assert not psutil.pid_exists(single_worker._worker_group.hellos[0].pid)


# Starts that fail.


def test_failed_start_leaves_no_processes_and_folders(own_runtime_folder: Path) -> None:
    (own_runtime_folder / "nbdist").mkdir(exist_ok=True)
    folders = set((own_runtime_folder / "nbdist").iterdir())
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(nbdist.NbdistError):
        nbdist.Cluster(hosts=1, framework="jax", env={"JAX_PLATFORMS": "no_such_platform"})
    remaining = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(list(remaining), timeout=30)[1]
    assert set((own_runtime_folder / "nbdist").iterdir()) == folders


@pytest.mark.full  # worker/jax/test_backend.py covers two devices for each rank
def test_virtual_devices_are_created() -> None:
    with clusters.cluster(hosts=2, framework="jax", devices_per_host=2) as running:
        assert [len(worker.devices) for worker in running.workers()] == [2, 2]
        assert running.run("mesh.size, strategy.num_replicas_in_sync").results[1] == "(4, 4)"


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_START_TIMEOUT_S", "2.5")
    assert Settings.from_environment().start_timeout_s == 2.5
    monkeypatch.setenv("NBDIST_START_TIMEOUT_S", "soon")
    with pytest.raises(nbdist.UsageError, match="start_timeout_s"):
        Settings.from_environment()


def test_errors_can_be_pickled() -> None:
    error = nbdist.UsageError("what to type")
    assert str(pickle.loads(pickle.dumps(error))) == "what to type"
