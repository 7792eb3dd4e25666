"""Engines on this machine, through ipyparallel's launcher interface.

`SeedProcess` is the notebook's handle on `nbdist.cluster.seed`; `SeedEngineSetLauncher` is the
launcher that ipyparallel's `Cluster` drives. It forks every engine from the seed, with its rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ipyparallel.cluster.launcher import EngineLauncher

from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nbdist.cluster.seed import Event

ENGINE_TARGET = "nbdist.worker.engine:main"
COORDINATOR_TARGET = "nbdist.worker.coordinator:main"
COORDINATOR = "coordinator"
_END_TIMEOUT_S = 10.0


def engine_name(rank: int) -> str:
    """How the seed calls an engine that was forked for a rank."""
    return f"rank-{rank}"


def spare_name(number: int) -> str:
    """How the seed calls an engine that waits for a rank, and that has one, later on."""
    return f"spare-{number}"


class SeedProcess:
    """A running seed: orders go in, events are kept and can be waited for.

    Args:
        modules: what the seed imports before it forks.
        env: environment added to this process's own.
        log_folder: where the seed and its children write.
    """

    def __init__(self, modules: Sequence[str], env: dict[str, str], log_folder: Path) -> None:
        self._log_folder = log_folder
        self._events: list[Event] = []
        self._pids: dict[str, int] = {}
        self._changed = threading.Condition()
        with (log_folder / "seed.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nbdist.cluster.seed", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | env,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._listen, name="nbdist-seed", daemon=True)
        self._thread.start()

    def spawn(self, name: str, target: str, args: dict[str, Any], env: dict[str, str]) -> None:
        """Fork a child that runs `target`; its output goes to `<name>.log`."""
        log = str(self._log_folder / f"{name}.log")
        self._order(op="spawn", id=name, target=target, args=args, env=env, log=log)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a child, if it still runs; returns when it has been sent.

        So an interrupt of one cell cannot arrive in the next.
        """
        mark = self.count()
        self._order(op="signal", id=name, signal=int(number))
        self.wait_event("signalled", _END_TIMEOUT_S, since=mark)

    def guard(self, pid: int) -> None:
        """Have the seed end this process too when the notebook's kernel is gone."""
        self._order(op="guard", pid=pid)

    def pids(self) -> dict[str, int]:
        """The children that run, by name."""
        with self._changed:
            return dict(self._pids)

    def runs(self) -> bool:
        """Whether the seed itself still runs."""
        return self._process.poll() is None

    def count(self) -> int:
        """How many events there have been: a mark to wait from."""
        with self._changed:
            return len(self._events)

    def wait_event(self, kind: str, timeout_s: float, since: int = 0) -> Event:
        """The first event of a kind after mark `since`.

        Raises:
            StartError: the time is over, or the seed ended or failed to import a module.
        """

        def found() -> Event | None:
            over = [e for e in self._events if e["event"] in ("failed", "ended")]
            wanted = [e for e in self._events[since:] if e["event"] == kind]
            return next(iter(wanted + over), None)

        with self._changed:
            event = self._changed.wait_for(found, timeout_s)
        if event is None:
            raise StartError(f"no {kind!r} from the preloaded parent within {timeout_s:g} s")
        if event["event"] == "failed":
            raise StartError(f"{event['module']} could not be imported: {event['error']}")
        if event["event"] == "ended":
            raise StartError(f"the preloaded parent ended; its log says:\n{self.log_tail('seed')}")
        return event

    def wait_gone(self, names: Sequence[str], timeout_s: float) -> None:
        """Wait until none of these children runs.

        Raises:
            StartError: one still runs when the time is over.
        """
        with self._changed:
            gone = self._changed.wait_for(
                lambda: not any(name in self._pids for name in names), timeout_s
            )
        if not gone:
            raise StartError(f"{', '.join(names)} did not end within {timeout_s:g} s")

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines that a child wrote outside of cells."""
        path = self._log_folder / f"{name}.log"
        if not path.exists():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """End every child and every guarded process, then the seed."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # frozen: its children die with it (seed.py)
            self._process.kill()
            self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise StartError(
                f"the preloaded parent is gone; its log says:\n{self.log_tail('seed')}"
            ) from None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._note(json.loads(line))
        self._note({"event": "ended"})

    def _note(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            if event["event"] == "spawned":
                self._pids[event["id"]] = event["pid"]
            elif event["event"] == "exited":
                self._pids.pop(event["id"], None)
            elif event["event"] == "ended":
                self._pids.clear()
            self._changed.notify_all()


class SeedEngineSetLauncher(EngineLauncher):  # type: ignore[misc]
    """Forks engines from a seed, each under a name of the seed's.

    Its own attributes come as keyword arguments of `Cluster.start_engines`: for each engine that
    is started first, its environment and its cores, in the order of `names`.
    """

    def __init__(
        self,
        *,
        seed: SeedProcess,
        names: list[str],
        own_env: list[dict[str, str]],
        cores: list[tuple[int, ...]],
        **kwargs: Any,
    ) -> None:
        self._seed = seed
        self._names = names
        self._own_env = own_env
        self._cores = cores
        super().__init__(**kwargs)

    @property
    def engine_count(self) -> int:
        return len(self._names)

    def find_args(self) -> list[str]:
        return [ENGINE_TARGET]

    async def start(self, n: int) -> None:
        self.n = n
        mark = self._seed.count()
        first, self._names = self._names, []
        for name, env, cores in zip(first, self._own_env, self._cores, strict=True):
            self.fork(name, env, cores)
        pids = [await self._spawned(name, mark) for name in first]
        self.notify_start({"pids": pids})

    def fork(self, name: str, env: dict[str, str], cores: tuple[int, ...]) -> None:
        """Order one more engine; nothing is waited for."""
        self._names.append(name)
        args = {"argv": self.engine_args, "cpus": list(cores)}
        self._seed.spawn(name, ENGINE_TARGET, args, {**self.get_env(), **env})

    async def _spawned(self, name: str, mark: int) -> int:
        deadline = time.monotonic() + _END_TIMEOUT_S
        while name not in self._seed.pids():
            if time.monotonic() > deadline:
                self._seed.wait_event("spawned", 0, since=mark)  # raises with the reason
                raise StartError(f"{name} ended at once:\n{self._seed.log_tail(name)}")
            await asyncio.sleep(0.01)
        return self._seed.pids()[name]

    async def stop(self) -> None:
        """Kill every engine and wait until all are gone; they are when the seed is."""
        if self._seed.runs():
            for name in self._names:
                self._seed.signal(name, signal.SIGKILL)
            self._seed.wait_gone(self._names, _END_TIMEOUT_S)
        self.notify_stop({"exit_code": 0})

    def signal(self, sig: int) -> None:
        for name in self._names:
            self._seed.signal(name, sig)


def repeat_until(done: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Ask until `done` or the time is over; returns the last answer."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True
