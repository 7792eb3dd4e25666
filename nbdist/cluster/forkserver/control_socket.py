"""Control socket of the fork server: one owner at a time, over a socket in the cluster's folder.

A client asks for ownership with `own`, as a notebook's kernel or as the detached runner. Each line
is one JSON object:

    client → fork server                       fork server → client
    {"op": "own", "role", "key"}        {"event": "owned", "pid", "children", "versions", "gpus"}
                                        {"event": "refused", "pid"}

A kernel remains the owner until its connection closes. When a kernel asks while a detached runner
is the owner, the fork server asks the runner to leave (`{"event": "leave"}`). It kills a runner
that does not. If the connection closes without `disconnect`, the fork server waits for a new owner
for some time. If the run is detached, it starts a detached runner.

An owner on another host connects through ssh, whose connections may break unnoticed. It therefore
sends heartbeats, and counts as gone without them. Its key identifies it when it reconnects. The
fork server then ends the former connection, with everything that went through it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Event = dict[str, Any]

FORK_SERVER_SOCKET = "forkserver.sock"
_OLD_SOCKET = "seed.sock"
"""Name of the socket before nbdist 0.2.0."""

KERNEL, DETACHED_RUNNER = "kernel", "detached runner"
LEAVE_S = 20.0
"""Time for a detached runner to leave before it is killed. It may still be replacing a worker."""

MAX_DETACHED_RUNNERS = 3
"""Number of detached runners that are started in a row, each after the former has ended."""

SILENCE_S = 30.0
"""Time without a message after which an owner on another host counts as gone."""

_CREDENTIALS = struct.Struct("3i")


class Peer:
    """One end of a connection that transfers JSON objects, one in a line.

    Attributes:
        role: the role that the client has sent; empty before.
        process: the pidfd of the process at the other end; -1 if it is not watched. It becomes
            readable when that process ends, even if a process forked from it keeps the connection.
        key: the key that the client has sent; empty before.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self.process = -1
        self.role = self.key = ""

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def pid(self) -> int:
        """The pid of the process that connected, as reported by Linux."""
        size = _CREDENTIALS.size
        content = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(_CREDENTIALS.unpack(content)[0])

    def wait(self, timeout_s: float) -> bool:
        """Wait for data, and return whether any arrived in time."""
        return bool(select.select([self], [], [], timeout_s)[0])

    def send(self, message: Event) -> None:
        """Send a message. Raise OSError if the other end is gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Event]:
        """Wait for data, and return the complete messages.

        Raises:
            EOFError: the other end is gone, or sent an invalid message.
        """
        try:
            chunk = self._connection.recv(1 << 16)
            if not chunk:
                raise EOFError
            *lines, self._buffer = (self._buffer + chunk).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise EOFError from error
        if not all(isinstance(message, dict) for message in messages):
            raise EOFError
        return messages

    def shut(self) -> None:
        """Shut the connection down. This wakes a thread that reads from it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        if self.process >= 0:
            os.close(self.process)
            self.process = -1

    def watch(self) -> None:
        """Open `process`."""
        with contextlib.suppress(ProcessLookupError):  # it has ended, and so has the connection
            self.process = os.pidfd_open(self.pid)

    def end_process(self) -> None:
        """End the watched process at the other end.

        Spare the parent of this process (`cluster/schedulers/dial_in.py`): it detects broken
        connections itself.
        """
        if self.process >= 0 and self.pid != os.getppid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.process, signal.SIGTERM)


def listen(path: Path) -> socket.socket:
    """Listen on a socket to which only this user can connect."""
    path.unlink(missing_ok=True)  # a fork server that is gone may leave it
    listener = socket.socket(socket.AF_UNIX)
    with _short(path) as address:
        listener.bind(address)
    path.chmod(0o600)
    listener.listen()
    return listener


def connect(path: Path) -> Peer:
    """Connect to a fork server.

    Raises:
        OSError: no process listens at the path.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return Peer(connection)


def connect_in(folder: Path) -> Peer:
    """Connect to the fork server of the cluster in a folder, also to that of an older version.

    Raises:
        OSError: there is no fork server.
    """
    try:
        return connect(folder / FORK_SERVER_SOCKET)
    except OSError:
        return connect(folder / _OLD_SOCKET)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short name of a socket's path, because Linux limits socket addresses to 108 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class ControlSocket:
    """Fork server's side of the connection to its owner.

    Args:
        listener: the socket to which owners connect.
        folder: the cluster's folder, for the detached runner.
        grace_s: the seconds to wait for a new owner.
        describe: returns the state to send to a new owner.
        is_remote: True if owners are on another host.

    Attributes:
        over: True if the fork server must end: the owner disconnected for good, or no owner came.
        left: True if the fork server must remove the cluster's folder, because no owner does.
    """

    def __init__(
        self,
        listener: socket.socket,
        folder: Path,
        grace_s: float,
        describe: Callable[[], Event],
        *,
        is_remote: bool = False,
    ) -> None:
        self._is_remote = is_remote
        self._received_at = time.monotonic()
        self.over = self.left = False
        self._listener = listener
        self._folder = folder
        self._grace_s = grace_s
        self._describe = describe
        self._clients: list[Peer] = []
        self._owner: Peer | None = None
        self._successor: Peer | None = None
        self._detached = False
        self._detached_runner: subprocess.Popen[bytes] | None = None
        self._detached_runners = 0
        self._deadline = time.monotonic() + grace_s

    @property
    def is_owned(self) -> bool:
        return self._owner is not None

    def announce(self, event: Event) -> None:
        """Send an event to the owner, if there is one. A later owner receives the whole state."""
        if self._owner is not None:
            with contextlib.suppress(OSError):  # the next read detects its end
                self._owner.send(event)

    def waits_on(self) -> list[socket.socket | Peer | int]:
        """Return the sockets and descriptors to wait on for data."""
        peers = [
            peer for peer in (*self._clients, self._owner, self._successor) if peer is not None
        ]
        return [self._listener, *peers, *(p.process for p in peers if p.process >= 0)]

    def timeout_s(self) -> float | None:
        """Return the seconds until `serve` must be called at the latest; None for no limit."""
        until = self._deadline
        if self._owner is not None and self._successor is None:
            if not self._is_remote:
                return None
            until = self._received_at + SILENCE_S
        return max(0.0, until - time.monotonic())

    def serve(self, readable: list[Any]) -> Iterator[Event]:
        """Process the readable sockets, one read of each, and yield the owner's commands."""
        if self._owner is not None and self._owner in readable:
            yield from self._commands(self._owner)
        elif self._owner is not None and self._owner.process in readable:
            self._lose_owner(self._owner)
        if self._successor is not None and self._successor in readable:
            self._drop_successor(self._successor)
        for client in [peer for peer in self._clients if peer in readable]:
            self._admit(client)
        if self._listener in readable:
            self._clients.append(Peer(self._listener.accept()[0]))
        self._check()

    def close(self) -> None:
        """Close this process's descriptors. The detached runner continues."""
        self._listener.close()
        for peer in (*self._clients, self._owner, self._successor):
            if peer is not None:
                peer.close()

    def end(self) -> None:
        """Kill the detached runner if it is not the owner yet."""
        if self._detached_runner is not None and self._owner is None:
            self._detached_runner.kill()
            self._detached_runner.wait()

    def _admit(self, client: Peer) -> None:
        """Process the first message of a client. Disconnect it unless the message is `own`."""
        self._clients.remove(client)
        try:
            command = client.read()[0]
        except (EOFError, IndexError):
            client.close()
            return
        client.role, client.key = str(command.get("role")), str(command.get("key", ""))
        if command.get("op") != "own" or client.role not in (KERNEL, DETACHED_RUNNER):
            client.close()
        elif self._owner is None and self._successor is None:
            self._grant(client)
        elif self._owner is not None and client.key and client.key == self._owner.key:
            self._disconnect(self._owner, but=client.pid)
            self._grant(client)
        elif self._owner is not None and (self._owner.role, client.role) == (
            DETACHED_RUNNER,
            KERNEL,
        ):
            self._wait_for_detached_runner(client, self._owner)
        else:
            self._refuse(client)

    def _disconnect(self, owner: Peer, but: int = 0) -> None:
        """End an owner's connection, and its process unless the pid is `but`."""
        if owner.pid != but:
            owner.end_process()
        owner.close()
        self._owner = None

    def _grant(self, peer: Peer) -> None:
        self._owner = peer
        self._received_at = time.monotonic()
        peer.watch()
        if peer.role == KERNEL:
            self._detached_runners = 0
        self.announce({"event": "owned", "pid": os.getpid(), **self._describe()})

    def _refuse(self, client: Peer) -> None:
        owner_or_successor = self._owner or self._successor
        assert owner_or_successor is not None
        with contextlib.suppress(OSError):
            client.send({"event": "refused", "pid": owner_or_successor.pid})
        client.close()

    def _wait_for_detached_runner(self, client: Peer, detached_runner: Peer) -> None:
        """Ask the detached runner to leave. The client binds the same sockets after that."""
        if self._successor is not None:
            self._refuse(client)
            return
        self._successor = client
        self._deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(OSError):
            detached_runner.send({"event": "leave"})

    def _drop_successor(self, successor: Peer) -> None:
        """Remove a waiting client: it became readable, and so it has disconnected."""
        successor.close()
        self._successor = None
        if self._owner is None:
            self._replace()

    def _commands(self, owner: Peer) -> Iterator[Event]:
        try:
            commands = owner.read()
        except EOFError:
            self._lose_owner(owner)
            return
        self._received_at = time.monotonic()
        for command in commands:
            if command["op"] == "disconnect":
                self.over, self.left = True, command["leaves"]
            elif command["op"] == "detach":
                self._detached = command["on"]
            else:
                yield command

    def _lose_owner(self, owner: Peer) -> None:
        owner.close()
        self._owner = None
        if self._successor is None:
            self._replace()

    def _replace(self) -> None:
        """Start a detached runner if a run continues, else wait for a new owner."""
        if not self._describe()["children"] and not self._detached:  # nothing left to own
            self.over = self.left = True
            return
        self._deadline = time.monotonic() + self._grace_s
        keeps = self._detached and not self._is_remote  # for a remote one, it runs on its host
        if (
            keeps
            and self._detached_runners < MAX_DETACHED_RUNNERS
            and self._detached_runner is None
        ):
            self._detached_runners += 1
            self._detached_runner = _start_detached_runner(self._folder)

    def _check(self) -> None:
        """Check the detached runner, the heartbeats of a remote owner, and the deadlines."""
        if self._detached_runner is not None and self._detached_runner.poll() is not None:
            self._detached_runner = None
            if self._owner is None and self._successor is None:
                self._replace()
        if self._is_remote and self._owner is not None:
            if time.monotonic() >= self._received_at + SILENCE_S:
                self._disconnect(self._owner)
                self._replace()
            return
        late = time.monotonic() >= self._deadline
        if self._successor is not None:
            self._admit_successor(self._successor, late=late)
        elif self._owner is None and late:
            self.over = self.left = True

    def _admit_successor(self, successor: Peer, *, late: bool) -> None:
        if late and self._detached_runner is not None:
            self._detached_runner.kill()
            self._detached_runner.wait()
            self._detached_runner = None
        if late and self._owner is not None:
            self._owner.close()
            self._owner = None
        if self._owner is None and self._detached_runner is None:
            self._successor = None
            self._grant(successor)


def _start_detached_runner(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log" / "detached_runner.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nbdist.session.detached", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
