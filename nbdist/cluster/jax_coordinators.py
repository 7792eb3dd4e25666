"""JAX's coordination services, each in a process of its own beside the engines."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from nbdist.cluster.fleet import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.cluster.fleet import Fleet

_TARGET = "nbdist.worker.jax.runtime.coordinator:main"
_NAME = "coordinator"


class Coordinators:
    """Those of one cluster.

    Whoever still holds an array of before holds a client of the service of before, and its process
    would end with that: so services end once nobody is connected to them.

    Args:
        fleet: they are on this machine, and engines of all hosts reach them.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._fork_server = fleet.home
        self._ports: dict[str, int] = {}

    def start(self, world_size: int, timeout_s: float) -> int:
        """One more, for so many processes.

        Returns:
            Its port.
        """
        mark = self._fork_server.state.count()
        name = f"{_NAME}{mark}"
        self._fork_server.spawn(name, _TARGET, {"host": LOOPBACK, "world_size": world_size}, {})
        event = self._fork_server.wait_event("coordinator", timeout_s, since=mark)
        port = self._ports[name] = int(event["address"].rpartition(":")[2])
        self._fleet.add_open_ports([port])
        return port

    def end_unused(self, ports: Collection[int]) -> None:
        """End those on other ports than these, which nobody waits for."""
        for name, port in list(self._ports.items()):
            if port not in ports:
                self._fork_server.signal(name, signal.SIGKILL)
                del self._ports[name]

    def end(self, timeout_s: float) -> None:
        """End all."""
        there = [name for name in self._fork_server.state.pids() if name.startswith(_NAME)]
        for name in there:
            self._fork_server.signal(name, signal.SIGKILL)
        self._fork_server.wait_gone(there, timeout_s)
        self._ports.clear()
