"""The notebook's end of the stream: one thread that takes in what every rank says.

A ZeroMQ PULL socket on loopback, encrypted with CURVE: the key that engines need to connect
reaches them over ipyparallel's signed channel only.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Self

import msgspec
import zmq

from nbdist.records import AnyEvent
from nbdist.utils.sockets import bind_socket

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import BoundSocket

_log = logging.getLogger(__name__)


class Receiver:
    """Calls `handle` with every record, in each rank's own order, on its own thread.

    Args:
        handle: takes a record.
        bound_socket: as the socket was bound before, by another process.

    Attributes:
        bound_socket: where engines connect.
    """

    def __init__(
        self, handle: Callable[[AnyEvent], None], bound_socket: BoundSocket | None = None
    ) -> None:
        self._handle = handle
        self._decoder = msgspec.msgpack.Decoder(AnyEvent)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PULL)
        self.bound_socket = bind_socket(self._socket, bound_socket)
        self._stop = context.socket(zmq.PAIR)
        self._stopped = context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://nbdist-receiver-{id(self)}")
        self._stopped.connect(f"inproc://nbdist-receiver-{id(self)}")
        self._thread = threading.Thread(target=self._pump, name="nbdist-receiver", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and close the sockets."""
        if not self._stop.closed:
            self._stop.send(b"")
            self._thread.join()
            for socket in (self._stop, self._stopped, self._socket):
                socket.close(linger=0)

    def _pump(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket in ready:
                for frame in self._socket.recv_multipart():
                    self._take(frame)
            elif self._stopped in ready:
                return

    def _take(self, frame: bytes) -> None:
        try:
            record = self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            _log.error("a record that is none was dropped: %s", error)
            return
        try:
            self._handle(record)
        except Exception:  # noqa: BLE001 - a thread that ended would leave every cell waiting
            _log.exception("a record could not be taken in")
