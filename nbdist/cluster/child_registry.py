"""Children of the fork servers of all hosts, addressed by name."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

from nbdist.cluster.forkserver.logs import FORK_SERVER_LOG
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.cluster.forkserver.client import ForkServerClient, ForkServerProcess
    from nbdist.cluster.remote_host.remote_forkserver import RemoteForkServer
    from nbdist.records import Host

HOME = ""
"""Key of this machine among hosts."""

_OF_RANK, _SPARE = "rank-", "spare-"


def engine_name(rank: int) -> str:
    """Name of an engine that was forked for a rank."""
    return f"{_OF_RANK}{rank}"


def spare_name(number: int) -> str:
    """Name of an engine that was forked before it has a rank."""
    return f"{_SPARE}{number}"


def is_engine(name: str) -> bool:
    """Return True if a child of this name is an engine."""
    return name.startswith((_OF_RANK, _SPARE))


class Children:
    """Operations on the children of all fork servers. `Fleet` provides the fork servers.

    Attributes:
        home: this machine's fork server.
        unreached: the reason of the last failed connection, by host key.
    """

    home: ForkServerProcess
    unreached: dict[str, str]
    _hosts: dict[str, Host]
    _remote: dict[str, RemoteForkServer]

    def lost(self) -> list[str]:
        """Return the hosts that have no running fork server."""
        return [key for key in self._hosts if not self._runs(key)]

    def raise_for_lost(self, keys: Iterable[str]) -> None:
        """Raise StartError if one of these hosts has no running fork server."""
        for key in self.lost():
            if key in keys:
                raise StartError(
                    f"{key} cannot be reached: {self.unreached.get(key, 'its fork server is gone')}"
                )

    def _runs(self, key: str) -> bool:
        return key in self._remote and self._remote[key].runs()

    def _fork_servers(self) -> dict[str, ForkServerClient]:
        return {HOME: self.home, **self._remote}

    def spawn(
        self, host: str, name: str, target: str, args: dict[str, Any], env: dict[str, str]
    ) -> None:
        """Fork a child on a host; see `ForkServerClient.spawn`."""
        self._fork_servers()[host].spawn(name, target, args, env)

    def preload(self, module: str) -> None:
        """Tell fork servers to import a module, if installed, for later forks. Does not wait."""
        for key, fork_server in self._fork_servers().items():
            if key not in self.disconnected_hosts() and any(
                map(is_engine, fork_server.state.pids())
            ):
                with contextlib.suppress(StartError):  # it is gone, and forks no more
                    fork_server.preload(module)

    def pids(self) -> dict[str, int]:
        """Return the pids of the children that run, by name."""
        return {
            name: pid
            for fork_server in self._fork_servers().values()
            for name, pid in fork_server.state.pids().items()
        }

    def was_forked(self, name: str) -> bool:
        """Return True if a child of this name runs, or has run and ended."""
        return bool(self._servers_of(name))

    def poll(self) -> dict[str, tuple[int, bool]]:
        """Return the state of children on reachable hosts; see `ForkServerClient.poll`."""
        found: dict[str, tuple[int, bool]] = {}
        for key, fork_server in self._fork_servers().items():
            if key not in self.disconnected_hosts() and fork_server.state.pids():
                found |= fork_server.poll()
        return found

    def is_frozen(self, name: str) -> bool:
        """Return True if a signal has stopped a child (state T)."""
        for key, fork_server in self._fork_servers().items():
            if name in fork_server.state.pids() and key not in self.disconnected_hosts():
                return fork_server.poll().get(name, (0, False))[1]
        return False

    def disconnected_hosts(self) -> list[str]:
        """Return the hosts whose connections are broken or being restored."""
        return [
            key
            for key, fork_server in self._remote.items()
            if fork_server.is_disconnected or not fork_server.runs()
        ]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a child, and return when it has been sent.

        Do nothing if the child has ended, or if its host cannot be reached.
        """
        for key, fork_server in self._fork_servers().items():
            if name in fork_server.state.pids() and key not in self.disconnected_hosts():
                try:
                    fork_server.signal(name, number)
                except StartError:
                    if key == HOME:
                        raise  # another host has just lost its connection

    def kill(self, names: Sequence[str], timeout_s: float) -> None:
        """Kill children, and wait until they are gone. Children of a lost fork server are gone.

        Raises:
            StartError: a child still runs after the timeout.
        """
        for fork_server in self._fork_servers().values():
            own = [name for name in names if name in fork_server.state.pids()]
            try:
                for name in own if fork_server.runs() else ():
                    fork_server.signal(name, signal.SIGKILL)
            except StartError:
                if fork_server.runs():
                    raise
            fork_server.wait_ended(own, timeout_s)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """Return the end of a child's log; see `ForkServerClient.log_tail`."""
        return next((s.log_tail(name, lines) for s in self._servers_of(name)), "")

    def describe_end(self, name: str, lines: int) -> str:
        """Describe the end of a child; see `ForkServerClient.describe_end`."""
        return next((s.describe_end(name, lines) for s in self._servers_of(name)), "")

    def _servers_of(self, name: str) -> list[ForkServerClient]:
        return [
            fork_server
            for fork_server in self._fork_servers().values()
            if fork_server.state.has_child(name)
        ]

    def raise_for_ended(self) -> None:
        """Raise StartError with the end of its log if this machine's fork server has ended."""
        if not self.home.runs():
            self.home.wait_event("ended", 1.0)
            raise StartError(f"the fork server ended:\n{self.home.log_tail(FORK_SERVER_LOG)}")
