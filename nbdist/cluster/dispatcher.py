"""Cells on their way to the engines: one serialisation, one hop, no reply but the cell's own end.

A ZeroMQ ROUTER on loopback, encrypted with CURVE; every engine holds a DEALER whose key it got over
ipyparallel's signed channel. Against `DirectView.execute`, nothing passes the hub, and neither side
keeps books: what became of a cell comes over the stream (`telemetry/receiver.py`), so that an
engine can neither skip a cell silently nor be waited for in vain when another request failed just
before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from nbdist.errors import StartError, WorkerError
from nbdist.records import WATCHDOG, AbortCollectives, Diagnose, ForceInterrupt, StatusQuery
from nbdist.utils.sockets import bind_socket

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import BoundSocket, Command

COME_BACK_S = 3.0
"""How long ranks may take to come back to a socket that was bound again; they try ten times a
second."""

_OF_WATCHDOG = (ForceInterrupt, Diagnose, AbortCollectives, StatusQuery)
_POLL_S = 0.02
_MORE = int(zmq.SNDMORE)
"""As a number: `send_multipart` makes a flag for each of hundreds of ranks, in 40 µs."""


class Dispatcher:
    """Sends cells to ranks. Used from one thread.

    Args:
        bound_socket: as the socket was bound before, by another process: the ranks come back to it.
        is_remote: ranks are on other hosts, and come back when a connection is made again.

    Attributes:
        bound_socket: where engines connect.
        is_remote: as given.
    """

    def __init__(self, bound_socket: BoundSocket | None = None, *, is_remote: bool = False) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a rank's fresh engine, before the old one is missed
        self._socket.linger = 0
        self.bound_socket = bind_socket(self._socket, bound_socket)
        self._settled_at = time.monotonic() + COME_BACK_S if bound_socket else 0.0
        self.is_remote = is_remote

    def meet(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Wait until these ranks have announced themselves.

        Raises:
            StartError: one has not within the time.
        """
        missing = {name.encode() for rank in ranks for name in (str(rank), f"{WATCHDOG}{rank}")}
        deadline = time.monotonic() + timeout_s
        while missing:
            left_ms = max(0, int(1000 * (deadline - time.monotonic())))
            if not self._socket.poll(left_ms):
                raise StartError(f"rank {sorted(missing)} took no order within {timeout_s:g} s")
            missing.discard(self._socket.recv_multipart()[0])

    def send(self, order: Command, ranks: Iterable[int]) -> None:
        """Send a cell, or what is to become of it.

        Raises:
            WorkerError: a rank is gone; those before it have been sent the order.
        """
        payload = msgspec.msgpack.encode(order)
        to = WATCHDOG if isinstance(order, _OF_WATCHDOG) else ""
        for rank in ranks:
            self._send(rank, f"{to}{rank}".encode(), payload)

    def _send(self, rank: int, name: bytes, payload: bytes) -> None:
        """A rank that has to come back is waited for."""
        settled_at = time.monotonic() + COME_BACK_S if self.is_remote else self._settled_at
        while True:
            try:
                self._socket.send(name, _MORE)  # where there is nobody of that name, it says so
                self._socket.send(payload)
            except zmq.ZMQError as error:
                if time.monotonic() > settled_at:
                    raise WorkerError(
                        f"rank {rank} cannot be reached ({error}): "
                        "type %dist_restart for new workers"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return

    def close(self) -> None:
        self._socket.close()
