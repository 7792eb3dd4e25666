"""Children of several fork servers: lost and disconnected hosts, signals and ends."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from nbdist.cluster.child_registry import (
    HOME,
    Children,
    engine_name,
    is_engine,
    spare_name,
)
from nbdist.cluster.forkserver.client import ForkServerState
from nbdist.errors import StartError
from nbdist.records import Host


class Server:
    """Double of a fork server, with a real state.

    Attributes:
        state: the state.
        is_disconnected: the connection is broken.
        is_running: the fork server runs.
        fails: commands raise `StartError`.
        commands: received commands.
        ends: children end after SIGKILL.
    """

    def __init__(self, **pids: int) -> None:
        self.state = ForkServerState()
        self.is_disconnected = self.fails = False
        self.is_running = self.ends = True
        self.commands: list[tuple[Any, ...]] = []
        for name, pid in pids.items():
            self.state.note({"event": "spawned", "id": name.replace("_", "-"), "pid": pid})

    def runs(self) -> bool:
        return self.is_running

    def end(self, name: str) -> None:
        pid = self.state.pids()[name]
        self.state.note({"event": "exited", "id": name, "pid": pid, "code": -9})

    def _receive(self, *command: Any) -> None:
        if self.fails:
            raise StartError("it is gone")
        self.commands.append(command)

    def spawn(self, *arguments: Any) -> None:
        self._receive("spawn", *arguments)

    def preload(self, module: str) -> None:
        self._receive("preload", module)

    def signal(self, name: str, number: int) -> None:
        self._receive("signal", name, number)
        if number == signal.SIGKILL and self.ends:
            self.end(name)

    def poll(self) -> dict[str, tuple[int, bool]]:
        self._receive("poll")
        return {name: (pid, pid % 2 == 1) for name, pid in self.state.pids().items()}

    def wait_ended(self, names: list[str], timeout_s: float) -> None:
        if not self.state.wait_ended(names, 0.0):
            raise StartError(f"{', '.join(names)} did not end within {timeout_s:g} s")

    def wait_event(self, *_: Any) -> None:
        self._receive("wait_event")

    def log_tail(self, name: str, lines: int = 20) -> str:
        return f"{lines} lines of {name}"

    def describe_end(self, name: str, lines: int) -> str:
        return f"the end of {name} in {lines} lines"


class Registry(Children):
    """Children of this machine and of hosts."""

    def __init__(self, home: Server, **hosts: Server) -> None:
        self.home = home  # type: ignore[assignment]
        self.unreached = {}
        self._hosts = {name: Host(name=name) for name in hosts}
        self._remote = dict(hosts)  # type: ignore[arg-type]


def test_engines_are_recognized_by_name() -> None:
    assert is_engine(engine_name(3))
    assert is_engine(spare_name(3))
    assert engine_name(3) != spare_name(3)
    assert not is_engine("coordinator")


def test_a_host_is_lost_without_a_running_fork_server() -> None:
    stopped = Server()
    stopped.is_running = False
    registry = Registry(Server(), a=Server(), b=stopped)
    registry._hosts["c"] = Host(name="c")
    assert registry.lost() == ["b", "c"]
    registry.raise_for_lost(["a", HOME])
    with pytest.raises(StartError, match=r"^b cannot be reached: its fork server is gone$"):
        registry.raise_for_lost(["a", "b"])
    registry.unreached = {"c": "timed out"}
    with pytest.raises(StartError, match=r"^c cannot be reached: timed out$"):
        registry.raise_for_lost(["c"])


def test_children_of_all_hosts_have_one_table() -> None:
    home, other = Server(rank_0=10), Server(rank_1=21)
    registry = Registry(home, a=other)
    assert registry.pids() == {"rank-0": 10, "rank-1": 21}
    assert registry.poll() == {"rank-0": (10, False), "rank-1": (21, True)}
    assert registry.is_frozen("rank-1")
    assert not registry.is_frozen("rank-0")
    assert not registry.is_frozen("rank-9")
    registry.spawn("a", "rank-2", "module:function", {"x": 1}, {"K": "V"})
    assert other.commands[-1] == ("spawn", "rank-2", "module:function", {"x": 1}, {"K": "V"})


@pytest.mark.parametrize("is_running", [True, False])
def test_a_disconnected_host_is_neither_queried_nor_signalled(is_running: bool) -> None:
    away = Server(rank_1=21)
    away.is_disconnected, away.is_running = is_running, is_running
    registry = Registry(Server(rank_0=10), a=away)
    assert registry.disconnected_hosts() == ["a"]
    assert registry.poll() == {"rank-0": (10, False)}
    assert not registry.is_frozen("rank-1")
    registry.signal("rank-1", signal.SIGINT)
    registry.preload("keras")
    assert away.commands == []
    assert registry.pids() == {"rank-0": 10, "rank-1": 21}


def test_a_fork_server_without_children_is_not_queried() -> None:
    home = Server()
    assert Registry(home, a=Server(rank_0=2)).poll() == {"rank-0": (2, False)}
    assert home.commands == []


def test_modules_are_preloaded_only_by_fork_servers_with_engines() -> None:
    home, engines, gone = Server(coordinator=1), Server(spare_0=2), Server(rank_0=3)
    gone.fails = True
    Registry(home, a=gone, b=engines).preload("keras")
    assert (home.commands, engines.commands) == ([], [("preload", "keras")])


def test_a_signal_reaches_the_fork_server_of_the_child() -> None:
    home, other = Server(rank_0=10), Server(rank_1=20)
    registry = Registry(home, a=other)
    registry.signal("rank-1", signal.SIGINT)
    registry.signal("rank-9", signal.SIGINT)
    assert (home.commands, other.commands) == ([], [("signal", "rank-1", signal.SIGINT)])


def test_only_a_failure_of_this_machines_fork_server_is_raised() -> None:
    home, other = Server(rank_0=10), Server(rank_1=20)
    home.fails = other.fails = True
    registry = Registry(home, a=other)
    registry.signal("rank-1", signal.SIGINT)  # the host has just lost its connection
    with pytest.raises(StartError, match="it is gone"):
        registry.signal("rank-0", signal.SIGINT)


def test_killed_children_are_awaited_on_all_hosts() -> None:
    home, other = Server(rank_0=10, rank_2=12), Server(rank_1=20)
    registry = Registry(home, a=other)
    registry.kill(["rank-0", "rank-1"], 5.0)
    assert registry.pids() == {"rank-2": 12}
    other.state.note({"event": "spawned", "id": "rank-1", "pid": 21})
    other.ends = False
    with pytest.raises(StartError, match="rank-1 did not end within 5 s"):
        registry.kill(["rank-1"], 5.0)


def test_children_of_a_lost_fork_server_are_not_killed() -> None:
    lost = Server(rank_1=20)
    lost.is_running = lost.ends = False
    with pytest.raises(StartError, match="did not end"):
        Registry(Server(), a=lost).kill(["rank-1"], 5.0)
    lost.state.note({"event": "ended"})
    Registry(Server(), a=lost).kill(["rank-1"], 5.0)
    assert lost.commands == []
    failing = Server(rank_1=20)
    failing.fails = True
    with pytest.raises(StartError, match="it is gone"):
        Registry(Server(), a=failing).kill(["rank-1"], 5.0)


def test_logs_come_from_the_host_of_the_child() -> None:
    home, other = Server(rank_0=10), Server(rank_1=20)
    other.end("rank-1")
    registry = Registry(home, a=other)
    assert registry.log_tail("rank-1", 3) == "3 lines of rank-1"
    assert registry.describe_end("rank-1", 3) == "the end of rank-1 in 3 lines"
    assert (registry.log_tail("rank-9"), registry.describe_end("rank-9", 3)) == ("", "")


def test_the_end_of_this_machines_fork_server_is_raised_with_its_log() -> None:
    home = Server()
    registry = Registry(home)
    registry.raise_for_ended()
    home.is_running = False
    with pytest.raises(StartError, match=r"^the fork server ended:\n20 lines of forkserver$"):
        registry.raise_for_ended()
