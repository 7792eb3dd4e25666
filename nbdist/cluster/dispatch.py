"""Cells on their way to the engines: one serialisation, one hop, no reply but the cell's own end.

A ZeroMQ ROUTER on loopback, encrypted with CURVE; every engine holds a DEALER whose key it got over
ipyparallel's signed channel. Against `DirectView.execute`, nothing passes the hub, and neither side
keeps books: what became of a cell comes over the stream (`telemetry/stream.py`), so that an engine
can neither skip a cell silently nor be waited for in vain when another request failed just before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from nbdist.errors import StartError, WorkerError
from nbdist.records import WATCHDOG, BreakOff, Diagnose, Hurry, SocketAddress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import Order


class Dispatcher:
    """Sends cells to ranks. Used from one thread.

    Attributes:
        address: where engines connect.
    """

    def __init__(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_publickey = public
        self._socket.curve_server = True
        self._socket.router_mandatory = True
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = SocketAddress(url=f"tcp://127.0.0.1:{port}", server_key=public)
        self._peers: dict[str, bytes] = {}

    def meet(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Wait until these ranks have announced themselves; what was known before is forgotten.

        Raises:
            StartError: one has not within the time.
        """
        missing = {name for rank in ranks for name in (str(rank), f"{WATCHDOG}{rank}")}
        for stale in missing:
            self._peers.pop(stale, None)
        deadline = time.monotonic() + timeout_s
        while missing:
            left_ms = max(0, int(1000 * (deadline - time.monotonic())))
            if not self._socket.poll(left_ms):
                raise StartError(f"rank {sorted(missing)} took no order within {timeout_s:g} s")
            peer, name = self._socket.recv_multipart()
            self._peers[name.decode()] = peer
            missing.discard(name.decode())

    def send(self, order: Order, ranks: Iterable[int]) -> None:
        """Send a cell, or what is to become of it.

        Raises:
            WorkerError: a rank is gone; those before it have been sent the order.
        """
        payload = msgspec.msgpack.encode(order)
        to = WATCHDOG if isinstance(order, (Hurry, Diagnose, BreakOff)) else ""
        for rank in ranks:
            try:
                self._socket.send_multipart([self._peers[f"{to}{rank}"], payload])
            except zmq.ZMQError as error:
                raise WorkerError(
                    f"rank {rank} cannot be reached ({error}): type %dist_restart for new workers"
                ) from None

    def close(self) -> None:
        self._socket.close()
