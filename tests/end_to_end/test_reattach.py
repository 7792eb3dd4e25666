"""Clusters whose kernel dies: another kernel attaches, or the workers end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import pytest

import nbdist
from nbdist.cluster.forkserver.control_socket import FORK_SERVER_SOCKET
from nbdist.cluster.handover import HANDOVER_FILE, read_handover
from nbdist.records.handover import HANDOVER_VERSION
from nbdist.session.discovery import offer, stop_all
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from nbdist.utils.processes import await_ends, is_alive, this_process
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.records import RunState

HALF = 250
TRAIN = f"""
HALF = {HALF}
def train():
    for i in range(10_000):
        time.sleep(0.004)
        while i == HALF and not go.exists():
            time.sleep(0.02)
        yield np.full((4, 3), i % 7, "float32")
"""
IMPORTS = "import os, time, pathlib\ngo = pathlib.Path(os.environ['JUPYTER_RUNTIME_DIR'], 'go')\n"
SETUP = {
    "jax": IMPORTS + "import numpy as np, jax.numpy as jnp\nw = jnp.zeros(3)" + TRAIN,
    "tensorflow": IMPORTS
    + "import numpy as np, tensorflow as tf\nw = tf.Variable(tf.zeros(3))"
    + TRAIN,
}
STEP = {
    "jax": "w = w + batch.mean(0) / 64\nloss = w.sum()",
    "tensorflow": "w.assign_add(tf.reduce_mean(batch, 0) / 64)\nloss = tf.reduce_sum(w)",
}
STEPS = 500
LOSSES = np.cumsum(np.arange(STEPS) % 7) * 3 / 64  # exact in float32

KILL_CONTROLLER = """
import os, signal, threading
if rank == 0:
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
"""
OWNER = """
import nbdist, json, sys, time
cluster = nbdist.Cluster(hosts=2, framework="jax")
cluster.run("answer = 42")
engines = cluster._worker_group.engines
pids = [*engines.pids().values(), engines.fleet.home.state.pid, *engines.controller.pids]
print("PIDS", json.dumps(pids), flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def wait_for_run(tmp_path: Path) -> Callable[[Callable[[RunState, int], bool]], RunState]:
    """Function that waits until `condition(state, steps)` is true for the newest run."""

    def wait(condition: Callable[[RunState, int], bool]) -> RunState:
        found: list[RunState] = []

        def check() -> bool:
            runs = stored_runs(tmp_path / "runs")[:1]
            for run in runs:
                steps = max((run.count(table) for table in run.tables()), default=0)
                found[:] = [run.state()]
                if condition(found[0], steps):
                    return True
            return False

        assert repeat_until(check, 60), f"the run is {found}"
        return found[0]

    return wait


@contextlib.contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a process that owns a cluster; yield it and the processes of the cluster."""
    program, pipe = [sys.executable, "-c", OWNER], subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("PIDS"))
        family = [psutil.Process(pid) for pid in json.loads(line[5:])]
        try:
            yield process, family
        finally:
            process.kill()


def train(kernel: Kernel, framework: str, options: str = "") -> str:
    kernel.run(f"%load_ext nbdist\n%dist_start 2 --framework {framework}").check()
    kernel.run(f"%%dist_run\n{SETUP[framework]}").check()
    return kernel.send(f"%%dist_run --data train --steps {STEPS} {options}\n{STEP[framework]}")


def pid_of(kernel: Kernel) -> int:
    pid: int = kernel.manager.provisioner.pid  # type: ignore[union-attr]
    return pid


def release_training() -> None:
    """Let the training continue after `HALF` steps."""
    Path(os.environ["JUPYTER_RUNTIME_DIR"], "go").touch()


def check_attached(kernel: Kernel, framework: str) -> None:
    """Check that the run ends in this kernel with all rows and the final variables."""
    request = kernel.send("%dist_attach -o run")
    release_training()
    shown = kernel.collect(request).check()
    assert f"of {STEPS} · loss" in "\n".join(shown.plain)
    result = kernel.run("import json\nprint(json.dumps(run.history['loss'].tolist()))").check()
    np.testing.assert_array_equal(json.loads(result.stdout), [LOSSES, LOSSES])
    total = "w.sum()" if framework == "jax" else "tf.reduce_sum(w)"
    assert str(LOSSES[-1]) in kernel.run(f"%%dist_run\nprint(float({total}))").check().stdout


@pytest.mark.parametrize(
    "framework", ["jax", pytest.param("tensorflow", marks=pytest.mark.full)]
)  # takes twice as long as JAX
def test_detached_run_continues_in_another_kernel(
    framework: str,
    wait_for_run: Callable[[Callable[[RunState, int], bool]], RunState],
) -> None:
    with Kernel() as first:
        train(first, framework, "--detach")
        before = wait_for_run(lambda _, steps: steps > 200)
        os.kill(pid_of(first), signal.SIGKILL)
    takeover = wait_for_run(lambda state, _: state.writer.pid not in (before.writer.pid, 0))
    assert takeover.status == "running"
    with Kernel() as second:
        offered = second.run("%load_ext nbdist").check().stdout
        assert "(2 workers, cell 3 running)" in offered
        assert "%dist_attach" in offered
        check_attached(second, framework)
        with pytest.raises(nbdist.OwnedError, match=f"pid {pid_of(second)}"):
            nbdist.attach()
        second.run("%dist_stop").check()
    assert stop_all() == ()


@pytest.mark.full  # the previous test kills a kernel
def test_detached_run_survives_a_kernel_restart(
    wait_for_run: Callable[[Callable[[RunState, int], bool]], RunState],
) -> None:
    with Kernel() as kernel:
        train(kernel, "jax", "--detach")
        before = wait_for_run(lambda _, steps: steps > 100)
        kernel.manager.restart_kernel()
        kernel.client.wait_for_ready(timeout=60)
        wait_for_run(lambda state, _: state.writer.pid != before.writer.pid)
        kernel.run("%load_ext nbdist").check()
        check_attached(kernel, "jax")


@pytest.mark.full  # the first test covers most of a detached runner
def test_stop_of_a_detached_cell_keeps_the_cluster(
    tmp_path: Path, wait_for_run: Callable[[Callable[[RunState, int], bool]], RunState]
) -> None:
    with Kernel() as first:
        first.run("%load_ext nbdist\n%dist_start 2 --framework jax").check()
        cell = (
            "import time\nanswer = 42\nreport(loss=1.0)\nfor _ in range(6000):\n    time.sleep(0.1)"
        )
        first.send(f"%%dist_run --detach\n{cell}")
        before = wait_for_run(lambda state, _: state.status == "running")
        os.kill(pid_of(first), signal.SIGKILL)
    wait_for_run(lambda state, _: state.writer.pid not in (before.writer.pid, 0))
    stored_runs(tmp_path / "runs")[0].ask_to_stop()
    wait_for_run(lambda state, _: state.is_over)
    with nbdist.attach() as cluster:
        assert cluster.pull(["answer"])[1]["answer"] == 42


@pytest.mark.full  # the first test covers most of a detached runner
def test_finished_detached_run_is_available_after_attach(
    wait_for_run: Callable[[Callable[[RunState, int], bool]], RunState],
) -> None:
    with Kernel() as first:
        train(first, "jax", "--detach")
        wait_for_run(lambda _, steps: steps > 100)
        os.kill(pid_of(first), signal.SIGKILL)
    release_training()
    wait_for_run(lambda state, _: state.status == "finished")
    cluster = nbdist.attach()
    np.testing.assert_array_equal(cluster.follow().history["loss"], [LOSSES, LOSSES])
    cluster.restart()
    cluster.run("answer = rank")
    assert {rank: names["answer"] for rank, names in cluster.pull(["answer"]).items()} == {
        0: 0,
        1: 1,
    }
    cluster.stop()


@pytest.mark.full  # tests/cluster/forkserver/test_server.py also kills an owner
def test_without_detach_workers_and_folder_are_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_for_run: Callable[[Callable[[RunState, int], bool]], RunState],
) -> None:
    monkeypatch.setenv("NBDIST_RETURN_GRACE_S", "1")
    with Kernel() as kernel:
        train(kernel, "jax")
        state = wait_for_run(lambda _, steps: steps > 100)
        family = [psutil.Process(worker.pid) for worker in state.workers]
        family += [psutil.Process(worker.pid).parent() for worker in state.workers]
        os.kill(pid_of(kernel), signal.SIGKILL)
        assert not await_ends(family, 10)
    assert not list((tmp_path / "nbdist").iterdir())
    assert stored_runs(tmp_path / "runs")[0].state().status == "lost"


def test_next_kernel_finds_the_variables_between_cells(tmp_path: Path) -> None:
    with owner() as (process, family):
        with pytest.raises(nbdist.OwnedError, match=f"pid {process.pid}"):
            nbdist.attach()
        assert f"(pid {process.pid}): left alone" in "\n".join(stop_all())
        (folder,) = (tmp_path / "nbdist").iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / HANDOVER_FILE).stat().st_mode) == 0o600
        process.kill()
        process.wait()
        with nbdist.attach() as cluster:
            cluster.follow()  # the end of the cell may not be stored yet
            assert cluster.pull(["answer"])[1]["answer"] == 42
            assert cluster.run("answer + rank").results == {0: "42", 1: "43"}
    assert not await_ends(family, 10)


@pytest.mark.full
def test_program_that_exits_ends_its_workers(tmp_path: Path) -> None:
    with owner() as (process, family):
        process.communicate("")
        assert not await_ends(family, 10)
        assert process.returncode == 0
    assert not list((tmp_path / "nbdist").iterdir())


@pytest.mark.full
def test_stop_all_ends_the_cluster_of_a_killed_notebook(tmp_path: Path) -> None:
    with owner() as (killed, family):
        killed.kill()
        killed.wait()
        assert len(stop_all()) == 1
        assert not await_ends(family, 10)
    assert not list((tmp_path / "nbdist").iterdir())


@pytest.mark.full
def test_stop_all_spares_the_cluster_of_a_live_notebook(tmp_path: Path) -> None:
    with owner() as (live, others), owner() as (killed, family):
        killed.kill()
        killed.wait()
        result = "\n".join(stop_all())
        assert f"belongs to another notebook (pid {live.pid}): left alone" in result
        assert not await_ends(family, 10)
        assert all(map(is_alive, others))
        fork_server = next(p for p in others if "nbdist.cluster.forkserver.server" in p.cmdline())
        fork_server.kill()  # no process is left to end the controller
        live.kill()
        live.wait()
        assert len(stop_all()) == 1
        assert not await_ends(others, 10)
    assert not list((tmp_path / "nbdist").iterdir())


OWN_WITH_FORMAT = f"nbdist {nbdist.__version__} (state format {HANDOVER_VERSION})"


def pause(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait for its threads: one may still finish the write of a file."""
    process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")

    def is_stopped() -> bool:
        return all("State:\tT" in (each / "status").read_text() for each in threads.iterdir())

    assert repeat_until(is_stopped, 10), f"threads of process {process.pid} still run"


def write_state(folder: Path, fields: Mapping[str, object]) -> Path:
    """Change fields of a cluster's state, and return its file. Version 1 has the old file names."""
    state = folder / HANDOVER_FILE
    stored = json.loads(state.read_bytes()) | fields
    if stored["version"] == 1:
        del stored["nbdist"]
        stored["keeper"] = stored.pop("detached_runner")
        state.rename(folder / "estate.json")
        (folder / FORK_SERVER_SOCKET).rename(folder / "seed.sock")
        state = folder / "estate.json"
    state.write_text(json.dumps(stored))
    return state


@pytest.mark.parametrize(
    ("fields", "started_by", "own"),
    [
        pytest.param(
            {"nbdist": "0.1.9"},
            "nbdist 0.1.9",
            f"nbdist {nbdist.__version__}",
            id="version",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"version": 2},
            f"nbdist {nbdist.__version__} (state format 2)",
            OWN_WITH_FORMAT,
            id="format",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"version": 1},
            "a version of nbdist before 0.2.0 (state format 1)",
            OWN_WITH_FORMAT,
            id="before 0.2.0",
        ),
    ],
)  # tests/cluster/test_handover.py covers all formats
def test_cluster_of_another_version_is_refused(
    tmp_path: Path, fields: dict[str, object], started_by: str, own: str
) -> None:
    with owner() as (process, family):
        process.kill()
        process.wait()
        (folder,) = (tmp_path / "nbdist").iterdir()
        write_state(folder, fields)
        versions = f"cluster {folder.name} was started by {started_by}, and this is {own}: "
        with pytest.raises(nbdist.StartError, match=f"{re.escape(versions)}.*%dist_stop --all"):
            nbdist.attach()
        assert versions in offer()
        assert stop_all() == (f"cluster {folder.name} was ended",)
        assert not await_ends(family, 10)


@pytest.mark.full  # tests/session/test_discovery.py covers it
def test_free_cluster_of_another_version_is_named_beside_other_clusters(tmp_path: Path) -> None:
    with owner() as (live, _):
        (owned,) = (tmp_path / "nbdist").iterdir()
        with owner() as (killed, _):
            killed.kill()
            killed.wait()
            (old,) = set((tmp_path / "nbdist").iterdir()) - {owned}
            write_state(old, {"version": 1})
            with pytest.raises(nbdist.StartError, match=f"cluster {old.name} was started by"):
                nbdist.attach()
            with pytest.raises(nbdist.OwnedError, match=f"pid {live.pid}"):
                nbdist.attach(owned.name)
            live.kill()
            live.wait()
            waiting, other_version = offer().splitlines()
            assert f"cluster {owned.name} (2 workers)" in waiting
            assert f"cluster {old.name} was started by" in other_version
            nbdist.attach().stop()
            assert not owned.exists()


@pytest.mark.full  # tests/session/test_discovery.py covers it
def test_cluster_of_another_version_in_use_is_not_offered(tmp_path: Path) -> None:
    with owner() as (process, family):
        pause(process)  # it writes its state no more
        (folder,) = (tmp_path / "nbdist").iterdir()
        for runner, fields in (
            ("detached_runner", {"nbdist": "0.1.9"}),
            ("keeper", {"version": 1}),
        ):
            state = write_state(folder, fields)
            stored = state.read_bytes()
            assert offer() == ""
            with pytest.raises(nbdist.OwnedError, match=f"pid {process.pid}"):
                nbdist.attach()
            assert f"(pid {process.pid}): left alone" in "\n".join(stop_all())
            for change in ({runner: True}, {"owner": "unknown"}):
                state.write_text(json.dumps(json.loads(stored) | change))
                assert f"cluster {folder.name} was started by" in offer()
            state.write_bytes(stored)
        assert all(map(is_alive, family))


@pytest.mark.full
def test_forged_cluster_folder_does_no_harm(tmp_path: Path) -> None:
    with owner() as (process, _):
        (folder,) = (tmp_path / "nbdist").iterdir()
        handover = read_handover(folder)
        process.kill()
        process.wait()
        stop_all()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        other_process = msgspec.structs.replace(this_process(), pid=stranger.pid, started=1.0)
        reused = msgspec.structs.replace(
            handover, owner=other_process, controllers=(other_process,)
        )
        (folder / "log").mkdir(parents=True)
        (folder / HANDOVER_FILE).write_bytes(msgspec.json.encode(reused))
        other = folder.with_name("0" * 12)
        (other / "log").mkdir(parents=True)
        (other / HANDOVER_FILE).write_bytes(b'{"id": 3')
        precious = tmp_path / "precious"
        precious.mkdir()
        folder.with_name("1" * 12).symlink_to(precious)
        with pytest.raises(nbdist.UsageError, match="no cluster of an earlier notebook"):
            nbdist.attach()
        result = stop_all()
        assert stranger.poll() is None
        stranger.kill()
    assert f"cluster {folder.name} was ended" in result
    assert f"{other} is left alone, because it cannot be read" in "\n".join(result)
    assert not folder.exists()
    assert precious.is_dir()


@pytest.mark.full  # test_cluster.py kills a controller between cells
def test_run_continues_without_its_controller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with nbdist.Cluster(hosts=2, framework="jax") as cluster:
        cluster.run(SETUP["jax"])
        controller = psutil.Process(cluster._worker_group.engines.controller.pids[0])
        cluster.push({"pid": controller.pid})
        cluster.run(KILL_CONTROLLER)
        release_training()
        step = nbdist.records.StepOptions(data="train", steps=STEPS)
        np.testing.assert_array_equal(cluster.run(STEP["jax"], step=step).loss, LOSSES)
        assert capsys.readouterr().err.count("controller has died") == 1
        assert not cluster.inspection.is_whole
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}


@pytest.mark.full
def test_engines_end_without_the_controller() -> None:
    with nbdist.Cluster(hosts=2, framework="jax") as cluster:
        engines = [psutil.Process(pid) for pid in cluster._worker_group.engines.pids().values()]
        for pid in cluster._worker_group.engines.controller.pids:
            psutil.Process(pid).kill()
        assert not await_ends(engines, 50)
        with pytest.raises(nbdist.WorkerError, match="%dist_restart"):
            cluster.run("1")


@pytest.mark.full
def test_cluster_ends_within_30_s_of_its_kernel() -> None:
    with owner() as (process, family):
        started = time.monotonic()
        process.kill()
        process.wait()
        assert not await_ends(family, 40)
        assert time.monotonic() - started < 30


@pytest.mark.full
def test_detached_runner_replaces_a_dead_worker(
    tmp_path: Path, wait_for_run: Callable[[Callable[[RunState, int], bool]], RunState]
) -> None:
    """A cell with checkpoints continues without `--detach`."""
    data = "xs = np.repeat((np.arange(20_000) // 4 % 7).astype('float32')[:, None], 3, 1)"
    with Kernel() as kernel:
        kernel.run("%load_ext nbdist\n%dist_start 2 --framework jax").check()
        kernel.run(f"%%dist_run\n{SETUP['jax']}{data}").check()
        saved = f"--checkpoint {tmp_path / 'saved'} --save-every 20 --batch 4 --steps {3 * STEPS}"
        kernel.send(f"%%dist_run --data xs {saved}\n{STEP['jax']}")
        before = wait_for_run(lambda _, steps: steps > 60)
        os.kill(pid_of(kernel), signal.SIGKILL)
    wait_for_run(lambda state, _: state.writer.pid != before.writer.pid)
    os.kill(before.workers[1].pid, signal.SIGKILL)
    wait_for_run(lambda state, _: bool(state.recoveries))
    with nbdist.attach() as cluster:
        run = cluster.follow()
        assert run.history["loss"].shape == (2, 3 * STEPS)
        assert run.last("loss") > 0
        total = np.sum(np.arange(3 * STEPS) % 7) * 3 / 64
        assert cluster.run("float(w.sum())").results[0] == str(total)
