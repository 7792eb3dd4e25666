"""Encrypted ZeroMQ sockets of the notebook to which engines connect."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import zmq

from nbdist.errors import StartError
from nbdist.records import BoundSocket

if TYPE_CHECKING:
    from typing import Any

LOOPBACK = "127.0.0.1"
_PORTS = (61000, 65536)
"""Range above Linux's ephemeral ports: a successor of this process can bind the same port."""

_REBIND_S = 5.0
_POLL_S = 0.02


def bind_socket(
    socket: zmq.Socket[Any], bound_socket: BoundSocket | None, host: str = LOOPBACK
) -> BoundSocket:
    """Encrypt a socket with CURVE and bind it.

    Args:
        socket: a socket that is not bound yet.
        bound_socket: the previous port and keys; None for a random port and new keys.
        host: address of the interface.

    Returns:
        The port and the keys, to bind the socket again later.

    Raises:
        StartError: another process uses the port.
    """
    keys = (
        (bound_socket.public_key, bound_socket.secret_key) if bound_socket else zmq.curve_keypair()
    )
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_server = True
    if bound_socket is None:
        socket.ipv6 = ":" in host
        port = socket.bind_to_random_port(f"tcp://{url_host(host)}", *_PORTS)
        return BoundSocket(port=port, public_key=keys[0], secret_key=keys[1])
    _bind_again(socket, bound_socket.port)
    return bound_socket


def url_host(host: str) -> str:
    """Return a host as it stands before a port: IPv6 addresses have brackets."""
    return f"[{host}]" if ":" in host else host


def _bind_again(socket: zmq.Socket[Any], port: int) -> None:
    """Bind a port that was bound before. Retry for a few seconds: its owner may be ending."""
    deadline = time.monotonic() + _REBIND_S
    while True:
        try:
            socket.bind(f"tcp://{LOOPBACK}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise StartError(
                    f"cannot bind port {port}, to which the workers connect ({error}): "
                    "run %dist_stop --all to end them"
                ) from None
            time.sleep(_POLL_S)
        else:
            return
