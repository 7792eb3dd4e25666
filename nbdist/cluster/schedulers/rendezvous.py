"""Where hosts that a scheduler has given call: `… cluster.switchboard FOLDER PID`.

A process of the cluster's, beside the notebook's kernel, which it outlives as the fork server
(`PID`) does. It has the jobs submitted (`allocations.py`), takes the calls of their hosts over one
port, and does for each of them what an ssh master does: starts the fork server there, and brings
sockets here and there. Whoever calls has to have the key that the jobs were given, and is given
orders only with the other one, which never leaves this process. When it is told to end, or the fork
server is gone, it has the jobs cancelled.

It is asked over a socket in the cluster's folder, one JSON object for each connection:

    {"op": "book", "places"}                    {"new"}
    {"op": "release", "places"}                 {}
    {"op": "comes_again", "places"}             {"again"}
    {"op": "state", "places"}                   {"called", "jobs", "address"}
    {"op": "fate", "place"}                     {"job", "state"}
    {"op": "words", "place"}                    {"words"}
    {"op": "open", "place"}                     {"pid"}
    {"op": "is_open", "place"}                  {"open"}
    {"op": "run", "place", "content"}           {"output"}
    {"op": "here", "place", "there", "here"}    {}
    {"op": "there", "place", "ports", "prefix"} {}
    {"op": "close", "place"}                    {}

An answer with "error" says why it could not.
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

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


LOOPBACK = "127.0.0.1"
_START_FORK_SERVER_S = 30.0
_END_S = 2.0
_MOST_BYTES = 1 << 24
_ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody's (RFC 5737): what leads there shows the address of this machine."""

_Answer = dict[str, Any]


class Rendezvous:
    """Its state, on one event loop.

    Args:
        batch: how hosts are asked for.
        folder: the cluster's, which is the working one.
    """

    def __init__(self, batch: Batch, folder: Path) -> None:
        self._batch = batch
        self._calls: dict[int, asyncssh.SSHClientConnection] = {}  # by place
        self._used: set[int] = set()
        self._order = asyncssh.generate_private_key("ssh-ed25519")
        self._host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._cluster = folder.name
        self._port = 0
        self._over = asyncio.Event()
        self._allocations = Allocations(batch, folder, self._calls.__contains__, self._calling)
        self._leaving: set[asyncio.Task[None]] = set()

    async def serve(self, fork_server: int) -> None:
        """Until it is told to end, or the fork server of this pid has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        try:
            loop.add_reader(os.pidfd_open(fork_server), self._over.set)
        except ProcessLookupError:
            self._over.set()
        calls = await self._listen()
        asked = await asyncio.start_unix_server(self._answer, RENDEZVOUS_SOCKET, limit=_MOST_BYTES)
        Path(RENDEZVOUS_SOCKET).chmod(0o600)
        await self._over.wait()
        asked.close()
        calls.close()
        for connection in self._calls.values():
            connection.abort()
        await self._allocations.end()

    # Calls.

    async def _listen(self) -> asyncssh.SSHAcceptor:
        is_here = self._batch.launcher == "mpi"  # unless its words name other hosts
        self._address = self._batch.listen or (LOOPBACK if is_here else own_address())
        acceptor = await asyncssh.listen_reverse(
            self._address,
            0,
            acceptor=self._hear,
            known_hosts=([self._host_key.convert_to_public()], [], []),
            username="nbdist",
            client_keys=[self._order],
            agent_path=None,
            preferred_auth="publickey",
            **CONNECTION,
        )
        self._port = acceptor.get_port()
        return acceptor

    async def _hear(self, connection: asyncssh.SSHClientConnection) -> None:
        """A host has called: it takes its place; one that has called from there is gone."""
        done = await connection.run(WHO, encoding=None)
        caller = msgspec.json.decode(done.stdout or b"", type=DialedHost)
        place = self._allocations.place(caller.job, caller.task)
        if place is None:  # another one was asked for in its place, or nobody wants it any more
            self._let_go(connection)
            return
        if place in self._calls:
            self._let_go(self._calls[place])
        self._calls[place] = connection
        self._used.discard(place)
        await connection.wait_closed()
        if self._calls.get(place) is connection:
            del self._calls[place]

    def _let_go(self, connection: asyncssh.SSHClientConnection) -> None:
        """A host is to end; one that is cut off is not waited for."""

        async def end() -> None:
            with contextlib.suppress(asyncssh.Error, OSError, TimeoutError):
                await asyncio.wait_for(connection.run(END), _END_S)
            connection.abort()

        task = asyncio.ensure_future(end())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _calling(self, job: int) -> DialInTicket:
        """What hosts of this job read."""
        return DialInTicket(
            address=self._address,
            port=self._port,
            key=self._host_key.export_private_key("openssh").decode(),
            trusted=self._order.export_public_key("openssh").decode(),
            cluster=self._cluster,
            job=job,
        )

    def _called(self, place: int) -> asyncssh.SSHClientConnection:
        if place not in self._calls:
            raise StartError("it has not called")
        return self._calls[place]

    # Requests.

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                request = json.loads(await reader.readline())
                does: Callable[..., Awaitable[_Answer]] = getattr(self, f"_do_{request.pop('op')}")
                answer = await does(**request)
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                answer = {"error": str(error) or type(error).__name__}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _do_book(self, places: list[int]) -> _Answer:
        return {"new": await self._allocations.book(places)}

    async def _do_release(self, places: list[int]) -> _Answer:
        await self._allocations.release(places)
        for place in places:
            if place in self._calls:
                self._let_go(self._calls.pop(place))
        return {}

    async def _do_comes_again(self, places: list[int]) -> _Answer:
        return {"again": await self._allocations.comes_again(places)}

    async def _do_state(self, places: list[int]) -> _Answer:
        """Who has called of these, and what the jobs of the others do."""
        called = sorted(place for place in places if place in self._calls)
        jobs = self._allocations.of(place for place in places if place not in self._calls)
        states = await asyncio.gather(*(self._allocations.look(number) for number in jobs))
        said = [
            {"job": self._allocations.named(number), "state": msgspec.to_builtins(state)}
            for number, state in zip(jobs, states, strict=True)
        ]
        return {"called": called, "jobs": said, "address": f"{self._address}:{self._port}"}

    async def _do_fate(self, place: int) -> _Answer:
        """What the scheduler says of this place's job; it may not answer at once."""
        for number in self._allocations.of([place]):
            look = asyncio.ensure_future(self._allocations.look(number))
            await asyncio.wait([look], timeout=LOOK_S)
            state = msgspec.to_builtins(self._allocations.known(number))
            return {"job": self._allocations.named(number), "state": state}
        raise StartError("no job was asked for")

    async def _do_words(self, place: int) -> _Answer:
        """What hosts of this place's job wrote last."""
        for number in self._allocations.of([place]):
            return {"words": await asyncio.to_thread(self._allocations.words, number)}
        return {"words": ""}

    async def _do_open(self, place: int) -> _Answer:
        self._called(place)
        self._used.add(place)
        return {"pid": os.getpid()}

    async def _do_is_open(self, place: int) -> _Answer:
        return {"open": place in self._calls}

    async def _do_run(self, place: int, content: str) -> _Answer:
        run = self._called(place).run(START_FORK_SERVER, input=content.encode(), encoding=None)
        try:
            done = await asyncio.wait_for(run, _START_FORK_SERVER_S)
        except TimeoutError:
            raise StartError(
                f"Python did not begin there within {_START_FORK_SERVER_S:g} s"
            ) from None
        output, said = done.stdout or b"", done.stderr or b""
        assert isinstance(output, bytes)
        assert isinstance(said, bytes)
        if done.exit_status != 0:
            raise StartError(said.decode(errors="replace").strip())
        return {"output": output.decode()}

    async def _do_here(self, place: int, there: str, here: str) -> _Answer:
        Path(here).unlink(missing_ok=True)
        await self._called(place).forward_local_path(here, there)
        Path(here).chmod(0o600)
        return {}

    async def _do_there(self, place: int, ports: list[int], prefix: str) -> _Answer:
        call = self._called(place)
        for port in ports:
            await call.forward_remote_path_to_port(f"{prefix}:{port}", LOOPBACK, port)
        return {}

    async def _do_close(self, place: int) -> _Answer:
        """End what goes over the connection; one on which nothing does goes on."""
        if place in self._used and place in self._calls:
            self._used.discard(place)
            self._calls.pop(place).abort()
        return {}


def own_address() -> str:
    """This machine's, on the network by which it reaches others; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def main() -> None:
    folder, fork_server = Path(sys.argv[1]), int(sys.argv[2])
    os.chdir(folder)  # a socket's path has room for 108 bytes
    batch = msgspec.json.decode(sys.stdin.buffer.read(), type=Batch)
    logging.basicConfig(level=logging.WARNING)

    async def serve() -> None:
        await Rendezvous(batch, folder).serve(fork_server)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
