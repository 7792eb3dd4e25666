"""The seeds of all hosts as one: which host an engine is on, and how both reach each other."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from nbdist.cluster import environment
from nbdist.cluster.away import AwaySeed
from nbdist.cluster.seat import KERNEL
from nbdist.cluster.seeds import SeedLink, SeedProcess
from nbdist.cluster.ssh import Connection
from nbdist.errors import NbdistError, OwnedError, StartError, UsageError
from nbdist.records import SocketAddress, Sowing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from nbdist.records import ClusterRequest, Door, Framework, Host, Sown

PRELOADED = ("ipyparallel.engine.app", "nbdist.worker.engine", "nbdist.worker.setup")
LOOPBACK = "127.0.0.1"
HOME = ""
"""The key of this machine among hosts."""

_STEPS: dict[Framework, tuple[str, ...]] = {
    "tensorflow": ("nbdist.worker.mirrored", "nbdist.worker.mirrored_step"),
    "jax": ("nbdist.worker.pjrt", "nbdist.worker.pjrt_step"),
}
_KERAS = ("keras",) if importlib.util.find_spec("keras") else ()
"""Engines with a framework import it where it is installed; TensorFlow does by itself."""

_AT_ONCE = 32


class Fleet:
    """Made by `start` or `take_over`.

    Args:
        home: this machine's seed, which is there also where no engine is on this machine.
        request: what was asked for.
        grace_s: how long seeds wait for another owner.
        ssh_config: of ssh; empty for the user's own.

    Attributes:
        home: this machine's seed.
        unreached: why hosts were not reached when that was last tried, by their keys.
    """

    def __init__(
        self, home: SeedProcess, request: ClusterRequest, grace_s: float, ssh_config: str
    ) -> None:
        self.home = home
        self.unreached: dict[str, str] = {}
        self._grace_s = grace_s
        self._ssh_config = ssh_config
        self._away: dict[str, AwaySeed] = {}
        self._hosts: dict[str, Host] = {}
        self.resize(request)
        self._controller: dict[str, Any] = {}
        self._doors: set[int] = set()

    @classmethod
    def start(
        cls,
        request: ClusterRequest,
        folder: Path,
        grace_s: float,
        ssh_config: str = "",
        role: str = KERNEL,
    ) -> Self:
        """Start this machine's seed; `reach` the others next.

        Args:
            request: what was asked for.
            folder: the cluster's, with a folder `log`.
            grace_s: how long seeds wait for another owner when this process has died.
            ssh_config: of ssh; empty for the user's own.
            role: this process's.
        """
        here = any(not host.name for host in request.hosts)
        modules = _modules(request) if here else ()
        env = environment.shared(request)
        home = SeedProcess.start(modules, env, folder, grace_s, role)
        return cls(home, request, grace_s, ssh_config)

    def lacks(self, request: ClusterRequest) -> list[str]:
        """The hosts of a request that are new."""
        keys = dict.fromkeys(host.key for host in request.hosts if host.name)
        return [key for key in keys if key not in self._hosts]

    def require(self, request: ClusterRequest) -> str:
        """Connect to hosts that are new in a request, before those that there are let go.

        Raises:
            UsageError: one cannot be reached; all is as it was.
        """
        before, fresh = self._hosts, self.lacks(request)
        self._hosts = {**before, **{host.key: host for host in request.hosts if host.name}}
        failed = self._each(fresh, self._start)
        if failed:
            self._hosts = before
            there = [key for key in fresh if key in self._away]
            self._each(there, lambda key: self._away.pop(key).close())
            raise UsageError("\n".join(f"{key}: {reason}" for key, reason in failed.items()))
        return ", ".join(fresh)

    def resize(self, request: ClusterRequest) -> None:
        """Other hosts are asked for; those that are not any more are let go."""
        self._request = request
        self._hosts = {host.key: host for host in request.hosts if host.name}
        self._each(self._away.keys() - self._hosts.keys(), lambda key: self._away.pop(key).close())

    def take_over(self, sown: Mapping[str, Sown]) -> None:
        """Own the seeds of other hosts that another process has started; some may be gone."""

        def own(key: str) -> None:
            where = self._where(key)
            there = self._hosts[key], sown[key], *where
            self._away[key] = AwaySeed.take_over(*there, self.home.role, self.home.guard)

        self.unreached = self._each([key for key in self._hosts if key in sown], own)

    def reach(self) -> str:
        """Connect to the other hosts that are not connected, all at once, and start seeds there.

        Returns:
            What came of it, in words. Why hosts were not reached is in `unreached`.
        """
        self.unreached = self._each(self.lost(), self._start)
        reached = len(self._hosts) - len(self.unreached)
        failed = "; ".join(f"{key}: {reason}" for key, reason in self.unreached.items())
        return f"{reached} of {len(self._hosts)}" + (f" ({failed})" if failed else "")

    def _start(self, key: str) -> None:
        host, (link, folder, name) = self._hosts[key], self._where(key)
        sowing = Sowing(
            name=f"nbdist-{folder.name}-{name}-{time.time_ns() % 10**9}",
            modules=_modules(self._request),
            env=environment.shared(self._request),
            work=host.folder or str(folder.cwd()),
            grace_s=self._grace_s,
        )
        if key in self._away:
            self._away.pop(key).close()
        link.close()  # what a former process may have left
        seed = AwaySeed.start(host, sowing, link, folder, name, self.home.role, self.home.guard)
        self._away[key] = seed
        if self._controller:
            seed.introduce(self._controller)
        seed.bring(sorted(self._doors))

    def _where(self, key: str) -> tuple[Connection, Path, str]:
        """A connection that is not open, the folder of its sockets, and how they are called."""
        name = f"h{zlib.crc32(key.encode()):08x}"
        link = Connection(self._hosts[key], self.home.folder, name, self._ssh_config)
        return link, self.home.folder, name

    def lost(self) -> list[str]:
        """The hosts that have no seed."""
        return [key for key in self._hosts if not self._runs(key)]

    def raise_for_lost(self, keys: Iterable[str]) -> None:
        """Raises StartError where one of these hosts has no seed."""
        for key in self.lost():
            if key in keys:
                raise StartError(
                    f"{key} cannot be reached: {self.unreached.get(key, 'it is gone')}"
                )

    def _runs(self, key: str) -> bool:
        return key in self._away and self._away[key].runs()

    def _each(self, keys: Iterable[str], work: Callable[[str], None]) -> dict[str, str]:
        """Do it for each, all at once; what went wrong, by key."""

        def attempt(key: str) -> str:
            try:
                work(key)
            except OwnedError:
                raise
            except (NbdistError, OSError) as error:
                return str(error)
            return ""

        keys = list(keys)
        with ThreadPoolExecutor(_AT_ONCE, "nbdist-reach") as pool:
            outcomes = zip(keys, pool.map(attempt, keys), strict=True)
            return {key: said for key, said in outcomes if said}

    @property
    def sown(self) -> dict[str, Sown]:
        """Where the seeds of other hosts are."""
        return {key: seed.sown for key, seed in self._away.items()}

    def await_imports(self, timeout_s: float) -> dict[str, dict[str, str]]:
        """Wait until all seeds have imported what they import.

        Returns:
            The versions of that, by the keys of the hosts that have engines.

        Raises:
            StartError: one could not, or has ended; it names the host.
        """
        found = {}
        for key, seed in self._seeds().items():
            if self._runs(key) or key == HOME:
                versions = seed.wait_event("ready", timeout_s)["versions"]
                if key or not self._hosts or any(not h.name for h in self._request.hosts):
                    found[key] = versions
        return found

    # Where things are, as the engines of a host see them.

    def introduce(self, controller: Path) -> None:
        """Tell all of ipyparallel's controller, by its file for engines."""
        self._controller = json.loads(controller.read_text())
        self._at_once(lambda seed: seed.introduce(self._controller))

    def open_doors(self, ports: Sequence[int]) -> None:
        """See that engines of all hosts reach these ports of this machine."""
        self._doors.update(ports)
        self._at_once(lambda seed: seed.bring(ports))

    def _at_once(self, work: Callable[[AwaySeed], None]) -> None:
        for reason in self._each(self._away, lambda key: work(self._away[key])).values():
            raise StartError(reason)

    def folder(self, host: str) -> str:
        """Of the cluster, on this host."""
        return self._away[host].sown.folder if host else str(self.home.folder)

    def env(self, host: str) -> dict[str, str]:
        """What engines are told on this host."""
        return self._away[host].env() if host else {}

    def door(self, host: str, door: Door) -> SocketAddress:
        """A socket of this machine, as ZeroMQ reaches it from there."""
        if host == HOME:
            return door.address
        url = f"ipc://{self._away[host].prefix()}:{door.port}"
        return SocketAddress(url=url, server_key=door.public_key)

    def service(self, host: str, port: int) -> str:
        """A port of this machine, as gRPC reaches it from there."""
        return f"unix:{self._away[host].prefix()}:{port}" if host else f"{LOOPBACK}:{port}"

    def address(self, host: str) -> str:
        """To which engines of other hosts connect."""
        if host:
            return self._hosts[host].address or self._away[host].sown.address or host
        given = [h.address for h in self._request.hosts if not h.name and h.address]
        seen = [seed.sown.from_address for seed in self._away.values()]
        return next(filter(None, (*given, *seen)), LOOPBACK)

    def connection(self, host: str) -> str:
        """How this machine reaches it, in words."""
        if host == HOME:
            return "this machine"
        began = time.perf_counter()
        answered = bool(self._runs(host) and self._away[host].look())
        round_ms = 1000 * (time.perf_counter() - began)
        return f"ssh, answers in {round_ms:.1f} ms" if answered else "cannot be reached"

    def gpus(self, host: str) -> tuple[str, ...]:
        """The NVIDIA GPUs that it has."""
        return self._seeds()[host].gpus if host in self._seeds() else ()

    # Children.

    def _seeds(self) -> dict[str, SeedLink]:
        return {HOME: self.home, **self._away}

    def spawn(
        self, host: str, name: str, target: str, args: dict[str, Any], env: dict[str, str]
    ) -> None:
        """Fork a child there."""
        self._seeds()[host].spawn(name, target, args, env)

    def pids(self) -> dict[str, int]:
        """The children that run, by name."""
        return {name: pid for seed in self._seeds().values() for name, pid in seed.pids().items()}

    def look(self) -> dict[str, tuple[int, bool]]:
        """See `SeedLink.look`; of hosts that can be reached."""
        found: dict[str, tuple[int, bool]] = {}
        for key, seed in self._seeds().items():
            if key not in self.cut():
                found |= seed.look()
        return found

    def cut(self) -> list[str]:
        """The hosts whose connections are gone, for good or for the moment."""
        return [key for key, seed in self._away.items() if seed.is_cut or not seed.runs()]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a child, if it still runs; returns when it has been sent.

        On a host that cannot be reached, none hears it.
        """
        for key, seed in self._seeds().items():
            if name in seed.pids() and key not in self.cut():
                with contextlib.suppress(*([StartError] if key else [])):  # it is cut off just now
                    seed.signal(name, number)

    def kill(self, names: Sequence[str], timeout_s: float) -> None:
        """Kill these, and wait until they are gone; they are when their seed is.

        Raises:
            StartError: one still runs when the time is over.
        """
        for seed in self._seeds().values():
            own = [name for name in names if name in seed.pids()]
            try:
                for name in own if seed.runs() else ():
                    seed.signal(name, signal.SIGKILL)
            except StartError:
                if seed.runs():
                    raise
            seed.wait_gone(own, timeout_s)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """See `SeedLink.log_tail`."""
        return next((s.log_tail(name, lines) for s in self._knowing(name)), "")

    def last_words(self, name: str, lines: int) -> str:
        """See `SeedLink.last_words`."""
        return next((s.last_words(name, lines) for s in self._knowing(name)), "")

    def _knowing(self, name: str) -> list[SeedLink]:
        return [seed for seed in self._seeds().values() if seed.knows(name)]

    def raise_for_ended(self) -> None:
        """Raises StartError where this machine's seed has ended, with its last words."""
        if not self.home.runs():
            self.home.wait_event("ended", 1.0)
            raise StartError(f"the preloaded parent ended:\n{self.home.log_tail('seed')}")

    # Owners.

    def leave(self) -> None:
        """Go without a farewell: the seeds wait for another owner."""
        for seed in self._away.values():
            seed.leave()
        self.home.leave()

    def detach(self, *, on: bool) -> None:
        """Whether engines outlive this process."""
        for key, seed in self._away.items():
            if key not in self.cut():
                seed.detach(on=on)
        self.home.detach(on=on)

    def close(self) -> None:
        """End every child of every seed, and these. May be called more than once.

        No thread is started for it: there is none any more as Python ends.
        """
        with contextlib.ExitStack() as steps:
            steps.callback(self.home.close)
            for seed in self._away.values():
                steps.callback(seed.close)
                seed.bid_farewell()


def _modules(request: ClusterRequest) -> tuple[str, ...]:
    """What a seed imports whose engines load these frameworks."""
    frameworks = request.frameworks
    steps = (name for framework in frameworks for name in _STEPS[framework])
    return *frameworks, *(_KERAS if frameworks else ()), *PRELOADED, *steps
