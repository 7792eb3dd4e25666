"""JAX's coordination services, each in its own process beside the engines."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from nbdist.utils.sockets import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.cluster.fleet import Fleet

_TARGET = "nbdist.worker.jax.runtime.coordinator:main"
_NAME = "coordinator"


class Coordinators:
    """Coordination services of one cluster.

    A rank that keeps an array from before a reconnection also keeps a client of the former
    service. Its process would end with that service. A service therefore runs until no rank is
    connected to it.

    Args:
        fleet: the fork servers. The services run on this machine, and engines of all hosts reach
            them.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._fork_server = fleet.home
        self._ports: dict[str, int] = {}

    def start(self, world_size: int, timeout_s: float) -> int:
        """Start a service for `world_size` processes, and return its port."""
        mark = self._fork_server.state.count()
        name = f"{_NAME}{mark}"
        self._fork_server.spawn(name, _TARGET, {"host": LOOPBACK, "world_size": world_size}, {})
        event = self._fork_server.wait_event("coordinator", timeout_s, since=mark)
        port = self._ports[name] = int(event["address"].rpartition(":")[2])
        self._fleet.add_open_ports([port])
        return port

    def end_unused(self, ports: Collection[int]) -> None:
        """End the services on other ports than these, without waiting for their end."""
        for name, port in list(self._ports.items()):
            if port not in ports:
                self._fork_server.signal(name, signal.SIGKILL)
                del self._ports[name]

    def end(self, timeout_s: float) -> None:
        """End all services, and wait until they are gone."""
        there = [name for name in self._fork_server.state.pids() if name.startswith(_NAME)]
        for name in there:
            self._fork_server.signal(name, signal.SIGKILL)
        self._fork_server.wait_ended(there, timeout_s)
        self._ports.clear()
