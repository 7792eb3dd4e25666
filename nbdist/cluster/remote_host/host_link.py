"""Link to the fork server of another host: its sockets here, and forwarded ports there."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from nbdist.cluster.forkserver.control_socket import FORK_SERVER_SOCKET, connect
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.cluster.forkserver.client import ForkServerProcess
    from nbdist.cluster.forkserver.control_socket import Peer
    from nbdist.cluster.remote_host.host_connection import HostConnection
    from nbdist.records import ForkServerLocation

SOCKET_PREFIX = "n"


class HostLink:
    """Connection to a host with the ports that are forwarded over it.

    Args:
        connection: the open connection to the host.
        location: the location of the host's fork server.
        home: this machine's fork server, which ends connections with the cluster.

    Attributes:
        needs_forwards: True for a new connection without forwards.
    """

    def __init__(
        self,
        connection: HostConnection,
        location: ForkServerLocation,
        home: ForkServerProcess,
    ) -> None:
        self.needs_forwards = False
        self._connection = connection
        self._location = location
        self._home = home
        self._ports: set[int] = set()  # to be forwarded to the host
        self._controller: dict[str, Any] = {}
        self._disconnected_at = 0.0

    def prefix(self) -> str:
        """Return the prefix of the host's sockets for ports of this machine: `<prefix>:<port>`."""
        return f"{self._location.folder}/{SOCKET_PREFIX}"

    def new_ports(self, ports: Iterable[int]) -> list[int]:
        """Return those of these ports that are not forwarded yet."""
        return sorted(set(ports) - self._ports)

    def forward(self, ports: list[int]) -> None:
        """Forward these ports of this machine to the host."""
        self._connection.forward_remote(ports, self.prefix())
        self.add_ports(ports)

    def add_ports(self, ports: Iterable[int]) -> None:
        """Store ports that are forwarded already, or that `forward_all` will forward."""
        self._ports.update(ports)

    def forward_all(self) -> None:
        """Forward all ports over a new connection, after the old sockets have been removed."""
        if self._ports:
            self._connection.forward_remote(sorted(self._ports), self.prefix())
        self.needs_forwards = False

    def set_controller(self, controller: dict[str, Any]) -> None:
        """Store how engines of the host reach ipyparallel's controller."""
        self._controller = {**controller, "interface": f"ipc://{self.prefix()}"}

    def env(self) -> dict[str, str]:
        """Return the variables of engines: the connection to the controller, and the host's own."""
        return {
            "IPP_CONNECTION_INFO": json.dumps(self._controller),
            "IPP_PROFILE_DIR": self._location.folder,
            **self._connection.host.env,
        }

    @property
    def is_disconnected(self) -> bool:
        """True while the connection is broken and being restored."""
        return self._disconnected_at > 0

    def note_break(self) -> None:
        """Store that the connection has just broken."""
        self._disconnected_at = time.monotonic()

    def note_return(self) -> None:
        """Store that the connection works again."""
        self._disconnected_at = 0.0

    def disconnected_s(self) -> float:
        """Return the seconds since the connection broke."""
        return time.monotonic() - self._disconnected_at

    def why_lost(self) -> str:
        """Return why the connection broke, or an empty text."""
        return self._connection.why_lost()

    def reach(self) -> Peer:
        """Connect to the fork server over the open connection."""
        here = self._home.folder / f"{self._connection.name}.sock"
        with contextlib.suppress(OSError):
            return connect(here)  # the socket was forwarded before
        there = f"{self._location.folder}/{FORK_SERVER_SOCKET}"
        self._connection.forward_local(there, here.name)
        try:
            return connect(here)
        except OSError as error:
            raise StartError(f"its fork server cannot be reached: {error}") from error

    def reopen(self) -> None:
        """Open a connection that has ended again, still without forwards."""
        if not self._connection.is_open():
            self._connection.close()
            self.needs_forwards = True
            self._home.guard(self._connection.open())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
