"""Clients of fork servers (`nbdist.cluster.forkserver.server`).

`ForkServerClient` sends commands and receives events. `ForkServerProcess` is the fork server on
this machine, and `ssh.remote_forkserver.RemoteForkServer` is one on another host.
"""

from __future__ import annotations

import abc
import contextlib
import os
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import psutil

from nbdist.cluster.forkserver.control_socket import (
    FORK_SERVER_SOCKET,
    KERNEL,
    LEAVE_S,
    Event,
    connect,
    connect_in,
    listen,
)
from nbdist.cluster.forkserver.logs import FORK_SERVER_LOG, log_file, read_tail
from nbdist.errors import OwnedError, StartError
from nbdist.utils.processes import await_ends, cause_of, is_alive

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nbdist.cluster.forkserver.control_socket import Peer

END_TIMEOUT_S = 10.0
_BEGIN_TIMEOUT_S = 60.0
_ANSWERED: Event = {"event": ""}
_POLL_S = 1.0
"""Time to wait for a response. Only a stopped or importing fork server takes longer."""


class ForkServerState:
    """State of a fork server, computed from its events. Thread-safe.

    Attributes:
        pid: the pid of the fork server on its host; 0 before the first event.
        gpus: the NVIDIA GPUs of its host; empty before it is ready.
        cores: the CPU cores that its children may use.
        versions: the versions of the imported modules.
        is_ready: True if the fork server has imported its modules.
        is_requested: True if a notebook asks a detached runner to leave the cluster.
        is_over: True if the fork server has ended or is lost.
        changed: the condition that each change notifies.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pid = 0
        self.gpus: tuple[str, ...] = ()
        self.cores: tuple[int, ...] = ()
        self.versions: dict[str, str] = {}
        self.is_ready = False
        self.is_requested = False
        self.is_over = False
        self._events: list[Event] = []
        self._pids: dict[str, int] = {}
        self._codes: dict[str, int | None] = {}  # None if the exit code is unknown

    def pids(self) -> dict[str, int]:
        """Return the children that run, by name."""
        with self.changed:
            return dict(self._pids)

    def has_child(self, name: str) -> bool:
        """Return True if a child of this name runs or has ended."""
        with self.changed:
            return name in self._pids or name in self._codes

    def forget(self, name: str) -> None:
        """Forget the end of an earlier child, before a new one of this name is forked."""
        with self.changed:
            self._codes.pop(name, None)

    def code(self, name: str) -> int | None:
        """Return the exit code of a child; None if it runs or the code is unknown."""
        with self.changed:
            return self._codes.get(name)

    def count(self) -> int:
        """Return the number of events, for use as the mark `since` of `wait_event`."""
        with self.changed:
            return len(self._events)

    def wait_event(self, kind: str, timeout_s: float, since: int = 0) -> Event | None:
        """Wait for the first event of a kind after mark `since`, a failure, or the end.

        Returns:
            The event; None if none arrives in time.
        """

        def found() -> Event | None:
            over = [e for e in self._events if e["event"] in ("failed", "ended")]
            wanted = [e for e in self._events[since:] if e["event"] == kind]
            return next(iter(wanted + over), None)

        with self.changed:
            return self.changed.wait_for(found, timeout_s)

    def delete_event(self, answer: Event, since: int) -> None:
        """Delete the event that responded to a command."""
        with self.changed:
            self._events[self._events.index(answer, since)] = _ANSWERED

    def wait_ended(self, names: Sequence[str], timeout_s: float) -> bool:
        """Wait until none of these children runs, and return whether all ended in time."""
        with self.changed:
            return self.changed.wait_for(lambda: self._pids.keys().isdisjoint(names), timeout_s)

    def wait_end(self, timeout_s: float) -> None:
        """Wait until the fork server has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_over, timeout_s)

    def note(self, event: Event) -> None:
        """Store an event, and update the state."""
        with self.changed:
            self._events.append(event)
            if event["event"] == "spawned":
                self._pids[event["id"]] = event["pid"]
            elif event["event"] == "exited" and self._pids.get(event["id"]) == event["pid"]:
                del self._pids[event["id"]]
                self._codes[event["id"]] = event["code"]
            elif event["event"] == "owned":
                self._store_state(event)
            elif event["event"] == "ready":
                self.versions, self.gpus = event["versions"], tuple(event["gpus"])
                self.is_ready = True
            elif event["event"] == "leave":
                self.is_requested = True
            elif event["event"] == "ended":
                self._codes |= dict.fromkeys(self._pids)
                self._pids.clear()
                self.is_over = True
            self.changed.notify_all()

    def _store_state(self, owned: Event) -> None:
        """Store the whole state. The exit codes of children that have ended since are unknown."""
        self._codes |= dict.fromkeys(self._pids.keys() - owned["children"].keys())
        self.pid, self._pids = owned["pid"], owned["children"]
        self.versions, self.gpus = owned["versions"], tuple(owned["gpus"])
        self.cores, self.is_ready = tuple(owned["cores"]), owned["ready"]


class ForkServerClient(abc.ABC):
    """Owner's connection to a fork server: sends commands, and stores events in its state.

    Args:
        peer: the new connection.
        role: `KERNEL` or `DETACHED_RUNNER`.
        timeout_s: the seconds to wait for another owner to leave.
        key: the key that identifies this owner when it reconnects; empty if it never does.

    Attributes:
        role: the role of this process.
        state: the state of the fork server.

    Raises:
        OwnedError: the kernel of another notebook owns the fork server.
        StartError: the fork server does not respond.
    """

    def __init__(self, peer: Peer, role: str, timeout_s: float, key: str = "") -> None:
        self.role = role
        self.state = ForkServerState()
        self._peer = peer
        self._key = key
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="nbdist-forkserver", daemon=True)
        self._own(peer)
        self._thread.start()

    def _own(self, peer: Peer) -> None:
        answer: list[Event] = []
        with contextlib.suppress(OSError, EOFError):
            peer.send({"op": "own", "role": self.role, "key": self._key})
            if peer.wait(self._timeout_s):
                answer = peer.read()
        if answer and answer[0]["event"] == "owned":
            for event in answer:
                self.state.note(event)
            return
        peer.close()
        if answer and answer[0]["event"] == "refused":
            raise OwnedError(answer[0]["pid"])
        raise StartError(f"{self} did not respond:\n{self.log_tail(FORK_SERVER_LOG)}".rstrip(":\n"))

    def spawn(self, name: str, target: str, args: dict[str, Any], env: dict[str, str]) -> None:
        """Fork a child that runs `target` and writes its output to `<name>.log`.

        Args:
            name: the name of the child.
            target: the function to call, as `module:function`.
            args: the arguments of the function, as JSON.
            env: the environment variables to add.
        """
        self.state.forget(name)
        self._send_command(op="spawn", id=name, target=target, args=args, env=env)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a child if it still runs, and wait until it has been sent.

        Because of the wait, an interrupt of one cell cannot arrive in the next.
        """
        self._ask("signalled", END_TIMEOUT_S, op="signal", id=name, signal=int(number))

    def poll(self) -> dict[str, tuple[int, bool]]:
        """Return the memory in bytes of each running child, and whether a signal has stopped it.

        Empty if the fork server does not respond.
        """
        try:
            answer = self._ask("children", _POLL_S, op="list_children")
        except StartError:
            return {}
        return {name: (size, frozen) for name, (size, frozen) in answer["children"].items()}

    def guard(self, pid: int) -> None:
        """Let the fork server end this process too when the notebook's kernel is gone."""
        self._send_command(op="guard", pid=pid)

    def runs(self) -> bool:
        """Return True if the fork server itself still runs."""
        return not self.state.is_over

    def preload(self, module: str) -> None:
        """Let the fork server import a module, if it is installed."""
        self._send_command(op="preload", module=module)

    def detach(self, *, on: bool) -> None:
        """Set whether engines outlive this process. If so, a detached runner will follow them."""
        self._send_command(op="detach", on=on)

    def await_ready(self, timeout_s: float) -> dict[str, str]:
        """Wait until the fork server has imported its modules, and return their versions.

        Raises:
            StartError: see `wait_event`.
        """
        if not self.state.is_ready:
            self.wait_event("ready", timeout_s)
        return self.state.versions

    def wait_event(self, kind: str, timeout_s: float, since: int = 0) -> Event:
        """Return the first event of a kind after mark `since`.

        Raises:
            StartError: no such event arrived in time, or the fork server ended or failed to import
                a module.
        """
        event = self.state.wait_event(kind, timeout_s, since)
        if event is None:
            raise StartError(f"no event {kind!r} from {self} within {timeout_s:g} s")
        if event["event"] == "failed":
            raise StartError(f"{event['module']} could not be imported: {event['error']}")
        if event["event"] == "ended":
            raise StartError(
                f"{self} ended; the last lines of its log:\n{self.log_tail(FORK_SERVER_LOG)}"
            )
        return event

    def wait_ended(self, names: Sequence[str], timeout_s: float) -> None:
        """Wait until none of these children runs.

        Raises:
            StartError: a child still runs after the timeout.
        """
        if not self.state.wait_ended(names, timeout_s):
            raise StartError(f"{', '.join(names)} did not end within {timeout_s:g} s")

    @abc.abstractmethod
    def log_tail(self, name: str, lines: int = 20) -> str:
        """Return the last lines that a child wrote outside of cells; empty if not available."""

    def describe_end(self, name: str, lines: int) -> str:
        """Describe how a child ended, if known, with the last lines of its log."""
        code = self.state.code(name)
        log = self.log_tail(name, lines)
        parts = [cause_of(code)] if code is not None else []
        return "\n".join(parts + ([f"the last lines of its log:\n{log}"] if log else []))

    def _ask(self, kind: str, timeout_s: float, **command: Any) -> Event:
        """Send a command, wait for the event that responds to it, and delete that event."""
        mark = self.state.count()
        self._send_command(**command)
        answer = self.wait_event(kind, timeout_s, since=mark)
        self.state.delete_event(answer, mark)
        return answer

    def _send_command(self, **command: Any) -> None:
        try:
            with self._sending:
                self._peer.send(command)
        except OSError:
            raise StartError(
                f"{self} is gone; its log:\n{self.log_tail(FORK_SERVER_LOG)}"
            ) from None

    def _end_connection(self) -> None:
        self._peer.shut()
        self._thread.join()
        self._peer.close()

    def _listen(self) -> None:
        try:
            self._receive()
            while self._connects_again():
                self._receive()
        finally:
            self.state.note({"event": "ended"})

    def _receive(self) -> None:
        """Store events until the connection ends."""
        with contextlib.suppress(EOFError):
            while True:
                for event in self._peer.read():
                    self.state.note(event)

    def _connects_again(self) -> bool:
        """Reconnect after the connection has ended, and return whether this succeeded."""
        return False


class ForkServerProcess(ForkServerClient):
    """Fork server on this machine.

    It ends when this process exits normally, or when this object is garbage-collected or closed.

    Args:
        peer: the new connection.
        role: `KERNEL` or `DETACHED_RUNNER`.
        folder: the cluster's folder. Its subfolder `log` contains the logs.
        timeout_s: the seconds to wait for another owner to leave.
        process: the process of the fork server, if it is a child of this process.

    Raises:
        OwnedError: the kernel of another notebook owns the fork server.
        StartError: the fork server does not respond.
    """

    def __init__(
        self,
        peer: Peer,
        role: str,
        folder: Path,
        timeout_s: float,
        process: psutil.Popen | None = None,
    ) -> None:
        self.folder = folder
        super().__init__(peer, role, timeout_s)
        self._process = process or psutil.Process(self.state.pid)
        self._finalizer = weakref.finalize(self, _disconnect, peer, os.getpid(), leaves=True)

    def __str__(self) -> str:
        return "the fork server"

    @classmethod
    def start(
        cls,
        modules: Sequence[str],
        env: dict[str, str],
        folder: Path,
        grace_s: float,
        role: str = KERNEL,
    ) -> Self:
        """Start a fork server and become its owner.

        Args:
            modules: the modules that it imports before it forks.
            env: the environment variables to add to those of this process.
            folder: the cluster's folder, with a subfolder `log`.
            grace_s: the seconds that it waits for another owner after this process has died.
            role: the role of this process.
        """
        path = folder / FORK_SERVER_SOCKET
        with listen(path) as listener, log_file(folder, FORK_SERVER_LOG).open("ab") as log:
            descriptor = listener.fileno()
            program = [sys.executable, "-m", "nbdist.cluster.forkserver.server"]
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
        """Become the owner of a fork server whose owner is gone or is a detached runner.

        Raises:
            OwnedError: the kernel of another notebook owns the fork server.
            StartError: there is no fork server.
        """
        try:
            peer = connect_in(folder)
        except OSError as error:
            raise StartError(f"the cluster in {folder} has ended: no fork server runs") from error
        return cls(peer, role, folder, LEAVE_S + END_TIMEOUT_S)

    def runs(self) -> bool:
        return is_alive(self._process)

    def log_tail(self, name: str, lines: int = 20) -> str:
        return read_tail(self.folder, name, lines)

    def leave(self) -> None:
        """Close the connection only: the fork server waits for another owner."""
        self._finalizer.detach()
        self._end_connection()

    def close(self) -> None:
        """End every child and every guarded process, then the fork server."""
        if self._finalizer.detach() is None:
            return
        _disconnect(self._peer, os.getpid(), leaves=False)
        for process in await_ends([self._process], END_TIMEOUT_S):  # a signal has stopped it
            process.kill()  # its children die with it (server.py)
            await_ends([process], END_TIMEOUT_S)
        if isinstance(self._process, psutil.Popen):  # its threads may end slightly later
            self._process.wait(END_TIMEOUT_S)
        self._end_connection()


def _disconnect(peer: Peer, pid: int, *, leaves: bool) -> None:
    """Tell the fork server to end. Do nothing in a process that was forked from the owner.

    Args:
        peer: the connection to the fork server.
        pid: the pid of the owner.
        leaves: True if the fork server removes the cluster's folder, because the owner does not.
    """
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            peer.send({"op": "disconnect", "leaves": leaves})
