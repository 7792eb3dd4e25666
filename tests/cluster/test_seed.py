"""The preloaded parent: what it starts ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.cluster.launch import SeedProcess, repeat_until
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLEEPER = "tests.cluster.test_seed:sleep"


def sleep(args: dict[str, float], announce: object) -> None:
    """Runs in a child of the seed."""
    import time

    announce({"event": "hello", "variable": os.environ.get("SAID", "")})  # type: ignore[operator]
    print("a line for the log", flush=True)
    time.sleep(args["seconds"])


@pytest.fixture
def seed(tmp_path: Path) -> Iterator[SeedProcess]:
    running = SeedProcess(["json"], {}, tmp_path)
    running.wait_event("ready", 30)
    yield running
    running.close()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def start_sleeper(seed: SeedProcess, name: str = "one", seconds: float = 600) -> int:
    mark = seed.count()
    seed.spawn(name, SLEEPER, {"seconds": seconds}, {"SAID": name})
    assert seed.wait_event("hello", 30, since=mark)["variable"] == name
    return seed.pids()[name]


def test_a_child_leads_a_session_of_its_own_and_has_its_own_log(seed: SeedProcess) -> None:
    pid = start_sleeper(seed)
    assert os.getsid(pid) == pid
    assert repeat_until(lambda: "a line for the log" in seed.log_tail("one"), 10)


def test_an_end_is_noticed_with_its_code(seed: SeedProcess) -> None:
    mark = seed.count()
    start_sleeper(seed)
    seed.signal("one", signal.SIGKILL)
    assert seed.wait_event("exited", 10, since=mark)["code"] == -signal.SIGKILL
    assert seed.pids() == {}


def test_signals_to_a_child_that_is_gone_do_nothing(seed: SeedProcess) -> None:
    mark = seed.count()
    start_sleeper(seed, seconds=0)
    seed.wait_event("exited", 10, since=mark)
    seed.signal("one", signal.SIGKILL)
    assert start_sleeper(seed, "two") > 0


def test_closing_ends_children_and_guarded_processes(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    running = SeedProcess(["json"], {}, tmp_path)
    running.wait_event("ready", 30)
    child = start_sleeper(running)
    running.guard(stranger.pid)
    running.close()
    assert is_gone(child)
    assert stranger.wait(10) == -signal.SIGTERM


def test_killing_the_seed_ends_its_children(tmp_path: Path) -> None:
    running = SeedProcess(["json"], {}, tmp_path)
    running.wait_event("ready", 30)
    child = start_sleeper(running)
    os.kill(running.pid, signal.SIGKILL)
    assert repeat_until(lambda: is_gone(child), 10)
    with pytest.raises(StartError, match="preloaded parent"):
        running.wait_event("never", 10, since=running.count())
    running.close()


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    running = SeedProcess(["no_such_module"], {}, tmp_path)
    with pytest.raises(StartError, match="no_such_module could not be imported"):
        running.wait_event("ready", 30)
    running.close()


def test_what_modules_print_on_import_does_not_disturb(tmp_path: Path) -> None:
    running = SeedProcess(["this"], {}, tmp_path)
    assert "this" in running.wait_event("ready", 30)["versions"]
    assert "Zen" in running.log_tail("seed", 50)
    running.close()


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of the notebook's kernel: seed, engines and controller end by themselves."""
    program = textwrap.dedent("""
        import nbdist, json, time
        cluster = nbdist.Cluster(hosts=2, framework="jax")
        engines = cluster._crew.engines
        pids = [*engines.pids().values(), engines._seed.pid, engines._cluster.controller.pid]
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
    _, alive = psutil.wait_procs(list(family), timeout=15)
    assert not alive, f"left behind: {alive}"
