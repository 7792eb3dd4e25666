"""Interface of a connection to another host, opened here by ssh or by a job on that host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import Host


class HostConnection(Protocol):
    """Connection to one host, with its forwards.

    Attributes:
        host: the host.
        name: the name of the connection, unique in the cluster.
    """

    host: Host
    name: str

    def open(self) -> int:
        """Connect, and return the pid of the process that holds the connection.

        Raises:
            StartError: the host cannot be reached.
        """
        ...

    def is_open(self) -> bool:
        """Return True if the host is connected. Another process may have opened the connection."""
        ...

    def start_fork_server(self, content: bytes) -> bytes:
        """Start a fork server on the host.

        Args:
            content: the `ForkServerRequest` as JSON.

        Returns:
            The output of the start. Its last line is a `ForkServerLocation` as JSON.

        Raises:
            StartError: the start failed or took too long. The message contains a remedy.
        """
        ...

    def forward_local(self, there: str, here: str) -> None:
        """Forward a socket of the host to the path `here` in the cluster's folder.

        Raises:
            StartError: the forward failed.
        """
        ...

    def forward_remote(self, ports: Iterable[int], prefix: str) -> None:
        """Forward loopback ports of this machine to sockets `<prefix>:<port>` on the host.

        Raises:
            StartError: the forward failed.
        """
        ...

    def why_lost(self) -> str:
        """Return the reason why the host is lost; empty if unknown."""
        ...

    def close(self) -> None:
        """End the connection with all programs and forwards."""
        ...
