"""Fork server on another host, over a connection that reconnects after it breaks."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import msgspec

from nbdist.cluster.forkserver.client import END_TIMEOUT_S, ForkServerClient
from nbdist.cluster.remote_host.host_link import SOCKET_PREFIX, HostLink
from nbdist.errors import NbdistError, StartError
from nbdist.records import ForkServerLocation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.cluster.forkserver.client import ForkServerProcess, ForkServerState
    from nbdist.cluster.forkserver.control_socket import Peer
    from nbdist.cluster.remote_host.host_connection import HostConnection
    from nbdist.records import ForkServerRequest

LOST_S = 5.0
"""Time without a connection after which a host is lost, and its engines count as dead."""

HEARTBEAT_S = 1.0
"""Interval of heartbeats to the fork server, well below its `SILENCE_S`."""

_OWN_S = 10.0
_AGAIN_S = 0.5
_TRIES = 2
_END_S = 3.0
_DISCONNECT = {"op": "disconnect", "leaves": True}


class RemoteForkServer(ForkServerClient):
    """Running fork server on another host. Create it with `start` or `take_over`.

    Args:
        link: the open connection to the host.
        location: the location of the fork server.
        home: this machine's fork server, which ends connections with the cluster.

    Attributes:
        host: the host.
        location: the location of the fork server.
    """

    def __init__(
        self,
        link: HostConnection,
        location: ForkServerLocation,
        home: ForkServerProcess,
    ) -> None:
        self.host = link.host
        self.location = location
        self._link = HostLink(link, location, home)
        self._closing = threading.Event()
        super().__init__(self._link.reach(), home.role, _OWN_S, key=home.folder.name)
        self._current = [self._peer]
        arguments = self._current, os.getpid(), self._closing, self.state
        self._finalizer = weakref.finalize(self, _disconnect, *arguments)
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, name="nbdist-heartbeat", daemon=True
        )
        self._heartbeats.start()

    def __str__(self) -> str:
        return f"the fork server on {self.host.key}"

    @classmethod
    def take_over(
        cls,
        link: HostConnection,
        location: ForkServerLocation,
        home: ForkServerProcess,
        ports: Iterable[int],
    ) -> Self:
        """Become the owner of a fork server that another process has started.

        Args:
            link: the connection to the host, open or not.
            location: the location of the fork server.
            home: this machine's fork server.
            ports: the ports of this machine that are forwarded to the host.

        Raises:
            StartError: the fork server cannot be reached.
        """
        was_open = link.is_open()
        if not was_open:
            home.guard(link.open())
        self = cls(link, location, home)
        self._link.add_ports(ports)
        self._link.needs_forwards = not was_open
        if self._link.needs_forwards:
            self._ask("unlinked", _OWN_S, op="unlink", name=SOCKET_PREFIX)
            self._link.forward_all()
        return self

    @classmethod
    def start(
        cls,
        link: HostConnection,
        start_request: ForkServerRequest,
        home: ForkServerProcess,
    ) -> Self:
        """Connect to the host, start a fork server there, and become its owner.

        Raises:
            StartError: the connection or the start failed. The message contains a remedy.
        """
        try:
            home.guard(link.open())
            return cls(
                link,
                _parsed_location(
                    link.start_fork_server(msgspec.json.encode(start_request)), link.host.key
                ),
                home,
            )
        except BaseException:
            link.close()
            raise

    # Addresses as the engines of the host see them.

    def prefix(self) -> str:
        """Return the prefix of the host's sockets for ports of this machine: `<prefix>:<port>`."""
        return self._link.prefix()

    def forward(self, ports: Sequence[int]) -> None:
        """Forward these ports of this machine to the host."""
        fresh = self._link.new_ports(ports)
        if fresh:
            self._await_connection()
            self._link.forward(fresh)

    def forward_controller(self, controller: dict[str, Any]) -> None:
        """Make ipyparallel's controller reachable from the host.

        Args:
            controller: the content of its connection file for engines.
        """
        self.forward(ports_of(controller))
        self._link.set_controller(controller)

    def env(self) -> dict[str, str]:
        """Return the variables of engines: the connection to the controller, and the host's own."""
        return self._link.env()

    def describe_end(self, name: str, lines: int) -> str:
        if not self.runs():
            why = self._link.why_lost()
            lost = f"{self.host.key} could not be reached for {LOST_S:g} s"
            return f"{lost}; {why}" if why else lost
        return super().describe_end(name, lines)

    def log_tail(self, name: str, lines: int = 20) -> str:
        if self.state.is_over or threading.current_thread() is self._thread:
            return ""  # no response can arrive: this thread itself would have to receive it
        try:
            text: str = self._ask("tail", END_TIMEOUT_S, op="tail", id=name, lines=lines)["text"]
        except StartError:
            return ""
        return text

    # The connection.

    @property
    def is_disconnected(self) -> bool:
        """True while the connection is broken and being restored."""
        return self._link.is_disconnected

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError), self._sending:
                self._peer.send({"op": "heartbeat"})

    def _send_command(self, **command: Any) -> None:
        """Send a command. While the connection is being restored, wait for it."""
        for _ in range(_TRIES):
            self._await_connection()
            peer = self._peer
            with contextlib.suppress(OSError), self._sending:
                peer.send(command)
                return
            self._await_other(peer)  # the listening thread is about to detect the break, too
        raise StartError(
            f"{self.host.key} cannot be reached: check the host and the network, then run "
            "%dist_restart"
        )

    def _await_connection(self) -> None:
        with self.state.changed:
            self.state.changed.wait_for(
                lambda: not self.is_disconnected or self.state.is_over, 2 * LOST_S
            )

    def _await_other(self, peer: Peer) -> None:
        """Wait until a new connection to the fork server exists, or the host is lost."""
        with self.state.changed:
            self.state.changed.wait_for(
                lambda: self.state.is_over or self._peer is not peer, 2 * LOST_S
            )

    def _connects_again(self) -> bool:
        """Reconnect within `LOST_S`, and return whether this succeeded.

        Returns False if this process is closing the connection.
        """
        if self._closing.is_set() or self.state.is_over:
            return False
        self._link.note_break()
        while not self._closing.is_set() and self._link.disconnected_s() < LOST_S:
            try:
                self._reconnect()
            except (NbdistError, OSError):
                self._closing.wait(_AGAIN_S)
                continue
            with self.state.changed:
                self._link.note_return()
                self.state.changed.notify_all()
            return True
        return False

    def _reconnect(self) -> None:
        """Try once to reconnect to the fork server and to forward all ports.

        Raises:
            NbdistError, OSError: the host cannot be reached yet.
        """
        self._link.reopen()
        peer = self._link.reach()
        self._own(peer)
        with self._sending:
            self._peer.close()
            self._peer = self._current[0] = peer
        if self._link.needs_forwards:  # sockets of the former connection block the new forwards
            peer.send({"op": "unlink", "name": SOCKET_PREFIX})
            self._receive_until("unlinked")
            self._link.forward_all()

    def _receive_until(self, kind: str) -> None:
        """Store events until one of this kind arrives. For the listening thread only."""
        try:
            while self._peer.wait(_OWN_S):
                events = self._peer.read()
                for event in events:
                    self.state.note(event)
                if any(event["event"] == kind for event in events):
                    return
        except EOFError as error:
            raise StartError("the connection broke again") from error
        raise StartError("the fork server does not respond")

    def leave(self) -> None:
        """Close the connection only. The fork server waits for an owner, and the link stays."""
        self._finalizer.detach()
        self._end()

    def close(self) -> None:
        """End every child on the host, then the fork server and the connection.

        The fork server of an unreachable host ends its children and itself.
        """
        if self._finalizer.detach() is None:
            return
        if not self.is_disconnected:
            _disconnect(self._current, os.getpid(), self._closing, self.state)
        self._closing.set()
        self._link.close()
        self._end()

    def announce_end(self) -> None:
        """Send `disconnect` before `close`, so that several fork servers can end in parallel."""
        self._closing.set()
        with contextlib.suppress(OSError), self._sending:
            self._peer.send(_DISCONNECT)

    def _end(self) -> None:
        self._closing.set()
        self._heartbeats.join()
        self._end_connection()


def _parsed_location(output: bytes, host: str) -> ForkServerLocation:
    """Parse the location of a fork server from the last line of its start.

    The startup files of a shell may print lines before it.
    """
    lines = output.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=ForkServerLocation)
    except msgspec.DecodeError:
        printed = output.decode(errors="replace").strip()[-200:]
        raise StartError(
            f"Python on {host} printed {printed!r} instead of the fork server's location"
        ) from None


def ports_of(controller: dict[str, Any]) -> list[int]:
    """Return the ports of ipyparallel's controller from its connection file for engines."""
    values = (value for name, value in controller.items() if name != "ssh")
    lists = (value if isinstance(value, list) else [value] for value in values)
    return [port for ports in lists for port in ports if isinstance(port, int)]


def _disconnect(
    current: list[Peer], pid: int, closing: threading.Event, state: ForkServerState
) -> None:
    """Tell the fork server to end, and wait until it has ended.

    Do nothing in a process that was forked from the owner. `weakref.finalize` also calls this
    when Python exits, before this machine's fork server ends the connections.
    """
    if os.getpid() == pid:
        closing.set()
        with contextlib.suppress(OSError):
            current[0].send(_DISCONNECT)
        state.wait_end(_END_S)
