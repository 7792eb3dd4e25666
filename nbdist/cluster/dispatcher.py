"""Transmission of cells to the engines: one serialization, one hop, no reply.

The notebook binds a ZeroMQ ROUTER on loopback, encrypted with CURVE. Every engine connects a DEALER
and gets its key over ipyparallel's signed channel. Unlike `DirectView.execute`, messages do not
pass the hub, and neither side tracks requests. Results arrive over the stream
(`telemetry/receiver.py`). An engine therefore cannot skip a cell silently after a failed request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from nbdist.errors import StartError, WorkerError
from nbdist.records import WATCHDOG, AbortCollectives, Diagnose, ForceInterrupt, StatusQuery
from nbdist.utils.sockets import bind_socket
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import BoundSocket, Command

RECONNECT_S = 3.0
"""Time for ranks to reconnect to a socket that was bound again. They try ten times a second."""

_WATCHDOG_COMMANDS = (ForceInterrupt, Diagnose, AbortCollectives, StatusQuery)
_POLL_S = 0.02
_MORE = int(zmq.SNDMORE)
"""Flag as an integer. `send_multipart` builds an enum flag for each rank, which takes 40 µs."""


class Dispatcher:
    """Sender of commands to ranks. Use it from one thread only.

    Args:
        bound_socket: the port and keys that another process bound before. The ranks reconnect to
            it. None for a new port and new keys.
        is_remote: ranks run on other hosts and reconnect after a broken connection.

    Attributes:
        bound_socket: the port and keys to which engines connect.
        is_remote: ranks run on other hosts.
    """

    def __init__(self, bound_socket: BoundSocket | None = None, *, is_remote: bool = False) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a rank's new engine replaces a dead connection
        self._socket.linger = 0
        self.bound_socket = bind_socket(self._socket, bound_socket)
        self._settled_at = time.monotonic() + RECONNECT_S if bound_socket else 0.0
        self.is_remote = is_remote

    def await_connections(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Wait until these ranks and their watchdogs have connected.

        Raises:
            StartError: a rank has not connected in time.
        """
        missing = {name.encode() for rank in ranks for name in (str(rank), f"{WATCHDOG}{rank}")}
        deadline = time.monotonic() + timeout_s
        while missing:
            left_ms = max(0, int(1000 * (deadline - time.monotonic())))
            if not self._socket.poll(left_ms):
                late = {int(name.decode().removeprefix(WATCHDOG)) for name in missing}
                raise StartError(
                    f"rank {formatting.ranks(late)} did not connect within {timeout_s:g} s: "
                    "set NBDIST_START_TIMEOUT_S to more seconds, and start the workers again"
                )
            missing.discard(self._socket.recv_multipart()[0])

    def send(self, command: Command, ranks: Iterable[int]) -> None:
        """Send a command to ranks, or to their watchdogs if a watchdog executes it.

        Raises:
            WorkerError: a rank is gone. The ranks before it have been sent the command.
        """
        payload = msgspec.msgpack.encode(command)
        to = WATCHDOG if isinstance(command, _WATCHDOG_COMMANDS) else ""
        for rank in ranks:
            self._send(rank, f"{to}{rank}".encode(), payload)

    def _send(self, rank: int, name: bytes, payload: bytes) -> None:
        """Send to one rank. Wait for it if it may still reconnect."""
        settled_at = time.monotonic() + RECONNECT_S if self.is_remote else self._settled_at
        while True:
            try:
                self._socket.send(name, _MORE)  # raises if no peer has this name
                self._socket.send(payload)
            except zmq.ZMQError as error:
                if time.monotonic() > settled_at:
                    raise WorkerError(
                        f"rank {rank} cannot be reached ({error}): "
                        "run %dist_restart for new workers"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return

    def close(self) -> None:
        self._socket.close()
