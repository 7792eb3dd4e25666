"""Free ports on loopback for servers of tests."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)
"""Ports below those that Linux gives to sockets without a number (32768 and more).

A process that binds any free port takes none of them before the server of a test does.
"""


def free_ports(count: int) -> list[int]:
    """Return different ports that no process uses."""
    random_source = random.SystemRandom()  # tests set the seed of `random`
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random_source.sample(_PORTS, len(_PORTS)):
            held_socket = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                held_socket.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("all ports are in use")


def free_port() -> int:
    """Return a port that no process uses."""
    return free_ports(1)[0]
