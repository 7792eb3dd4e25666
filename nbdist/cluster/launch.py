"""Engines on this machine, through ipyparallel's launcher interface.

`SeedProcess` is the notebook's handle on `nbdist.cluster.seed`; `SeedEngineSetLauncher` is the
launcher that ipyparallel's `Cluster` drives. It forks every engine from the seed, with its rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Self

import psutil
from ipyparallel.cluster.launcher import EngineLauncher

from nbdist.cluster.alive import await_ends, is_alive
from nbdist.cluster.seat import KERNEL, LEAVE_S, SEED_SOCKET, connect, listen
from nbdist.errors import OwnedError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nbdist.cluster.seat import Event, Peer

ENGINE_TARGET = "nbdist.worker.engine:main"
_OF_RANK, _SPARE = "rank-", "spare-"
_END_TIMEOUT_S = 10.0
_BEGIN_TIMEOUT_S = 60.0


def engine_name(rank: int) -> str:
    """How the seed calls an engine that was forked for a rank."""
    return f"{_OF_RANK}{rank}"


def spare_name(number: int) -> str:
    """How the seed calls an engine that waits for a rank, and that has one, later on."""
    return f"{_SPARE}{number}"


def is_engine(name: str) -> bool:
    """Whether the seed calls an engine so."""
    return name.startswith((_OF_RANK, _SPARE))


class SeedProcess:
    """A running seed: orders go in, events are kept and can be waited for.

    When this process ends in order, or forgets the seed, the seed ends too (`close`).

    Args:
        peer: the connection, on which nothing has been said.
        role: `KERNEL` or `KEEPER`.
        folder: the cluster's; the seed and its children write in its `log`.
        timeout_s: how long another owner may take to leave.
        process: the seed's, where it is a child of this one.

    Attributes:
        pid: the seed's.
        versions: of the modules that it had imported when it was owned.
        is_wanted: a notebook asks for the cluster that this keeper has.

    Raises:
        OwnedError: a notebook's kernel is there that orders the seed about.
        StartError: there is no answer.
    """

    def __init__(
        self,
        peer: Peer,
        role: str,
        folder: Path,
        timeout_s: float,
        process: psutil.Popen | None = None,
    ) -> None:
        self._peer = peer
        self._log_folder = folder / "log"
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self.role = role
        self.is_wanted = False
        owned = self._own(role, timeout_s)
        self._pids: dict[str, int] = owned["children"]
        self._codes: dict[str, int] = {}
        self.versions: dict[str, str] = owned["versions"]
        self.pid: int = owned["pid"]
        self._process = process or psutil.Process(self.pid)
        self._farewell = weakref.finalize(self, _say_farewell, peer, os.getpid(), leaves=True)
        self._thread = threading.Thread(target=self._listen, name="nbdist-seed", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        modules: Sequence[str],
        env: dict[str, str],
        folder: Path,
        grace_s: float,
        role: str = KERNEL,
    ) -> Self:
        """Start a seed, and own it.

        Args:
            modules: what it imports before it forks.
            env: environment added to this process's own.
            folder: the cluster's, with a folder `log`.
            grace_s: how long it waits for another owner when this process has died.
            role: this process's.
        """
        path = folder / SEED_SOCKET
        with listen(path) as listener, (folder / "log" / "seed.log").open("ab") as log:
            descriptor = listener.fileno()
            program = [sys.executable, "-m", "nbdist.cluster.seed"]
            process = psutil.Popen(
                [*program, str(descriptor), str(folder), str(grace_s), *modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | env,
                start_new_session=True,
                pass_fds=[descriptor],
            )
        try:
            return cls(connect(path), role, folder, _BEGIN_TIMEOUT_S, process)
        except BaseException:
            process.kill()
            process.wait()
            raise

    @classmethod
    def take_over(cls, folder: Path, role: str) -> Self:
        """Own the seed of a cluster whose owner is gone, or is a keeper.

        Raises:
            OwnedError: a notebook's kernel owns it.
            StartError: there is none.
        """
        try:
            peer = connect(folder / SEED_SOCKET)
        except OSError as error:
            raise StartError(f"nothing of the cluster in {folder} runs any more") from error
        return cls(peer, role, folder, LEAVE_S + _END_TIMEOUT_S)

    def _own(self, role: str, timeout_s: float) -> Event:
        answer: list[Event] = []
        with contextlib.suppress(OSError, EOFError):
            self._peer.send({"op": "own", "role": role})
            if self._peer.wait(timeout_s):
                answer = self._peer.read()
        if answer and answer[0]["event"] == "owned":
            self._events += answer[1:]
            return answer[0]
        self._peer.close()
        if answer and answer[0]["event"] == "refused":
            raise OwnedError(answer[0]["pid"])
        raise StartError(f"the preloaded parent did not answer:\n{self.log_tail('seed')}")

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
        return is_alive(self._process)

    def detach(self, *, on: bool) -> None:
        """Whether engines outlive this process: a keeper is started then."""
        self._order(op="detach", on=on)

    def leave(self) -> None:
        """Go without a farewell: the seed waits for another owner."""
        self._farewell.detach()
        self._end_connection()

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

    def last_words(self, name: str, lines: int) -> str:
        """How a child ended that runs no more, as far as is known, and the end of its log."""
        with self._changed:
            code = self._codes.get(name)
        log = self.log_tail(name, lines)
        said = [_cause(code)] if code is not None else []
        return "\n".join(said + ([f"the last lines of its log:\n{log}"] if log else []))

    def close(self) -> None:
        """End every child and every guarded process, then the seed."""
        if self._farewell.detach() is None:
            return
        _say_farewell(self._peer, os.getpid(), leaves=False)
        for process in await_ends([self._process], _END_TIMEOUT_S):  # frozen
            process.kill()  # its children die with it (seed.py)
            await_ends([process], _END_TIMEOUT_S)
        if isinstance(self._process, psutil.Popen):  # its threads may take a moment
            self._process.wait(_END_TIMEOUT_S)
        self._end_connection()

    def _end_connection(self) -> None:
        self._peer.shut()
        self._thread.join()
        self._peer.close()

    def _order(self, **order: Any) -> None:
        try:
            self._peer.send(order)
        except OSError:
            raise StartError(
                f"the preloaded parent is gone; its log says:\n{self.log_tail('seed')}"
            ) from None

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                for event in self._peer.read():
                    self._note(event)
        self._note({"event": "ended"})

    def _note(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            if event["event"] == "spawned":
                self._pids[event["id"]] = event["pid"]
            elif event["event"] == "exited" and self._pids.get(event["id"]) == event["pid"]:
                del self._pids[event["id"]]
                self._codes[event["id"]] = event["code"]
            elif event["event"] == "leave":
                self.is_wanted = True
            elif event["event"] == "ended":
                self._pids.clear()
            self._changed.notify_all()


def _cause(code: int) -> str:
    """How a process ended, by its exit status."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL), as when a machine has no memory left"
    return f"its process was killed by signal {-code} ({signal.strsignal(-code)})"


def _say_farewell(peer: Peer, pid: int, *, leaves: bool) -> None:
    """Said by the owner, not by a process that was forked from it.

    Args:
        peer: the seed.
        pid: the owner's.
        leaves: it does not remove the cluster's folder itself, as it ends.
    """
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            peer.send({"op": "farewell", "leaves": leaves})


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
