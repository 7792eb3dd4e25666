"""Exchange of addresses between the processes of a program.

Rank 0 listens at the address that the launcher has given to all processes. The network is trusted,
as for the collectives that follow.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import zmq

from nbdist.errors import StartError
from nbdist.utils.sockets import LOOPBACK, url_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Device
    from nbdist.worker.script.placement import Placement


class Connection(NamedTuple):
    """Connection of this process to the other ranks of a program.

    Attributes:
        close: waits for the other ranks, and disconnects this one.
        gather: gathers int32 numbers from all ranks: shape (n,) to (ranks, n).
        devices: devices of this rank.
    """

    close: Callable[[], None]
    gather: Callable[[np.ndarray], np.ndarray]
    devices: tuple[Device, ...]

    def exchange(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, in their order. Collective.

        Args:
            text: JSON of this rank, in any length.
        """
        longest = int(self.gather(np.array([len(text)], np.int32)).max())
        numbers = np.frombuffer(text.ljust(longest + -longest % 4), np.int32)
        return [row.tobytes().strip() for row in np.asarray(self.gather(numbers), np.int32)]


LIMIT_S = 300.0
"""Time in which all processes must start (seconds): a scheduler may start them one by one."""


def own_address(placement: Placement) -> str:
    """Return the address of this process for the others: of the interface towards rank 0.

    Raises:
        StartError: the host of rank 0 is unknown.
    """
    if placement.world_size == 1:
        return LOOPBACK
    try:
        kind, *_, place = socket.getaddrinfo(placement.host, 1, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise StartError(f"the host of rank 0, {placement.host}, is unknown: {error}") from None
    if placement.rank == 0:
        return str(place[0])
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def addresses(placement: Placement, port: int) -> tuple[str, ...]:
    """Return the addresses of all ranks, as `host:port`.

    Args:
        placement: place of this process.
        port: port of this process.

    Raises:
        StartError: the other processes do not start in time, or the port of rank 0 is in use.
    """
    host = own_address(placement)
    own = f"{url_host(host)}:{port}"
    if placement.rank == 0:
        return _collect(placement, own)
    return _ask(placement, own)


def _collect(placement: Placement, own: str) -> tuple[str, ...]:
    port = placement.coordinator.rpartition(":")[2]
    found, routes, deadline = {0: own}, [], time.monotonic() + LIMIT_S
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.IPV6, 1)
        try:
            server.bind(f"tcp://*:{port}")
        except zmq.ZMQError as error:
            raise StartError(f"rank 0 cannot listen on port {port}: {error}") from None
        while len(found) < placement.world_size:
            if not server.poll(int(1000 * max(0.0, deadline - time.monotonic()))):
                missing = sorted({*range(placement.world_size)} - found.keys())
                raise StartError(
                    f"ranks {', '.join(map(str, missing))} did not start within {LIMIT_S:g} s"
                )
            route, _, greeting = server.recv_multipart()
            rank, address = msgspec.json.decode(greeting, type=tuple[int, str])
            found[rank] = address
            routes.append(route)
        every = tuple(found[rank] for rank in range(placement.world_size))
        for route in routes:
            server.send_multipart([route, b"", msgspec.json.encode(every)])
    return every


def _ask(placement: Placement, own: str) -> tuple[str, ...]:
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.setsockopt(zmq.IPV6, 1)
        client.linger = 0
        client.connect(f"tcp://{placement.coordinator}")
        client.send(msgspec.json.encode((placement.rank, own)))
        if not client.poll(int(1000 * LIMIT_S)):
            raise StartError(
                f"rank 0 did not respond at {placement.coordinator} within {LIMIT_S:g} s"
            )
        return msgspec.json.decode(client.recv(), type=tuple[str, ...])
