"""Connections of ranks to the notebook for large objects.

The notebook listens on the loopback interface. Connections to other hosts forward its port, as for
all sockets of the notebook.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, Self

from nbdist.utils.sockets import LOOPBACK
from nbdist.utils.tls import new_secret, tls_context
from nbdist.worker.remote import relay

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

_MAX_LINKS = 64


class PayloadListener:
    """Listening socket with one port for all large objects. Between transfers, it refuses all.

    Attributes:
        port: the port.
        take: receives the next connections, on a thread.
    """

    def __init__(self) -> None:
        self.take: Callable[[socket.socket], object] = socket.socket.close
        self._socket = socket.create_server((LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="nbdist-payloads", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and release the port."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                link = self._socket.accept()[0]
            except OSError:  # it was closed
                return
            self.take(link)


class Serve(Protocol):
    """Handler of a connection with the secret. It also receives the number that begins it."""

    def __call__(self, link: ssl.SSLSocket, number: int) -> None: ...


class Links:
    """Handling of all connections during one transfer, on threads, within a `with` block.

    Args:
        listener: receives the connections.
        serve: handles a connection, until it ends or the transfer is over.

    Attributes:
        secret: key of the connections.
        pool: threads of the transfer.
        ended: is set when the transfer is over.
    """

    def __init__(self, listener: PayloadListener, serve: Serve) -> None:
        self.secret = new_secret()
        self.ended = threading.Event()
        self.pool = ThreadPoolExecutor(_MAX_LINKS, "nbdist-payload")
        self._listener = listener
        self._serve = serve
        self._open: set[ssl.SSLSocket] = set()
        self._tls = tls_context(self.secret, is_server=True)

    def __enter__(self) -> Self:
        self._listener.take = self._take
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.take = socket.socket.close
        self.ended.set()
        for link in list(self._open):
            with contextlib.suppress(OSError):  # the rank has closed it
                socket.socket.shutdown(link, socket.SHUT_RDWR)  # that of TLS is not for two threads
        self.pool.shutdown()

    def _take(self, link: socket.socket) -> None:
        try:
            self.pool.submit(self._handle, link)
        except RuntimeError:  # the transfer has just ended
            link.close()

    def _handle(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a stranger, or the rank ends
            secured, number = relay.secured(link, self._tls)
            with secured:
                self._open.add(secured)
                try:
                    self._serve(secured, number)
                finally:
                    self._open.discard(secured)


class PayloadServer:
    """Server of a file, within a `with` block.

    Args:
        listener: receives the connections.
        path: the file.

    Attributes:
        sent: number of bytes that the rank that has received most has received.
    """

    def __init__(self, listener: PayloadListener, path: Path) -> None:
        self.sent = 0
        self._path = path
        self._links = Links(listener, self._serve)

    @property
    def secret(self) -> bytes:
        """Key of the connections."""
        return self._links.secret

    def __enter__(self) -> Self:
        self._links.__enter__()
        self._digest = self._links.pool.submit(self._compute_digest)
        return self

    def __exit__(self, *_: object) -> None:
        self._links.__exit__()

    def digest(self) -> bytes:
        """Return the SHA-256 of the file."""
        return self._digest.result()

    def _compute_digest(self) -> bytes:
        found = hashlib.sha256()
        with self._path.open("rb", buffering=0) as file:
            while (piece := file.read(relay.PIECE_BYTES)) and not self._links.ended.is_set():
                found.update(piece)
        return found.digest()

    def _serve(self, link: ssl.SSLSocket, number: int) -> None:
        """Send the file from an offset on."""
        with self._path.open("rb", buffering=0) as file:
            file.seek(number)
            while (piece := file.read(relay.PIECE_BYTES)) and not self._links.ended.is_set():
                link.sendall(piece)
                self.sent = max(self.sent, file.tell())
