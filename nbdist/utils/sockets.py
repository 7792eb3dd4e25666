"""The sockets of the notebook's that engines connect to: opened anew, or as they were before."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import zmq

from nbdist.errors import StartError
from nbdist.records import BoundSocket

if TYPE_CHECKING:
    from typing import Any

_HOST = "tcp://127.0.0.1"
_PORTS = (61000, 65536)
"""Above those that Linux gives to whoever asks for any: a port stays free for another time."""

_FORMER_S = 5.0
_POLL_S = 0.02


def bind_socket(socket: zmq.Socket[Any], bound_socket: BoundSocket | None) -> BoundSocket:
    """Encrypt a socket and bind it.

    Args:
        socket: has to be new.
        bound_socket: as it was bound before; None for a port and keys of its own.

    Returns:
        How to bind it again.

    Raises:
        StartError: the port is taken.
    """
    keys = (
        (bound_socket.public_key, bound_socket.secret_key) if bound_socket else zmq.curve_keypair()
    )
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_server = True
    if bound_socket is None:
        port = socket.bind_to_random_port(_HOST, *_PORTS)
        return BoundSocket(port=port, public_key=keys[0], secret_key=keys[1])
    _bind_again(socket, bound_socket.port)
    return bound_socket


def _bind_again(socket: zmq.Socket[Any], port: int) -> None:
    """Who had it before may be ending."""
    deadline = time.monotonic() + _FORMER_S
    while True:
        try:
            socket.bind(f"{_HOST}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise StartError(
                    f"port {port}, to which the workers speak, cannot be had ({error}): "
                    "type %dist_stop --all to end them"
                ) from None
            time.sleep(_POLL_S)
        else:
            return
