"""The engine's end of the stream: a thread that sends what the rank says.

Records are batched (at most 20 messages a second unless a batch is full) and pushed over a
CURVE-encrypted ZeroMQ socket. Text is never lost: a writer waits when too much is pending, as it
would on a pipe. Reports of steps never wait: those that find no room are counted (`RowBuffer`).

What is on the way when the notebook's kernel is killed is lost. So the reports of the last seconds
are kept, and said again to whoever comes in its place, who has some of them (`Repeats`).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from nbdist.records import CellEnded, FitBegun, Metrics, StepBegun, Stopping

if TYPE_CHECKING:
    from nbdist.records import AnyEvent, Columns, SocketAddress
    from nbdist.worker.runtime.row_buffer import RowBuffer

BATCH_INTERVAL_S = 0.05
PENDING_LIMIT_BYTES = 16 << 20
_LINGER_MS = 2000
_URGENT_WAIT_S = 1.0
_BATCHES_UNDER_WAY = 4
_BATCHES_KEPT = 64
_REPEATED = (CellEnded, FitBegun, Metrics, StepBegun, Stopping)
"""Beside rows; who hears one twice is none the worse for it, and may know it (`Repeats`)."""


def connect(socket: zmq.Socket[bytes], address: SocketAddress) -> None:
    """Connect to a socket of the notebook's, encrypted."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = address.server_key
    socket.connect(address.url)


def _as_text(value: object) -> str:
    """Text of a class of its own, as an error may say: only `str` itself is encoded."""
    if isinstance(value, str):
        return str.join("", [value])
    raise TypeError(f"{type(value).__name__} cannot be sent to the notebook")


def _as_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_utf8(item) for item in value]
    return value


class RankReporter(Protocol):
    """Interface of a rank for code that only sends reports."""

    def said(self) -> dict[str, Any]:
        """Return the fields that every record of this rank begins with."""
        ...

    def say(self, record: AnyEvent, *, urgent: bool = False) -> None:
        """Send a record to the notebook."""
        ...


class Reporter:
    """Sends records in the order they were said, from any thread.

    Args:
        address: where to.
        row_buffer: the reports of steps, which go before the other records of a batch.
    """

    def __init__(self, address: SocketAddress, row_buffer: RowBuffer) -> None:
        self._address = address
        self._row_buffer = row_buffer
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_as_text)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._reports: list[bytes] = []
        self._sent: deque[list[bytes]] = deque(maxlen=_BATCHES_KEPT)
        self._urgent = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._pump, name="nbdist-probe", daemon=True)
        self._thread.start()

    def say(self, record: AnyEvent, *, urgent: bool = False) -> None:
        """Queue a record.

        Blocks while more than `PENDING_LIMIT_BYTES` wait to be sent. An urgent record takes all
        that is pending with it at once: the caller waits until it has been handed to ZeroMQ, and
        so lets the sending thread run, which would else wait for the interpreter's lock.
        """
        frame = self._encode(record)
        with self._changed:
            self._changed.wait_for(
                lambda: self._pending_bytes < PENDING_LIMIT_BYTES or self._closing
            )
            first = not self._pending
            self._pending.append(frame)
            self._pending_bytes += len(frame)
            if isinstance(record, _REPEATED):
                self._reports.append(frame)
            self._urgent |= urgent
            if first or urgent:
                self._changed.notify_all()
            if urgent:
                self._changed.wait_for(lambda: not self._urgent, _URGENT_WAIT_S)

    def report(self, cell: int, columns: Columns, row: tuple[float, ...]) -> None:
        """Queue a row, as `RowBuffer.add` takes it; never blocks."""
        if self._row_buffer.add(cell, columns, row):
            with self._changed:
                self._changed.notify_all()

    def flush(self) -> None:
        """Hand all that is pending, rows too, to ZeroMQ, and wait until that is done."""
        with self._changed:
            if self._pending or self._row_buffer:
                self._urgent = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._urgent, _URGENT_WAIT_S)

    def _encode(self, record: AnyEvent) -> bytes:
        """Text that is no UTF-8 (a surrogate, as of a file name) is sent with question marks."""
        try:
            return self._encoder.encode(record)
        except UnicodeEncodeError:
            plain = msgspec.to_builtins(record, builtin_types=(bytes,), enc_hook=_as_text)
            return self._encoder.encode(_as_utf8(plain))

    def close(self) -> None:
        """Send what is pending and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(2 * _LINGER_MS / 1000 + 1)

    def _pump(self) -> None:
        with zmq.Context() as context:  # ends when all is sent: the process may be gone then
            self._push(context.socket(zmq.PUSH))

    def _push(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = _LINGER_MS
        socket.immediate = True  # nothing is queued for a notebook that is not there
        socket.sndhwm = _BATCHES_UNDER_WAY
        ends = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(socket, self._address)
        with socket, ends:
            while self._await_records() and self._await_room(socket):
                former = [frame for frames in self._sent for frame in frames]
                repeated = former if _has_ended(ends) else []
                socket.send_multipart([*repeated, *self._take()])
            socket.disable_monitor()

    def _await_room(self, socket: zmq.Socket[bytes]) -> bool:
        """Wait as long as it takes, but not once the probe is being closed."""
        while not socket.poll(_LINGER_MS, zmq.POLLOUT):
            if self._closing:
                return False
        return True

    def _await_records(self) -> bool:
        """Wait for the next batch; False when the probe is closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._row_buffer or self._closing)
            self._changed.wait_for(lambda: self._urgent or self._closing, BATCH_INTERVAL_S)
            return bool(self._pending or self._row_buffer)

    def _take(self) -> list[bytes]:
        """The next batch."""
        with self._changed:
            batch, self._pending = self._pending, []
            reports, self._reports = self._reports, []
            self._pending_bytes = 0
            self._urgent = False
            self._changed.notify_all()
        rows = [*map(self._encode, self._row_buffer.take())]
        self._sent.append([*rows, *reports])
        return [*rows, *batch]


def _has_ended(ends: zmq.Socket[bytes]) -> bool:
    """Whether the connection has ended since the last time; there is another one."""
    ended = False
    while ends.poll(0):
        recv_monitor_message(ends)
        ended = True
    return ended
