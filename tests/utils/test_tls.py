"""Mutual TLS with one secret."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from nbdist.utils.tls import new_secret, tls_context


def exchange(own: bytes, other: bytes) -> bytes:
    """Return the bytes that a client with one secret receives from a server with another."""
    here, there = socket.socketpair()
    errors = []

    def serve() -> None:
        try:
            with tls_context(other, is_server=True).wrap_socket(there, server_side=True) as end:
                end.sendall(b"payload")
        except OSError as error:
            errors.append(error)
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with tls_context(own, is_server=False).wrap_socket(here) as end:
            assert end.version() == "TLSv1.3"
            return end.recv(100)
    finally:
        here.close()
        thread.join(10)


def test_ends_with_one_secret_exchange_bytes() -> None:
    secret = new_secret()
    assert exchange(secret, secret) == b"payload"


def test_a_client_refuses_a_server_with_another_secret() -> None:
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        exchange(new_secret(), new_secret())
