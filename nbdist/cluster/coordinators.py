"""JAX's coordination services, each in a process of its own beside the engines."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.cluster.launch import SeedProcess

_TARGET = "nbdist.worker.coordinator:main"
_NAME = "coordinator"
_LOOPBACK = "127.0.0.1"


class Coordinators:
    """Those of one cluster.

    Whoever still holds an array of before holds a client of the service of before, and its process
    would end with that: so services end once nobody is connected to them.

    Args:
        seed: what they are forked from.
    """

    def __init__(self, seed: SeedProcess) -> None:
        self._seed = seed
        self._ports: dict[str, int] = {}

    def start(self, world_size: int, timeout_s: float) -> str:
        """One more, for so many processes.

        Returns:
            Its address, host:port.
        """
        mark = self._seed.count()
        name = f"{_NAME}{mark}"
        self._seed.spawn(name, _TARGET, {"host": _LOOPBACK, "world_size": world_size}, {})
        event = self._seed.wait_event("coordinator", timeout_s, since=mark)
        address: str = event["address"]
        self._ports[name] = int(address.rpartition(":")[2])
        return address

    def end_unused(self, ports: Collection[int]) -> None:
        """End those on other ports than these, which nobody waits for."""
        for name, port in list(self._ports.items()):
            if port not in ports:
                self._seed.signal(name, signal.SIGKILL)
                del self._ports[name]

    def end(self, timeout_s: float) -> None:
        """End all."""
        there = [name for name in self._seed.pids() if name.startswith(_NAME)]
        for name in there:
            self._seed.signal(name, signal.SIGKILL)
        self._seed.wait_gone(there, timeout_s)
        self._ports.clear()
