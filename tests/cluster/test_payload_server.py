"""Server of large pushed objects: digest, offsets, strangers."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.payload_server import PayloadListener, PayloadServer
from nbdist.utils.sockets import LOOPBACK
from nbdist.utils.tls import new_secret, tls_context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTENT = bytes(range(256)) * 10_000


@pytest.fixture
def listener() -> Iterator[PayloadListener]:
    listener = PayloadListener()
    yield listener
    listener.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "payload").write_bytes(CONTENT)
    return tmp_path / "payload"


def read(listener: PayloadListener, secret: bytes, offset: int) -> bytes:
    """Return the bytes from an offset on, as a process with this secret."""
    tls = tls_context(secret, is_server=False)
    with socket.create_connection((LOOPBACK, listener.port)) as link, tls.wrap_socket(link) as end:
        end.sendall(offset.to_bytes(8))
        found = b""
        while part := end.recv(1 << 16):
            found += part
        return found


def test_readers_receive_the_file_from_their_offset(listener: PayloadListener, file: Path) -> None:
    with PayloadServer(listener, file) as server:
        assert read(listener, server.secret, 1_000_000) == CONTENT[1_000_000:]
        assert read(listener, server.secret, 0) == CONTENT
        assert server.digest() == hashlib.sha256(CONTENT).digest()
    assert server.sent == len(CONTENT)


def test_a_process_with_another_secret_receives_nothing(
    listener: PayloadListener, file: Path
) -> None:
    with PayloadServer(listener, file) as server:
        with pytest.raises(ssl.SSLError):
            read(listener, new_secret(), 0)
        with socket.create_connection((LOOPBACK, listener.port)) as link:
            link.sendall(bytes(64))
            with contextlib.suppress(ConnectionResetError):
                assert len(link.recv(1 << 16)) < 100, "an alert of TLS"
        assert read(listener, server.secret, 0) == CONTENT, "it still serves others"
    assert server.sent == len(CONTENT)


def test_one_socket_serves_files_one_after_another(listener: PayloadListener, file: Path) -> None:
    for content in (b"first", b"second"):
        file.write_bytes(content)
        with PayloadServer(listener, file) as server:
            assert read(listener, server.secret, 0) == content


def test_between_transfers_all_connections_are_closed_at_once(
    listener: PayloadListener, file: Path
) -> None:
    with PayloadServer(listener, file) as server:
        secret = server.secret
    with pytest.raises(OSError, match=r"closed|reset|EOF|eof"):
        read(listener, secret, 0)
