"""Rendezvous process, to which a scheduler's hosts connect: `... rendezvous FOLDER PID`.

It runs beside the notebook's kernel, and outlives it like the fork server (`PID`). It submits jobs
(`allocations.py`), and accepts the connections of their hosts on one port. It serves each host like
an ssh master: it starts the fork server there, and forwards sockets in both directions. A host must
have the key that the jobs received. It executes commands only for the holder of another key, which
never leaves this process. On SIGTERM, or when the fork server ends, the process cancels the jobs.

It accepts requests on a socket in the cluster's folder, one JSON object for each connection:

    {"op": "reserve", "places"}                               {"job"}
    {"op": "release", "places"}                               {}
    {"op": "will_be_requeued", "places"}                      {"requeued"}
    {"op": "status", "places"}                                {"connected", "jobs", "address"}
    {"op": "job_status", "place"}                             {"job", "state"}
    {"op": "log_tail", "place"}                               {"log"}
    {"op": "open", "place"}                                   {"pid"}
    {"op": "is_open", "place"}                                {"open"}
    {"op": "start_fork_server", "place", "host", "content"}   {"output"}
    {"op": "forward_local", "place", "remote", "local"}       {}
    {"op": "forward_remote", "place", "ports", "prefix"}      {}
    {"op": "close", "place"}                                  {}

An answer with "error" contains the reason of a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
import msgspec

from nbdist.cluster.schedulers.allocations import LOOK_S, RENDEZVOUS_SOCKET, Allocations
from nbdist.cluster.schedulers.dial_in import CONNECTION, END, START_FORK_SERVER, WHO
from nbdist.errors import StartError
from nbdist.records import Batch, DialedHost, DialInTicket
from nbdist.utils.sockets import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


_START_FORK_SERVER_S = 30.0
_END_S = 2.0
_MOST_BYTES = 1 << 24
_ANYWHERE = ("192.0.2.1", 9)
"""Reserved address (RFC 5737). The route to it determines the address of this machine."""

_Answer = dict[str, Any]


class Rendezvous:
    """Connected hosts and their jobs, on one event loop.

    Args:
        batch: the options for the scheduler.
        folder: the cluster's folder, which is the working directory.
    """

    def __init__(self, batch: Batch, folder: Path) -> None:
        self._batch = batch
        self._connections: dict[int, asyncssh.SSHClientConnection] = {}  # by place
        self._used: set[int] = set()
        self._command_key = asyncssh.generate_private_key("ssh-ed25519")
        self._host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._cluster = folder.name
        self._port = 0
        self._over = asyncio.Event()
        self._allocations = Allocations(batch, folder, self._connections.__contains__, self._ticket)
        self._leaving: set[asyncio.Task[None]] = set()

    async def serve(self, fork_server: int) -> None:
        """Serve until SIGTERM or SIGINT, or until the fork server with this pid ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        try:
            loop.add_reader(os.pidfd_open(fork_server), self._over.set)
        except ProcessLookupError:
            self._over.set()
        acceptor = await self._listen()
        server = await asyncio.start_unix_server(self._answer, RENDEZVOUS_SOCKET, limit=_MOST_BYTES)
        Path(RENDEZVOUS_SOCKET).chmod(0o600)
        await self._over.wait()
        server.close()
        acceptor.close()
        for connection in self._connections.values():
            connection.abort()
        await self._allocations.end()

    # Connections of hosts.

    async def _listen(self) -> asyncssh.SSHAcceptor:
        is_here = self._batch.launcher == "mpi"  # by default, mpiexec starts processes here
        self._address = self._batch.listen or (LOOPBACK if is_here else own_address())
        acceptor = await asyncssh.listen_reverse(
            self._address,
            0,
            acceptor=self._accept,
            known_hosts=([self._host_key.convert_to_public()], [], []),
            username="nbdist",
            client_keys=[self._command_key],
            agent_path=None,
            preferred_auth="publickey",
            **CONNECTION,
        )
        self._port = acceptor.get_port()
        return acceptor

    async def _accept(self, connection: asyncssh.SSHClientConnection) -> None:
        """Assign a new connection to its place, instead of the previous connection from there."""
        done = await connection.run(WHO, encoding=None)
        host = msgspec.json.decode(done.stdout or b"", type=DialedHost)
        place = self._allocations.place(host.job, host.task)
        if place is None:  # another job provides the place now, or nobody needs it any more
            self._disconnect(connection)
            return
        if place in self._connections:
            self._disconnect(self._connections[place])
        self._connections[place] = connection
        self._used.discard(place)
        await connection.wait_closed()
        if self._connections.get(place) is connection:
            del self._connections[place]

    def _disconnect(self, connection: asyncssh.SSHClientConnection) -> None:
        """End a host, without waiting for one that does not respond."""

        async def end() -> None:
            with contextlib.suppress(asyncssh.Error, OSError, TimeoutError):
                await asyncio.wait_for(connection.run(END), _END_S)
            connection.abort()

        task = asyncio.ensure_future(end())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _ticket(self, job: int) -> DialInTicket:
        """Create the ticket that the hosts of a job read."""
        return DialInTicket(
            address=self._address,
            port=self._port,
            key=self._host_key.export_private_key("openssh").decode(),
            trusted=self._command_key.export_public_key("openssh").decode(),
            cluster=self._cluster,
            job=job,
        )

    def _connection(self, place: int) -> asyncssh.SSHClientConnection:
        if place not in self._connections:
            raise StartError("the host has not connected")
        return self._connections[place]

    # Requests.

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                request = json.loads(await reader.readline())
                operation: Callable[..., Awaitable[_Answer]] = getattr(
                    self, f"_do_{request.pop('op')}"
                )
                answer = await operation(**request)
            except Exception as error:  # noqa: BLE001 - the answer contains the error
                answer = {"error": str(error) or type(error).__name__}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _do_reserve(self, places: list[int]) -> _Answer:
        return {"job": await self._allocations.reserve(places)}

    async def _do_release(self, places: list[int]) -> _Answer:
        await self._allocations.release(places)
        for place in places:
            if place in self._connections:
                self._disconnect(self._connections.pop(place))
        return {}

    async def _do_will_be_requeued(self, places: list[int]) -> _Answer:
        return {"requeued": await self._allocations.will_be_requeued(places)}

    async def _do_status(self, places: list[int]) -> _Answer:
        """Return the connected places, and the states of the jobs of the others."""
        connected = sorted(place for place in places if place in self._connections)
        jobs = self._allocations.of(place for place in places if place not in self._connections)
        states = await asyncio.gather(*(self._allocations.query(number) for number in jobs))
        descriptions = [
            {"job": self._allocations.named(number), "state": msgspec.to_builtins(state)}
            for number, state in zip(jobs, states, strict=True)
        ]
        address = f"{self._address}:{self._port}"
        return {"connected": connected, "jobs": descriptions, "address": address}

    async def _do_job_status(self, place: int) -> _Answer:
        """Return the state of a place's job; the last known state if the query takes long."""
        for number in self._allocations.of([place]):
            look = asyncio.ensure_future(self._allocations.query(number))
            await asyncio.wait([look], timeout=LOOK_S)
            state = msgspec.to_builtins(self._allocations.known(number))
            return {"job": self._allocations.named(number), "state": state}
        raise StartError("no job provides this place")

    async def _do_log_tail(self, place: int) -> _Answer:
        """Return the last output of the hosts of a place's job."""
        for number in self._allocations.of([place]):
            return {"log": await asyncio.to_thread(self._allocations.log_tail, number)}
        return {"log": ""}

    async def _do_open(self, place: int) -> _Answer:
        self._connection(place)
        self._used.add(place)
        return {"pid": os.getpid()}

    async def _do_is_open(self, place: int) -> _Answer:
        return {"open": place in self._connections}

    async def _do_start_fork_server(self, place: int, host: str, content: str) -> _Answer:
        run = self._connection(place).run(START_FORK_SERVER, input=content.encode(), encoding=None)
        try:
            done = await asyncio.wait_for(run, _START_FORK_SERVER_S)
        except TimeoutError:
            raise StartError(
                f"Python did not start on {host} within {_START_FORK_SERVER_S:g} s"
            ) from None
        output, errors = done.stdout or b"", done.stderr or b""
        assert isinstance(output, bytes)
        assert isinstance(errors, bytes)
        if done.exit_status != 0:
            raise StartError(errors.decode(errors="replace").strip())
        return {"output": output.decode()}

    async def _do_forward_local(self, place: int, remote: str, local: str) -> _Answer:
        Path(local).unlink(missing_ok=True)
        await self._connection(place).forward_local_path(local, remote)
        Path(local).chmod(0o600)
        return {}

    async def _do_forward_remote(self, place: int, ports: list[int], prefix: str) -> _Answer:
        connection = self._connection(place)
        for port in ports:
            await connection.forward_remote_path_to_port(f"{prefix}:{port}", LOOPBACK, port)
        return {}

    async def _do_close(self, place: int) -> _Answer:
        """Close a connection that has been used. Keep an unused one for the next `open`."""
        if place in self._used and place in self._connections:
            self._used.discard(place)
            self._connections.pop(place).abort()
        return {}


def own_address() -> str:
    """Return this machine's address on its default network; loopback if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect(_ANYWHERE)
        except OSError:
            return LOOPBACK
        return str(unsent.getsockname()[0])


def main() -> None:
    folder, fork_server = Path(sys.argv[1]), int(sys.argv[2])
    os.chdir(folder)  # socket paths are limited to 108 bytes
    batch = msgspec.json.decode(sys.stdin.buffer.read(), type=Batch)
    logging.basicConfig(level=logging.WARNING)

    async def serve() -> None:
        await Rendezvous(batch, folder).serve(fork_server)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
