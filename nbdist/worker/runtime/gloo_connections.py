"""Gloo's TCP connections of this process, found through /proc, and a way to end them.

Gloo has no call that ends a collective. If its connection is shut down, the waiting collective
raises. One thread of Gloo waits with one epoll for all its connections and for its listening
socket. This distinguishes them from connections of other libraries.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_OPEN_FILES = Path("/proc/self/fd")
_DETAILS = Path("/proc/self/fdinfo")
_WATCHED = re.compile(r"^tfd:.* ino:([0-9a-f]+)", re.MULTILINE)


def listening() -> set[int]:
    """Return the inodes of the open TCP sockets that listen."""
    return {inode for inode, number in _sockets().items() if _of_tcp(number, _listens)}


def peer_ports() -> set[int]:
    """Return the remote ports of the open connections.

    A connection to another host is a Unix socket here, with the name `<path>:<port>`.
    """
    numbers = _sockets().values()
    brought = map(_port_in_name, numbers)
    return {_of_tcp(number, _peer_port) for number in numbers}.union(brought) - {0}


def shut_beside(listeners: set[int]) -> int:
    """Shut down every connection that shares an epoll with one of these listeners.

    Args:
        listeners: inodes of sockets that listen.

    Returns:
        Number of connections that were shut down.
    """
    sockets = _sockets()
    watched = set[int]().union(*(inodes for inodes in _polls() if inodes & listeners))
    return sum(_of_tcp(sockets[inode], _shut) for inode in watched & sockets.keys())


def _listens(link: socket.socket) -> int:
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _peer_port(link: socket.socket) -> int:
    """Return the remote port. Raises OSError if the socket listens or is not connected."""
    port: int = link.getpeername()[1]
    return port


def _port_in_name(number: int) -> int:
    """Return the port in the remote name of a connected Unix socket; 0 if it contains none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
        if link.family == socket.AF_UNIX:
            port = str(link.getpeername()).rpartition(":")[2]
            return int(port) if port.isdecimal() else 0
    return 0


def _shut(link: socket.socket) -> int:
    _peer_port(link)
    link.shutdown(socket.SHUT_RDWR)
    return 1


def _of_tcp(number: int, ask: Callable[[socket.socket], int]) -> int:
    """Call `ask` with the TCP socket of a descriptor; 0 if it is none or if the call fails."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
        if link.type == socket.SOCK_STREAM and link.family in (socket.AF_INET, socket.AF_INET6):
            return ask(link)
    return 0


def _polls() -> list[set[int]]:
    """Return, for each epoll, the inodes that it watches."""
    found = []
    for number, target in _open():
        if target == "anon_inode:[eventpoll]":
            with contextlib.suppress(OSError):
                details = (_DETAILS / str(number)).read_text()
                found.append({int(inode, 16) for inode in _WATCHED.findall(details)})
    return found


def _sockets() -> dict[int, int]:
    """Return one descriptor for each socket, by inode."""
    return {
        int(target[8:-1]): number for number, target in _open() if target.startswith("socket:[")
    }


def _open() -> list[tuple[int, str]]:
    found = []
    for file in _OPEN_FILES.iterdir():
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            found.append((int(file.name), str(file.readlink())))
    return found
