"""Fork server. Its children end with it in every case."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import psutil
import pytest

import nbdist
from nbdist.cluster.forkserver.client import ForkServerProcess
from nbdist.cluster.forkserver.control_socket import FORK_SERVER_SOCKET, KERNEL
from nbdist.cluster.forkserver.logs import FORK_SERVER_LOG
from nbdist.errors import OwnedError, StartError
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

SLEEPER = "tests.cluster.forkserver.test_server:sleep"


def sleep(args: dict[str, float], announce: object) -> None:
    """Announce the environment and sleep, in a child of the fork server."""
    import time

    announce({"event": "hello", "variable": os.environ.get("SAID", "")})  # type: ignore[operator]
    print("a line for the log", flush=True)
    deadline = time.monotonic() + args["seconds"]
    while time.monotonic() < deadline:
        time.sleep(0.02)  # a signal that arrives just before a sleep does not shorten it


def collections(args: dict[str, float], announce: object) -> None:
    """Announce the counts of objects, in a child of the fork server."""
    counts = {"frozen": gc.get_freeze_count(), "looked_through": len(gc.get_objects())}
    announce({"event": "counts", **counts})  # type: ignore[operator]


def start(folder: Path, module: str = "json", grace_s: float = 20) -> ForkServerProcess:
    (folder / "log").mkdir()
    return ForkServerProcess.start([module], {}, folder, grace_s)


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServerProcess]:
    running = start(tmp_path)
    running.wait_event("ready", 30)
    yield running
    running.close()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def start_sleeper(fork_server: ForkServerProcess, name: str = "one", seconds: float = 600) -> int:
    mark = fork_server.state.count()
    fork_server.spawn(name, SLEEPER, {"seconds": seconds}, {"SAID": name})
    assert fork_server.wait_event("hello", 30, since=mark)["variable"] == name
    return fork_server.state.pids().get(name, 0)


def test_signals_do_not_wait_for_later_preloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preload a module that takes long, and interrupt a child meanwhile."""
    late = tmp_path / "late.py"
    late.write_text(
        "import pathlib, time\n"
        "while not pathlib.Path(__file__).with_name('go').exists(): time.sleep(0.02)\n"
    )
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), path])))
    with contextlib.closing(start(tmp_path)) as fork_server:
        fork_server.wait_event("ready", 30)
        start_sleeper(fork_server)
        fork_server.preload("late")
        fork_server.signal("one", signal.SIGINT)
        fork_server.wait_ended(["one"], 10)
        mark = fork_server.state.count()
        fork_server.spawn("two", SLEEPER, {"seconds": 600}, {"SAID": "two"})
        (tmp_path / "go").touch()
        assert fork_server.wait_event("hello", 30, since=mark)["variable"] == "two"


def test_a_child_has_its_own_session_and_log(fork_server: ForkServerProcess) -> None:
    pid = start_sleeper(fork_server)
    assert os.getsid(pid) == pid
    assert repeat_until(lambda: "a line for the log" in fork_server.log_tail("one"), 10)


def test_garbage_collections_of_a_child_skip_preloaded_objects(tmp_path: Path) -> None:
    """With TensorFlow, such a collection would take 0.3 s and copy the memory of all objects."""
    with contextlib.closing(start(tmp_path, module=__name__)) as fork_server:
        mark = fork_server.state.count()
        fork_server.spawn("one", f"{__name__}:collections", {}, {})
        counts = fork_server.wait_event("counts", 30, since=mark)
    assert counts["frozen"] > 10 * counts["looked_through"]


def test_an_exit_is_reported_with_its_code(fork_server: ForkServerProcess) -> None:
    mark = fork_server.state.count()
    start_sleeper(fork_server)
    fork_server.signal("one", signal.SIGKILL)
    assert fork_server.wait_event("exited", 10, since=mark)["code"] == -signal.SIGKILL
    assert fork_server.state.pids() == {}


def test_signals_to_an_ended_child_do_nothing(fork_server: ForkServerProcess) -> None:
    mark = fork_server.state.count()
    start_sleeper(fork_server, seconds=0)
    fork_server.wait_event("exited", 10, since=mark)
    fork_server.signal("one", signal.SIGKILL)
    assert start_sleeper(fork_server, "two") > 0


def test_closing_ends_children_and_guarded_processes(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    running = start(tmp_path)
    running.wait_event("ready", 30)
    child = start_sleeper(running)
    running.guard(stranger.pid)
    running.close()
    assert is_gone(child)
    assert stranger.wait(10) == -signal.SIGTERM


def test_killing_the_fork_server_ends_its_children(tmp_path: Path) -> None:
    running = start(tmp_path)
    running.wait_event("ready", 30)
    child = start_sleeper(running)
    os.kill(running.state.pid, signal.SIGKILL)
    assert repeat_until(lambda: is_gone(child), 10)
    with pytest.raises(StartError, match="the fork server"):
        running.wait_event("never", 10, since=running.state.count())
    running.close()


def test_a_new_owner_receives_the_running_children(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.wait_event("ready", 30)
    child = start_sleeper(first)
    with pytest.raises(OwnedError, match=f"pid {os.getpid()}"):
        ForkServerProcess.take_over(tmp_path, KERNEL)
    first.leave()  # same effect as the end of the owner's process
    second = ForkServerProcess.take_over(tmp_path, KERNEL)
    assert second.state.pids() == {"one": child}
    assert "json" in second.state.versions
    mark = second.state.count()
    second.signal("one", signal.SIGKILL)
    assert second.wait_event("exited", 10, since=mark)["pid"] == child
    second.close()
    first._process.poll()  # reap the fork server, which is a child of this process
    with pytest.raises(StartError, match="no fork server runs"):
        ForkServerProcess.take_over(tmp_path, KERNEL)


def test_all_ends_without_a_new_owner(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    running = start(folder, grace_s=0.2)
    running.wait_event("ready", 30)
    child = start_sleeper(running)
    running.leave()
    assert running._process.wait(10) == 0
    assert is_gone(child)
    assert not folder.exists()


FORKING = """
import os, sys, time
from pathlib import Path
from nbdist.cluster.forkserver.client import ForkServerProcess
folder = Path(sys.argv[1])
(folder / "log").mkdir(parents=True)
fork_server = ForkServerProcess.start(["json"], {}, folder, 0.2)
fork_server.spawn("one", "tests.cluster.forkserver.test_server:sleep", {"seconds": 600}, {})
fork_server.wait_event("hello", 30)
child = os.fork()
if child == 0:
    time.sleep(600)
print(fork_server.state.pid, child, flush=True)
time.sleep(600)
"""


def test_the_end_of_an_owner_is_noticed_despite_its_forks(tmp_path: Path) -> None:
    """A forked child of the kernel also holds the kernel's descriptors."""
    program = [sys.executable, "-c", FORKING, str(tmp_path / "cluster")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        fork_server, child = map(int, owner.stdout.readline().split())
        owner.kill()
        assert repeat_until(lambda: is_gone(fork_server), 10)
        assert not is_gone(child)
        os.kill(child, signal.SIGKILL)
    assert not (tmp_path / "cluster").exists()


def test_invalid_requests_are_disconnected(fork_server: ForkServerProcess, tmp_path: Path) -> None:
    for nonsense in (b"\n", b"[]\n", b'{"op": "own", "role": "king"}\n', b"\xff\n", b"{}" * 9):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / FORK_SERVER_SOCKET))
            stranger.sendall(nonsense)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    assert start_sleeper(fork_server) > 0


def test_a_failed_import_is_reported_with_the_module(tmp_path: Path) -> None:
    running = start(tmp_path, "no_such_module")
    with pytest.raises(StartError, match="no_such_module could not be imported"):
        running.wait_event("ready", 30)
    running.close()


def test_a_module_that_lacks_a_private_name_does_not_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines import the module later, and report the error for its feature."""
    (tmp_path / "lacks.py").write_text(
        "from nbdist.private_api.features import Library\n"
        "library = Library('JAX', 'jax', {'gone': 'jax._src.gone'})\n"
        "library.feature('a feature', 'gone').check()\n"
    )
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), path])))
    with contextlib.closing(start(tmp_path, "lacks")) as fork_server:
        fork_server.wait_event("ready", 30)
        log = fork_server.log_tail(FORK_SERVER_LOG, 50)
        assert "lacks is not preloaded: JAX" in log
        assert "has no jax._src.gone, which nbdist needs for a feature" in log
        assert start_sleeper(fork_server) > 0


def test_output_of_imports_is_in_the_log(tmp_path: Path) -> None:
    running = start(tmp_path, "this")
    assert "this" in running.wait_event("ready", 30)["versions"]
    assert "Zen" in running.log_tail(FORK_SERVER_LOG, 50)
    running.close()


@pytest.mark.full  # test_reattach.py kills a kernel
def test_a_killed_owner_leaves_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After kill -9 of the notebook's kernel, fork server, engines and controller end."""
    monkeypatch.setenv("NBDIST_RETURN_GRACE_S", "1")
    program = textwrap.dedent("""
        import nbdist, json, time
        cluster = nbdist.Cluster(hosts=2, framework="jax")
        engines = cluster._worker_group.engines
        pids = [*engines.pids().values(), engines.fleet.home.state.pid, *engines.controller.pids]
        print("PIDS", json.dumps(pids), flush=True)
        time.sleep(600)
    """)
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    line = next(line for line in owner.stdout if line.startswith("PIDS"))
    pids = [int(word) for word in line[5:].strip(" []\n").split(",")]
    children = [c for pid in pids for c in psutil.Process(pid).children(recursive=True)]
    family = {psutil.Process(pid) for pid in pids} | set(children)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(list(family), timeout=30)
    assert not alive, f"left behind: {alive}"


def test_children_are_spawned_if_jax_has_a_backend(tmp_path: Path) -> None:
    """A process that is forked from one with a JAX backend would hang."""
    with contextlib.closing(start(tmp_path, module="tests.cluster.jax_at_startup")) as fork_server:
        fork_server.wait_event("ready", 60)
        pid = start_sleeper(fork_server)
        assert "nbdist.cluster.forkserver.child" in psutil.Process(pid).cmdline()
        assert os.getsid(pid) == pid
        assert repeat_until(lambda: "a line for the log" in fork_server.log_tail("one"), 10)
        assert "without a fork: JAX has a backend" in fork_server.log_tail(FORK_SERVER_LOG)
        fork_server.signal("one", signal.SIGINT)
        fork_server.wait_ended(["one"], 10)
        assert "KeyboardInterrupt" in fork_server.describe_end("one", 20)
        other = start_sleeper(fork_server, "two")
        os.kill(fork_server.state.pid, signal.SIGKILL)
        assert repeat_until(lambda: is_gone(other), 10)


@pytest.mark.full  # the test above covers the children
def test_a_cluster_works_without_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'nbdist.cluster.forkserver.server' in sys.orig_argv:\n"
        "    import jax; jax.devices()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with nbdist.Cluster(hosts=2, framework="jax") as cluster:
        begun = "'nbdist.cluster.forkserver.child' in sys.orig_argv"
        run = cluster.run(f"import sys, jax\n({begun}, jax.device_count())")
        assert run.results == {0: "(True, 2)", 1: "(True, 2)"}
        assert "JAX has a backend" in cluster._worker_group.engines.fleet.home.log_tail(
            FORK_SERVER_LOG
        )
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}
