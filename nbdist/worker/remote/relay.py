"""Large pushed objects: a rank reads them while they arrive, and passes them on to the next rank.

Nothing is bound before all ranks have all objects: `receive` keeps them, `bind` binds them and
`discard` drops them. Each link is TLS with the secret of this push. The reader sends the offset (8
bytes), and the other end sends all bytes from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import queue
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import TransferError
from nbdist.utils.tls import tls_context
from nbdist.worker.own_modules.reload import reload_changed
from nbdist.worker.remote import transfer
from nbdist.worker.runtime import context
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

CONNECT_S = 10.0
"""Time in which the next rank connects."""

HANDSHAKE_S = 3.0
"""Time for the first bytes of a connection. A process without the secret holds it no longer."""

STALL_S = 20.0
"""Time without a byte after which a connection counts as broken."""

PIECE_BYTES = 1 << 20
_AHEAD = 8
"""Pieces that the next rank may be behind."""


@dataclass(frozen=True)
class Route:
    """Route of a pickle to one rank.

    Attributes:
        push: id of the push.
        size: bytes of the pickle.
        file: file of the pickle, for a rank on the notebook's machine; empty for other ranks.
        previous: `host:port` of the rank that passes the pickle on; empty for the notebook.
        notebook: `host:port` or `unix:path` of the notebook's server.
        secret: key of the connections, from `new_secret`.
    """

    push: str
    size: int
    file: str = ""
    previous: str = ""
    notebook: str = ""
    secret: bytes = b""


@dataclass(frozen=True)
class Received:
    """Result of a rank.

    Attributes:
        digest: SHA-256 of the bytes that came over the network; empty for a file.
        needs_scope: True if the objects belong into the scope of Keras's strategy.
        fault: reason why the previous rank did not pass them on; empty if it did.
    """

    digest: bytes
    needs_scope: bool
    fault: str


_kept: dict[str, dict[str, Any]] = {}
_listeners: dict[str, socket.socket] = {}


def listen(push: str, addresses: dict[int, str]) -> int | str:
    """Listen for the next rank, on the address of this rank.

    Returns:
        The port, or a message with the error.
    """
    address = addresses[context.current().rank]
    try:
        family, _, _, _, end = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(end[:2], family=family)
    except OSError as error:
        return f"it cannot listen at {address}: {error.strerror or error}"
    _listeners[push] = listener
    port: int = listener.getsockname()[1]
    return port


def receive(routes: dict[int, Route]) -> Received:
    """Read objects and keep them unbound. Pass their bytes on if this rank listens.

    Raises:
        TransferError: the bytes did not arrive.
        Exception: the error of an object that cannot be created here.
    """
    route = routes[context.current().rank]
    reload_changed(engine_shell().user_ns)
    if route.file:
        with Path(route.file).open("rb") as file:
            reader = transfer.Reader(file)
            _kept[route.push] = reader.load()
        return Received(b"", transfer.needs_scope(reader), "")
    with _incoming(route) as stream:
        reader = transfer.Reader(io.BufferedReader(stream, PIECE_BYTES))
        kept = reader.load()
        received = Received(stream.digest.digest(), transfer.needs_scope(reader), stream.fault)
        if stream.offset != route.size:
            raise TransferError(f"received {stream.offset} of {route.size} bytes")
    _kept[route.push] = kept
    return received


def bind(push: str) -> None:
    """Bind the objects of a push in the user's namespace."""
    engine_shell().push(_kept.pop(push))


def discard(push: str) -> None:
    """Drop the objects of a push, if this rank has any."""
    _kept.pop(push, None)
    if listener := _listeners.pop(push, None):
        listener.close()


@contextlib.contextmanager
def _incoming(route: Route) -> Iterator[Incoming]:
    onward = None
    if listener := _listeners.pop(route.push, None):
        onward = _Onward(listener, tls_context(route.secret, is_server=True))
    try:
        with Incoming(route, onward) as stream:
            yield stream
    finally:
        if onward is not None:
            onward.end()


class Incoming(io.RawIOBase):
    """Stream of a pickle that arrives from the previous rank or from the notebook.

    If the previous rank fails, the notebook sends the rest.

    Args:
        route: the route to this rank.
        onward: receives all pieces; None if no rank follows.

    Attributes:
        offset: the number of bytes that have arrived.
        digest: SHA-256 of them.
        fault: reason why the previous rank did not pass all on; empty if it did.
    """

    def __init__(self, route: Route, onward: _Onward | None = None) -> None:
        super().__init__()
        self.offset = 0
        self.digest = hashlib.sha256()
        self.fault = ""
        self._route = route
        self._onward = onward
        self._link: ssl.SSLSocket | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes. Returns their number, 0 at the end."""
        view = memoryview(buffer)
        wanted = min(len(view), PIECE_BYTES, self._route.size - self.offset)
        piece = view[:wanted]
        filled = 0
        while filled < wanted:
            filled += self._receive(piece[filled:], self.offset + filled)
        self.offset += wanted
        self.digest.update(piece)
        if self._onward is not None and wanted:
            self._onward.put(bytes(piece))
        return wanted

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()
        super().close()

    def _receive(self, view: memoryview, offset: int) -> int:
        """Receive bytes from `offset` on. Returns their number; 0 after a fault of a rank."""
        try:
            if self._link is None:
                self._link = self._connected(offset)
            if count := self._link.recv_into(view):
                return count
            raise ConnectionError("the connection was closed")
        except OSError as error:
            if self._link is not None:
                self._link.close()
                self._link = None
            if not self._route.previous or self.fault:
                raise TransferError(f"the notebook sends no more: {error}") from error
            self.fault = str(error) or type(error).__name__
            return 0

    def _connected(self, offset: int) -> ssl.SSLSocket:
        route = self._route
        source = route.notebook if self.fault or not route.previous else route.previous
        return connected(source, route.secret, offset)


def connected(url: str, secret: bytes, number: int) -> ssl.SSLSocket:
    """Connect to a process with the secret, and send it a number first.

    Args:
        url: `host:port` or `unix:path`.
        secret: key of the connection.
        number: an integer of 8 bytes.

    Raises:
        OSError: the process cannot be reached, or has another secret.
    """
    link = _open(url)
    with contextlib.ExitStack() as undo:
        undo.callback(link.close)
        encrypted = tls_context(secret, is_server=False).wrap_socket(link)
        undo.callback(encrypted.close)
        encrypted.sendall(number.to_bytes(8))
        encrypted.settimeout(STALL_S)
        undo.pop_all()
    return encrypted


def _open(url: str) -> socket.socket:
    if url.startswith("unix:"):
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(CONNECT_S)
        link.connect(url.removeprefix("unix:"))
        return link
    host, _, port = url.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)


def secured(link: socket.socket, tls: ssl.SSLContext) -> tuple[ssl.SSLSocket, int]:
    """Verify that the process at the other end of a connection has the secret.

    Returns:
        The encrypted connection, and the number that the process sends first.

    Raises:
        OSError: it has another secret, or does not respond. The connection is closed.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(link.close)
        link.settimeout(HANDSHAKE_S)
        encrypted = tls.wrap_socket(link, server_side=True)
        undo.callback(encrypted.close)
        asked = encrypted.recv(8)
        if len(asked) < 8:
            raise ConnectionError("the connection was closed")
        encrypted.settimeout(STALL_S)
        undo.pop_all()
    return encrypted, int.from_bytes(asked)


class _Onward:
    """Sender of pieces to the next rank, on a thread. After a fault, it drops them.

    Args:
        listener: the socket to which the next rank connects.
        tls: the context of the connection.
    """

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        self._listener = listener
        self._tls = tls
        self._pieces: queue.Queue[bytes] = queue.Queue(_AHEAD)
        self._thread = threading.Thread(target=self._send, name="nbdist-relay", daemon=True)
        self._thread.start()

    def put(self, piece: bytes) -> None:
        """Pass a piece on. It waits while the next rank is several pieces behind."""
        self._pieces.put(piece)

    def end(self) -> None:
        """Send the rest, then close the connection."""
        self._pieces.put(b"")
        self._thread.join()

    def _send(self) -> None:
        link = self._accepted()
        while piece := self._pieces.get():
            if link is not None:
                try:
                    link.sendall(piece)
                except OSError:  # the notebook sends the rest
                    link.close()
                    link = None
        if link is not None:
            link.close()

    def _accepted(self) -> ssl.SSLSocket | None:
        deadline = time.monotonic() + CONNECT_S
        with self._listener:
            while (left := deadline - time.monotonic()) > 0:
                self._listener.settimeout(left)
                with contextlib.suppress(OSError):  # a stranger, or the time is over
                    link, offset = secured(self._listener.accept()[0], self._tls)
                    if offset == 0:
                        return link
                    link.close()
        return None
