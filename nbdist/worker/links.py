"""The TCP connections of this process, as Linux tells of them, and how to end some.

Gloo has no call that ends a collective. A connection that is shut down under it does: the
collective that waits raises.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")


def connections() -> set[int]:
    """The inodes of the sockets that are open now."""
    return {inode for inode, _ in _sockets()}


def shut_but(known: set[int], ports: set[int]) -> int:
    """Shut down every TCP connection, but those known and those to a port of these.

    Args:
        known: inodes.
        ports: of peers.

    Returns:
        How many were.
    """
    count = 0
    for inode, number in _sockets():
        if inode not in known:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
                if link.type == socket.SOCK_STREAM and link.getpeername()[1] not in ports:
                    link.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _sockets() -> list[tuple[int, int]]:
    """Inode and descriptor of each."""
    found = []
    for file in _OPEN_FILES.iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            target = str(file.readlink())
            if target.startswith("socket:["):
                found.append((int(target[8:-1]), int(file.name)))
    return found
