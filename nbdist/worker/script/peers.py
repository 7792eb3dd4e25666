"""Watch over the ranks of a program: if one ends early, all end, with one error that names it.

Each rank has a TCP connection to rank 0. The kernel closes it when a process ends, also after
SIGKILL. A rank may wait in a collective that no exception can reach, so a thread ends the process.
The network is trusted, as for the collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np

from nbdist.errors import AnotherRankError, StartError
from nbdist.utils.polling import repeat_until
from nbdist.worker.script import rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.script.placement import Placement

_LAUNCHER_S = 3.0
"""Time for the launcher to report the end of the rank, and to end the others (seconds)."""

_COLLECTIVE_S = 5.0
"""Time in which the end of a rank is known after a collective has failed on another (seconds)."""

_FRAMEWORKS = {"jax", "jaxlib", "tensorflow"}
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A host without power or network counts as ended after 30 s (seconds, and number of probes)."""


class _Member(msgspec.Struct, frozen=True):
    """A rank and its host.

    Attributes:
        rank: the rank.
        host: name of its host.
        leaves: True if it has ended its work, False if it has connected or ended early.
    """

    rank: int
    host: str
    leaves: bool = False


class _Channel:
    """Connection to another rank, with one record on a line.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(rendezvous.LIMIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connection
        self._lines = connection.makefile("rb")

    def send(self, member: _Member) -> None:
        with contextlib.suppress(OSError):  # the other process has ended
            self._socket.sendall(msgspec.json.encode(member) + b"\n")

    def receive(self) -> _Member | None:
        """Wait for a record; return None if the other process has ended."""
        try:
            return msgspec.json.decode(self._lines.readline(), type=_Member)
        except (OSError, msgspec.DecodeError):
            return None

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class Peers:
    """Connections of this rank to rank 0, or of rank 0 to all others. Collective.

    Args:
        placement: place of this process.
        gather: gathers int32 numbers from all ranks: shape (n,) to (ranks, n).
        on_end: takes the error when a rank has ended early, in a thread.
        is_stopping: returns True after this rank received SIGTERM.

    Raises:
        StartError: a rank does not connect.
    """

    def __init__(
        self,
        placement: Placement,
        gather: Callable[[np.ndarray], np.ndarray],
        on_end: Callable[[AnotherRankError], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._own = _Member(placement.rank, socket.gethostname())
        self._on_end = on_end
        self._is_stopping = is_stopping
        self._channels: dict[_Channel, _Member] = {}
        self._failed = False
        self._lost = threading.Event()
        self._left = threading.Event()
        if placement.world_size == 1:
            return
        address = rendezvous.own_address(placement)
        if placement.rank == 0:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.create_server((address, 0), family=family) as server:
                gather(np.array([server.getsockname()[1]], np.int32))
                self._accept(server, placement.world_size)
        else:
            port = int(gather(np.array([0], np.int32))[0, 0])
            self._connect(placement.host, port)
        os.register_at_fork(after_in_child=self._close)  # it would keep the connections open
        atexit.register(self._exit)
        threading.Thread(target=self._watch, name="nbdist-peers", daemon=True).start()

    def _accept(self, server: socket.socket, world_size: int) -> None:
        server.settimeout(rendezvous.LIMIT_S)
        while len(self._channels) < world_size - 1:
            try:
                channel = _Channel(server.accept()[0])
            except TimeoutError:
                known = {0, *(member.rank for member in self._channels.values())}
                missing = ", ".join(str(r) for r in range(world_size) if r not in known)
                raise StartError(f"ranks {missing} did not connect to rank 0") from None
            if (member := channel.receive()) is None:
                channel.close()
                continue
            channel.send(self._own)
            self._channels[channel] = member

    def _connect(self, host: str, port: int) -> None:
        try:
            channel = _Channel(socket.create_connection((host, port), rendezvous.LIMIT_S))
        except OSError as error:
            raise StartError(f"cannot connect to rank 0 at {host}:{port}: {error}") from None
        channel.send(self._own)
        first = channel.receive()
        if first is None:
            raise StartError("rank 0 has ended")
        self._channels[channel] = first

    def leave(self) -> None:
        """Let this rank end without an error on the others. Call it on all ranks."""
        self._left.set()
        for channel in self._channels:
            channel.send(msgspec.structs.replace(self._own, leaves=True))

    def await_end(self, error: BaseException) -> None:
        """End this process if another rank has ended; otherwise return.

        Args:
            error: the error of this rank. A collective fails before the end of a rank is known.
        """
        self._failed = True
        if self._channels and self._lost.wait(_COLLECTIVE_S if _is_of_framework(error) else 0.0):
            threading.Event().wait()  # the thread ends the process

    def _watch(self) -> None:
        """Wait for the end of a rank."""
        with selectors.DefaultSelector() as selector:
            for channel, member in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, (channel, member))
            while selector.get_map():
                for key, _ in selector.select():
                    channel, member = key.data
                    news = channel.receive()
                    if not (self._left.is_set() or (news is not None and news.leaves)):
                        self._end(news or member)
                    selector.unregister(channel)

    def _exit(self) -> None:
        """Let this rank end without an error if it has no error itself."""
        if not self._failed and "last_value" not in vars(sys):  # of an exception without a handler
            self.leave()

    def _end(self, lost: _Member) -> NoReturn:
        """End this process, because a rank has ended."""
        self._lost.set()
        for channel in self._channels:
            if self._own.rank == 0:
                channel.send(lost)
        words = f"rank {lost.rank}@{lost.host} ended before the end of the program"
        self._on_end(AnotherRankError(words))
        was_stopping = self._is_stopping()
        repeat_until(lambda: self._is_stopping() and not was_stopping, _LAUNCHER_S)
        is_first = self._own.rank == min({0, 1} - {lost.rank})
        if is_first and self._is_stopping() == was_stopping:
            sys.stderr.write(f"nbdist: {words}: its own output has the reason. All ranks end.\n")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)

    def _close(self) -> None:
        for channel in self._channels:
            channel.close()


def _is_of_framework(error: BaseException) -> bool:
    """Return True if a framework raised the error. A failed collective of JAX is a ValueError."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raising = str(frames[-1].f_globals.get("__name__")) if frames else ""
    packages = {module.partition(".")[0] for module in (type(error).__module__, raising)}
    return not packages.isdisjoint(_FRAMEWORKS)
