"""Gloo's TCP connections of this process, as Linux tells of them, and how to end them.

Gloo has no call that ends a collective. A connection that is shut down under it does: the
collective that waits raises. A thread of gloo's waits for what comes on all of them, and on the
socket that peers connect to, with one epoll: so they are told from connections of other libraries.
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
    """The inodes of the TCP sockets that are open now and listen."""
    return {inode for inode, number in _sockets().items() if _of_tcp(number, _listens)}


def peer_ports() -> set[int]:
    """The ports at the other ends of the connections that there are now.

    Those of another host's are Unix sockets here, `<path>:<port>`.
    """
    numbers = _sockets().values()
    brought = map(_port_in_name, numbers)
    return {_of_tcp(number, _peer_port) for number in numbers}.union(brought) - {0}


def shut_beside(listeners: set[int]) -> int:
    """Shut down every connection that is waited for together with one of these.

    Args:
        listeners: inodes of sockets that listen.

    Returns:
        How many were.
    """
    sockets = _sockets()
    watched = set[int]().union(*(inodes for inodes in _polls() if inodes & listeners))
    return sum(_of_tcp(sockets[inode], _shut) for inode in watched & sockets.keys())


def _listens(link: socket.socket) -> int:
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _peer_port(link: socket.socket) -> int:
    """Raises where it listens, or is not connected."""
    port: int = link.getpeername()[1]
    return port


def _port_in_name(number: int) -> int:
    """Of a connected Unix socket whose name at the other end has one; else 0."""
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
    """The answer of a TCP socket, by its descriptor; of all else it is 0."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
        if link.type == socket.SOCK_STREAM and link.family in (socket.AF_INET, socket.AF_INET6):
            return ask(link)
    return 0


def _polls() -> list[set[int]]:
    """Of each epoll, the inodes of what it waits for."""
    found = []
    for number, target in _open():
        if target == "anon_inode:[eventpoll]":
            with contextlib.suppress(OSError):
                details = (_DETAILS / str(number)).read_text()
                found.append({int(inode, 16) for inode in _WATCHED.findall(details)})
    return found


def _sockets() -> dict[int, int]:
    """A descriptor of each, by inode."""
    return {
        int(target[8:-1]): number for number, target in _open() if target.startswith("socket:[")
    }


def _open() -> list[tuple[int, str]]:
    found = []
    for file in _OPEN_FILES.iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.append((int(file.name), str(file.readlink())))
    return found
