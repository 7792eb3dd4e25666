"""Whose orders the fork server takes: one owner at a time, over a socket in the cluster's folder.

Whoever connects says so (`own`), as a notebook's kernel or as the detached runner; one JSON object
a line:

    newcomer → fork server                     fork server → newcomer
    {"op": "own", "role", "key"}        {"event": "owned", "pid", "children", "versions", "gpus"}
                                        {"event": "refused", "pid"}

A kernel keeps its place until its connection closes; a detached runner is asked to leave it to a
kernel (`{"event": "leave"}`), and is killed where it does not. When the owner goes without a
farewell, the seat stays free for a while. While the owner's run is detached, a detached runner is
started to follow it.

An owner on another host comes through ssh, whose connections may be cut without a word to either
end. So it beats, is gone when it does not, and is known by its key when it comes once more: what
is left of its former connection is ended then, and so all that went through it.
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

FORK_SERVER_SOCKET = "seed.sock"
KERNEL, DETACHED_RUNNER = "kernel", "detached runner"
LEAVE_S = 20.0
"""Time for a detached runner to leave before it is killed. It may be replacing a worker."""

MAX_DETACHED_RUNNERS = 3
"""Keepers that are started one after the other, when each goes, before nobody is waited for."""

SILENCE_S = 30.0
"""An owner on another host that has said nothing for so long is gone; its death is seen at once."""

_CREDENTIALS = struct.Struct("3i")


class Peer:
    """One end of a connection on which JSON objects travel, one a line.

    Attributes:
        role: of a newcomer that has said it.
        process: a descriptor that is readable when the process at the other end has ended, also
            where another one, forked from it, holds the connection; -1 where that is not watched.
        key: of a newcomer that has said it.
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
        """The process that connected, by the kernel's own account."""
        size = _CREDENTIALS.size
        content = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(_CREDENTIALS.unpack(content)[0])

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to read within the time."""
        return bool(select.select([self], [], [], timeout_s)[0])

    def send(self, message: Event) -> None:
        """Raises OSError when the other end is gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Event]:
        """What has come, waiting for the first of it.

        Raises:
            EOFError: the other end is gone, or sends what is no message.
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
        """End the connection, whoever else holds it: who reads it on another thread is woken."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        if self.process >= 0:
            os.close(self.process)
            self.process = -1

    def watch(self) -> None:
        """Open `process`."""
        with contextlib.suppress(ProcessLookupError):  # gone: so is its end of the connection
            self.process = os.pidfd_open(self.pid)

    def end_process(self) -> None:
        """End the process at the other end, which is watched.

        What started this one finds out by itself that nobody answers
        (`cluster/schedulers/dial_in.py`).
        """
        if self.process >= 0 and self.pid != os.getppid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.process, signal.SIGTERM)


def listen(path: Path) -> socket.socket:
    """A socket that only this user can connect to."""
    path.unlink(missing_ok=True)  # of a fork server that is gone
    listener = socket.socket(socket.AF_UNIX)
    with _short(path) as address:
        listener.bind(address)
    path.chmod(0o600)
    listener.listen()
    return listener


def connect(path: Path) -> Peer:
    """Connect to a fork server.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return Peer(connection)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of a socket has room for 108 bytes, however long its folder's path is."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class ControlSocket:
    """The fork server's side.

    Args:
        listener: where owners connect.
        folder: the cluster's, for the detached runner.
        grace_s: how long the seat stays free for a new owner.
        describe: what a new owner is told.
        is_remote: owners are on another host.

    Attributes:
        over: the owner has ended it, or nobody has come: everything has to end.
        left: nobody is there to remove the cluster's folder.
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
        self._heard_at = time.monotonic()
        self.over = self.left = False
        self._listener = listener
        self._folder = folder
        self._grace_s = grace_s
        self._describe = describe
        self._guests: list[Peer] = []
        self._owner: Peer | None = None
        self._heir: Peer | None = None
        self._detached = False
        self._detached_runner: subprocess.Popen[bytes] | None = None
        self._detached_runners = 0
        self._deadline = time.monotonic() + grace_s

    @property
    def is_taken(self) -> bool:
        return self._owner is not None

    def announce(self, event: Event) -> None:
        """Tell the owner, if there is one; who comes later is told how it is then."""
        if self._owner is not None:
            with contextlib.suppress(OSError):  # its end is seen when it is read
                self._owner.send(event)

    def waits_on(self) -> list[socket.socket | Peer | int]:
        """What to wait for something to read on."""
        peers = [peer for peer in (*self._guests, self._owner, self._heir) if peer is not None]
        return [self._listener, *peers, *(p.process for p in peers if p.process >= 0)]

    def timeout_s(self) -> float | None:
        """How long to wait before `serve` is called in any case; None is for ever."""
        until = self._deadline
        if self._owner is not None and self._heir is None:
            if not self._is_remote:
                return None
            until = self._heard_at + SILENCE_S
        return max(0.0, until - time.monotonic())

    def serve(self, readable: list[Any]) -> Iterator[Event]:
        """Take in what there is, each only once; yields the owner's orders."""
        if self._owner is not None and self._owner in readable:
            yield from self._orders(self._owner)
        elif self._owner is not None and self._owner.process in readable:
            self._lose(self._owner)
        if self._heir is not None and self._heir in readable:
            self._drop_heir(self._heir)
        for guest in [peer for peer in self._guests if peer in readable]:
            self._hear(guest)
        if self._listener in readable:
            self._guests.append(Peer(self._listener.accept()[0]))
        self._look()

    def close(self) -> None:
        """Close this process's descriptors; the detached runner goes on."""
        self._listener.close()
        for peer in (*self._guests, self._owner, self._heir):
            if peer is not None:
                peer.close()

    def end(self) -> None:
        """Leave no detached runner."""
        if self._detached_runner is not None and self._owner is None:
            self._detached_runner.kill()
            self._detached_runner.wait()

    def _hear(self, guest: Peer) -> None:
        """Whoever says anything but `own` first is sent away."""
        self._guests.remove(guest)
        try:
            order = guest.read()[0]
        except (EOFError, IndexError):
            guest.close()
            return
        guest.role, guest.key = str(order.get("role")), str(order.get("key", ""))
        if order.get("op") != "own" or guest.role not in (KERNEL, DETACHED_RUNNER):
            guest.close()
        elif self._owner is None and self._heir is None:
            self._grant(guest)
        elif self._owner is not None and guest.key and guest.key == self._owner.key:
            self._cut(self._owner, but=guest.pid)
            self._grant(guest)
        elif self._owner is not None and (self._owner.role, guest.role) == (
            DETACHED_RUNNER,
            KERNEL,
        ):
            self._wait_for_detached_runner(guest, self._owner)
        else:
            self._refuse(guest)

    def _cut(self, owner: Peer, but: int = 0) -> None:
        """End what is left of a connection, and all that goes through it; `but` goes on."""
        if owner.pid != but:
            owner.end_process()
        owner.close()
        self._owner = None

    def _grant(self, peer: Peer) -> None:
        self._owner = peer
        self._heard_at = time.monotonic()
        peer.watch()
        if peer.role == KERNEL:
            self._detached_runners = 0
        self.announce({"event": "owned", "pid": os.getpid(), **self._describe()})

    def _refuse(self, guest: Peer) -> None:
        there = self._owner or self._heir
        assert there is not None
        with contextlib.suppress(OSError):
            guest.send({"event": "refused", "pid": there.pid})
        guest.close()

    def _wait_for_detached_runner(self, guest: Peer, detached_runner: Peer) -> None:
        """It has to be gone before somebody else binds the sockets that it has."""
        if self._heir is not None:
            self._refuse(guest)
            return
        self._heir = guest
        self._deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(OSError):
            detached_runner.send({"event": "leave"})

    def _drop_heir(self, heir: Peer) -> None:
        """It says nothing before it is the owner: it is gone."""
        heir.close()
        self._heir = None
        if self._owner is None:
            self._replace()

    def _orders(self, owner: Peer) -> Iterator[Event]:
        try:
            orders = owner.read()
        except EOFError:
            self._lose(owner)
            return
        self._heard_at = time.monotonic()
        for order in orders:
            if order["op"] == "farewell":
                self.over, self.left = True, order["leaves"]
            elif order["op"] == "detach":
                self._detached = order["on"]
            else:
                yield order

    def _lose(self, owner: Peer) -> None:
        owner.close()
        self._owner = None
        if self._heir is None:
            self._replace()

    def _replace(self) -> None:
        """Start a detached runner if a run continues, else wait for a new owner."""
        if not self._describe()["children"] and not self._detached:  # nothing to come back to
            self.over = self.left = True
            return
        self._deadline = time.monotonic() + self._grace_s
        keeps = self._detached and not self._is_remote  # that of another host is there
        if (
            keeps
            and self._detached_runners < MAX_DETACHED_RUNNERS
            and self._detached_runner is None
        ):
            self._detached_runners += 1
            self._detached_runner = _start_detached_runner(self._folder)

    def _look(self) -> None:
        """What became of the detached runner, and of the time that there was."""
        if self._detached_runner is not None and self._detached_runner.poll() is not None:
            self._detached_runner = None
            if self._owner is None and self._heir is None:
                self._replace()
        if self._is_remote and self._owner is not None:
            if time.monotonic() >= self._heard_at + SILENCE_S:
                self._cut(self._owner)
                self._replace()
            return
        late = time.monotonic() >= self._deadline
        if self._heir is not None:
            self._admit_successor(self._heir, late=late)
        elif self._owner is None and late:
            self.over = self.left = True

    def _admit_successor(self, heir: Peer, *, late: bool) -> None:
        if late and self._detached_runner is not None:
            self._detached_runner.kill()
            self._detached_runner.wait()
            self._detached_runner = None
        if late and self._owner is not None:
            self._owner.close()
            self._owner = None
        if self._owner is None and self._detached_runner is None:
            self._heir = None
            self._grant(heir)


def _start_detached_runner(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log" / "detached_runner.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nbdist.session.detached", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
