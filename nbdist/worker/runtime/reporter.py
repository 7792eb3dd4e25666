"""The engine's end of the stream: a thread that sends the records of the rank.

Records are batched, at most 20 messages a second of each rank and 400 of all ranks, and pushed over
a CURVE-encrypted ZeroMQ socket. Text is never lost: a writer waits when too much is pending, like
on a pipe. Reports of steps never wait: `RowBuffer` drops and counts those that exceed its size.

If the notebook's kernel or this process is killed, messages on the way are lost. The reporter
therefore keeps the reports of the last seconds, and repeats them to the next kernel. A checkpoint
contains them too, so that the process that resumes the run can repeat them. The notebook drops
duplicates (`Repeats`).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from nbdist.records import (
    DROPPED_TEXT,
    CellEnded,
    FitBegun,
    Metrics,
    Output,
    StepBegun,
    Stopping,
)

if TYPE_CHECKING:
    from nbdist.records import AnyEvent, Columns, SocketAddress
    from nbdist.worker.runtime.row_buffer import RowBuffer

BATCH_INTERVAL_S = 0.05
LONGEST_INTERVAL_S = 0.25
MESSAGES_PER_S = 400
"""Number of messages that the notebook receives from all ranks, if the intervals allow it."""

PENDING_LIMIT_BYTES = 16 << 20
_LINGER_MS = 2000
_URGENT_WAIT_S = 1.0
_BATCHES_UNDER_WAY = 4
_BATCHES_KEPT = 64
_REPEATED = (CellEnded, FitBegun, Metrics, StepBegun, Stopping)
"""Records that are repeated to a new kernel, beside rows. Receiving one twice is harmless."""


def batch_interval(ranks: int) -> float:
    """Return the time between two messages of a rank, in seconds."""
    return min(max(BATCH_INTERVAL_S, ranks / MESSAGES_PER_S), LONGEST_INTERVAL_S)


def connect(socket: zmq.Socket[bytes], address: SocketAddress) -> None:
    """Connect to a socket of the notebook, encrypted."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = address.server_key
    socket.connect(address.url)


def _as_text(value: object) -> str:
    """Convert an instance of a subclass of `str`, as errors contain: msgspec encodes only `str`."""
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


class Reporter:
    """Sends records in the order in which they were queued, from any thread.

    Args:
        address: address of the notebook's stream.
        row_buffer: reports of steps; they precede the other records of a batch.
        ranks: number of ranks that report to the notebook.
        waits: False drops records while too much is pending, for an exported program. The process
            that stores its runs may have ended, and the program continues.
    """

    def __init__(
        self, address: SocketAddress, row_buffer: RowBuffer, ranks: int = 1, *, waits: bool = True
    ) -> None:
        self._address = address
        self._interval_s = batch_interval(ranks)
        self._row_buffer = row_buffer
        self._waits = waits
        self._dropped_characters = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_as_text)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._reports: list[bytes] = []
        self._sent: deque[list[bytes]] = deque(maxlen=_BATCHES_KEPT)
        self._requested = 0
        self._passed = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._pump, name="nbdist-reporter", daemon=True)
        self._thread.start()

    def send(self, record: AnyEvent, *, urgent: bool = False) -> None:
        """Queue a record.

        Blocks while more than `PENDING_LIMIT_BYTES` wait to be sent, or drops the record
        (`waits=False`). An urgent record is sent at once, with all pending records. The caller
        waits until ZeroMQ has it; this releases the interpreter lock for the sending thread.
        """
        frame = self._encode(record)
        with self._changed:
            if self._waits:
                self._changed.wait_for(lambda: self._has_room() or self._closing)
            elif not urgent and not self._has_room():
                self._dropped_characters += len(record.text) if isinstance(record, Output) else 0
                return
            elif self._dropped_characters and isinstance(record, Output):
                frame = self._encode(self._with_remark(record))
            first = not self._pending
            self._pending.append(frame)
            self._pending_bytes += len(frame)
            if isinstance(record, _REPEATED):
                self._reports.append(frame)
            if first:
                self._changed.notify_all()
            if urgent:
                self._pass_on()

    def _has_room(self) -> bool:
        return self._pending_bytes < PENDING_LIMIT_BYTES

    def _with_remark(self, record: Output) -> Output:
        """Return text with a line before it about dropped text."""
        count, self._dropped_characters = self._dropped_characters, 0
        return msgspec.structs.replace(record, text=DROPPED_TEXT.format(count=count) + record.text)

    def report(self, cell: int, columns: Columns, row: tuple[float, ...]) -> None:
        """Queue a row; never blocks. `RowBuffer.add` describes the arguments."""
        if self._row_buffer.add(cell, columns, row):
            with self._changed:
                self._changed.notify_all()

    def flush(self) -> None:
        """Pass all pending records and rows to ZeroMQ, and wait until that is done."""
        with self._changed:
            self._pass_on()

    def recent(self) -> list[bytes]:
        """Pass all records and rows to ZeroMQ; return the encoded reports of the last seconds."""
        with self._changed:
            self._pass_on()
            return self._kept()

    def _kept(self) -> list[bytes]:
        return [frame for frames in self._sent for frame in frames]

    def _pass_on(self) -> None:
        """Wait until the sending thread has passed all that is queued to ZeroMQ."""
        self._requested += 1
        request = self._requested
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._passed >= request or self._closing, _URGENT_WAIT_S)

    def _encode(self, record: AnyEvent) -> bytes:
        """Encode a record; characters outside of UTF-8 (surrogates) become question marks."""
        try:
            return self._encoder.encode(record)
        except UnicodeEncodeError:
            plain = msgspec.to_builtins(record, builtin_types=(bytes,), enc_hook=_as_text)
            return self._encoder.encode(_as_utf8(plain))

    def close(self) -> None:
        """Send the pending records and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(2 * _LINGER_MS / 1000 + 1)

    def _pump(self) -> None:
        with zmq.Context() as context:  # exits when all is sent; the process may then end
            self._push(context.socket(zmq.PUSH))

    def _push(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = _LINGER_MS
        socket.immediate = True  # queue nothing while no notebook is connected
        socket.sndhwm = _BATCHES_UNDER_WAY
        ends = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(socket, self._address)
        with socket, ends:
            while self._await_records() and self._await_room(socket):
                repeated = self._kept() if _has_ended(ends) else []
                request = self._requested
                if frames := [*repeated, *self._take()]:
                    socket.send_multipart(frames)
                with self._changed:
                    self._passed = request
                    self._changed.notify_all()
            socket.disable_monitor()

    def _await_room(self, socket: zmq.Socket[bytes]) -> bool:
        """Wait until the socket can send; False if the reporter closes and it cannot."""
        while not socket.poll(_LINGER_MS, zmq.POLLOUT):
            if self._closing:
                return False
        return True

    def _await_records(self) -> bool:
        """Wait for the next batch; False if the reporter is closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._pending or self._row_buffer or self._is_awaited() or self._closing
            )
            self._changed.wait_for(lambda: self._is_awaited() or self._closing, self._interval_s)
            return bool(self._pending or self._row_buffer) or not self._closing

    def _is_awaited(self) -> bool:
        return self._requested > self._passed

    def _take(self) -> list[bytes]:
        """Return the next batch."""
        with self._changed:
            batch, self._pending = self._pending, []
            reports, self._reports = self._reports, []
            self._pending_bytes = 0
            self._changed.notify_all()
        rows = [*map(self._encode, self._row_buffer.take())]
        if rows or reports:
            with self._changed:
                self._sent.append([*rows, *reports])
        return [*rows, *batch]


def _has_ended(ends: zmq.Socket[bytes]) -> bool:
    """Return True if the connection has ended since the last call, so that a new one is open."""
    ended = False
    while ends.poll(0):
        recv_monitor_message(ends)
        ended = True
    return ended
