"""Receiver of the event stream: one thread in the notebook receives the records of all ranks.

A ZeroMQ PULL socket on loopback, encrypted with CURVE. Engines receive its key only over
ipyparallel's signed channel. That of an exported program is on the interface of its ranks.

Subscribers store and show the records: logs, the directory of a run, the monitor of a cell.
"""

from __future__ import annotations

import logging
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec
import zmq

from nbdist.records import PLACE, AnyEvent, Metrics, Rows
from nbdist.telemetry.tables import FLOAT_BYTES, as_rows
from nbdist.utils.sockets import LOOPBACK, bind_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbdist.records import BoundSocket, Columns

    Subscriber = Callable[[AnyEvent], None]

_TIME = PLACE.index("time_s")
_log = logging.getLogger(__name__)


class Subscribers:
    """Functions that receive records, in the order in which one thread added them."""

    def __init__(self) -> None:
        self._functions: tuple[Subscriber, ...] = ()

    def add(self, *functions: Subscriber) -> None:
        self._functions = (*self._functions, *functions)

    def remove(self, *functions: Subscriber) -> None:
        self._functions = tuple(one for one in self._functions if one not in functions)

    def deliver(self, record: AnyEvent) -> None:
        """Pass a record to each subscriber. An error in one does not affect the others."""
        for function in self._functions:
            try:
                function(record)
            except Exception:  # noqa: BLE001 - an error that ends the thread would block every cell
                _log.exception("a subscriber failed to process a record")


class Receiver:
    """Delivery of records to subscribers on a thread of its own, ordered per rank.

    Args:
        bound_socket: socket that another process bound before.
        host: address of the interface, for a new socket.

    Attributes:
        bound_socket: socket to which engines connect.
        subscribers: subscribers to the records of all cells.
        on_idle: called on the thread when no further record waits.
    """

    def __init__(self, bound_socket: BoundSocket | None = None, host: str = LOOPBACK) -> None:
        self.subscribers = Subscribers()
        self.on_idle: Callable[[], None] = lambda: None
        self._decoder = msgspec.msgpack.Decoder(AnyEvent)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PULL)
        self.bound_socket = bind_socket(self._socket, bound_socket, host)
        self._stop = context.socket(zmq.PAIR)
        self._stopped = context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://nbdist-receiver-{id(self)}")
        self._stopped.connect(f"inproc://nbdist-receiver-{id(self)}")
        self._thread = threading.Thread(target=self._pump, name="nbdist-receiver", daemon=True)

    def start(self) -> None:
        """Start to deliver records, including those that arrived before."""
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and close the sockets."""
        if not self._stop.closed:
            if self._thread.is_alive():
                self._stop.send(b"")
                self._thread.join()
            for socket in (self._stop, self._stopped, self._socket):
                socket.close(linger=0)

    def _pump(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0))
            if not ready:
                self.on_idle()
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
            _log.error("dropped an invalid record: %s", error)
            return
        self.subscribers.deliver(record)


class CellStream:
    """Records of one cell without repeated reports.

    A rank that loses its connection sends its last reports again. One that replaces a lost rank
    sends those of the lost one.

    Args:
        receiver: receiver of the records of all cells.
        number: number of the cell.
        repeats: filter of the run.

    Attributes:
        subscribers: subscribers to the records of the cell.
    """

    def __init__(self, receiver: Receiver, number: int, repeats: Repeats) -> None:
        self.subscribers = Subscribers()
        self._receiver = receiver
        self._number = number
        self._repeats = repeats
        receiver.subscribers.add(self._take)

    def close(self) -> None:
        """Stop the delivery of records. May be called more than once."""
        self._receiver.subscribers.remove(self._take)

    def _take(self, record: AnyEvent) -> None:
        if record.cell == self._number and (fresh := self._repeats.fresh(record)) is not None:
            self.subscribers.deliver(fresh)


class _Source(NamedTuple):
    """Series with increasing times. The report of an epoch may arrive after rows of later steps."""

    rank: int
    columns: Columns
    of_steps: bool


class Repeats:
    """Filter that removes repeated reports of each rank.

    Args:
        received: reports that are already stored. Each item contains at least one row of one rank,
            either all of steps or all of epochs.
    """

    def __init__(self, received: Iterable[Rows] = ()) -> None:
        self._last_times: dict[_Source, float] = {}
        for rows in received:
            last = rows.last()
            self._last_times[_Source(last.rank, rows.columns, last.step >= 0)] = last.time_s

    def fresh(self, record: AnyEvent) -> AnyEvent | None:
        """Return the new part of a record. None if there is none."""
        if not isinstance(record, Rows | Metrics):
            return record
        rows = as_rows(record)
        source = _Source(record.rank, rows.columns, isinstance(record, Rows))
        values = self._newer_rows(rows, self._last_times.get(source, -1.0))
        if not values:
            return record if isinstance(record, Rows) and not rows.values else None
        row_bytes = FLOAT_BYTES * len(rows.columns.names)
        self._last_times[source] = _time(values, len(values) - row_bytes)
        if isinstance(record, Rows) and len(values) < len(record.values):
            return msgspec.structs.replace(record, values=values, dropped=0)
        return record

    def _newer_rows(self, rows: Rows, time_s: float) -> bytes:
        """Return the rows later than `time_s`."""
        row_bytes = FLOAT_BYTES * len(rows.columns.names)
        start = 0
        while start < len(rows.values) and _time(rows.values, start) <= time_s:
            start += row_bytes
        return rows.values[start:]


def _time(values: bytes, offset: int) -> float:
    (seconds,) = struct.unpack_from("<d", values, offset + FLOAT_BYTES * _TIME)
    return float(seconds)
