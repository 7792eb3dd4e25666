"""ipyparallel launcher that forks one engine for each rank from the fork servers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from ipyparallel.cluster.launcher import EngineLauncher

from nbdist.cluster.forkserver.client import END_TIMEOUT_S
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.cluster.fleet import Fleet

ENGINE_TARGET = "nbdist.worker.engine:main"


class ForkServerEngineSetLauncher(EngineLauncher):  # type: ignore[misc]
    """Launcher of engines as children of their hosts' fork servers.

    `Cluster.start_engines` passes the keyword arguments.

    Args:
        fleet: the fork servers.
        names: the names of the first engines.
        on: the key of each engine's host, in the order of `names`.
        own_env: the environment variables of each engine.
        cores: the CPU cores of each engine.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        names: list[str],
        on: list[str],
        own_env: list[dict[str, str]],
        cores: list[tuple[int, ...]],
        **kwargs: Any,
    ) -> None:
        self._fleet = fleet
        self._names = names
        self._first = list(zip(on, own_env, cores, strict=True))
        super().__init__(**kwargs)

    @property
    def engine_count(self) -> int:
        return len(self._names)

    def find_args(self) -> list[str]:
        return [ENGINE_TARGET]

    async def start(self, n: int) -> None:
        self.n = n
        first, self._names = self._names, []
        for name, own in zip(first, self._first, strict=True):
            self.fork(name, *own)
        lost, hosts = self._fleet.lost(), [own[0] for own in self._first]
        await self._spawned([n for n, host in zip(first, hosts, strict=True) if host not in lost])
        self._fleet.raise_for_lost(hosts)
        pids = self._fleet.pids()
        self.notify_start({"pids": [pids[name] for name in first if name in pids]})

    def fork(self, name: str, host: str, env: dict[str, str], cores: tuple[int, ...]) -> None:
        """Request one more engine without waiting for it. Do nothing if its host is lost."""
        if host in self._fleet.lost():
            return
        self._names.append(name)
        argv = [*self.engine_args, f"--ProfileDir.location={self._fleet.folder(host)}"]
        args = {"argv": argv, "cpus": list(cores)}
        env = {**self.get_env(), **self._fleet.env(host), **env}
        self._fleet.spawn(host, name, ENGINE_TARGET, args, env)

    async def _spawned(self, names: Sequence[str]) -> None:
        """Wait until these engines were forked. They may have ended since."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while lacking := [name for name in names if not self._fleet.was_forked(name)]:
            if time.monotonic() > deadline:
                self._fleet.raise_for_ended()
                log = self._fleet.log_tail(lacking[0])
                raise StartError(f"{lacking[0]} was not forked in {END_TIMEOUT_S:g} s:\n{log}")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Kill every engine and wait until all are gone."""
        self._fleet.kill(self._names, END_TIMEOUT_S)
        self.notify_stop({"exit_code": 0})

    def signal(self, sig: int) -> None:
        for name in self._names:
            self._fleet.signal(name, sig)
