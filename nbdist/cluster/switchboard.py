"""Where hosts that a scheduler has given call: `python -m nbdist.cluster.switchboard FOLDER`.

A process of the cluster's, beside the notebook's kernel, which it outlives as the seed does. It
submits the jobs, takes the calls of their hosts over one port, and does for each of them what an
ssh master does: starts the seed there, and brings sockets here and there. Whoever calls has to have
the key that the jobs were given, and is given orders only with the other one, which never leaves
this machine. When it is told to end, it cancels the jobs.

It is asked over a socket in the cluster's folder, one JSON object for each connection:

    {"op": "submit", "places"}                  {"job"}
    {"op": "comes_again", "places"}             {"again"}
    {"op": "state"}                             {"called", "job", "state", "address"}
    {"op": "words"}                             {"words"}
    {"op": "open", "place"}                     {"pid", "host"}
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

from nbdist.cluster.caller import ALIVE, CIPHERS, END, SOW, WHO
from nbdist.cluster.jobs import BatchJob, Job, MpiJob
from nbdist.cluster.pods import PodsJob
from nbdist.errors import StartError
from nbdist.records import Batch, Caller, Calling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nbdist.records import JobState

SWITCH_SOCKET = "switch.sock"
LOOK_S = 2.0
"""Between two looks at a job while somebody waits for it."""

_LOGIN_S = 10
_SOW_S = 30.0
_SETTLE_S = 45.0
"""Longer than Slurm waits by default before it kills what was told to end (`KillWait`)."""

_BEGIN_AGAIN_S = 15.0
_ENDING = ("COMPLETING",)
_MOST_BYTES = 1 << 24
_ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody's (RFC 5737): what leads there shows the address of this machine."""

_Answer = dict[str, Any]
_log = logging.getLogger(__name__)


class Switchboard:
    """Its state, on one event loop.

    Args:
        batch: how hosts are asked for.
        folder: the cluster's, which is the working one.
    """

    def __init__(self, batch: Batch, folder: Path) -> None:
        self._batch = batch
        self._folder = folder
        self._jobs: dict[int, Job] = {}
        self._owners: dict[int, int] = {}  # of each place, the number of its newest job
        self._calls: dict[int, tuple[Caller, asyncssh.SSHClientConnection]] = {}  # by place
        self._used: set[int] = set()
        self._looks: dict[int, tuple[float, JobState]] = {}
        self._order = asyncssh.generate_private_key("ssh-ed25519")
        self._host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._port = 0
        self._over = asyncio.Event()

    async def serve(self) -> None:
        """Until it is told to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._over.set)
        calls = await self._listen()
        asked = await asyncio.start_unix_server(self._answer, SWITCH_SOCKET, limit=_MOST_BYTES)
        Path(SWITCH_SOCKET).chmod(0o600)
        await self._over.wait()
        asked.close()
        calls.close()
        for _, connection in self._calls.values():
            connection.abort()
        for job in self._jobs.values():
            try:
                await asyncio.to_thread(job.cancel)
            except Exception as error:  # noqa: BLE001 - the others are cancelled, too
                _log.warning("%s is not cancelled: %s", job, error)

    # Calls.

    async def _listen(self) -> asyncssh.SSHAcceptor:
        self._address = self._batch.listen or own_address()
        acceptor = await asyncssh.listen_reverse(
            self._address,
            0,
            config=None,
            acceptor=self._hear,
            known_hosts=([self._host_key.convert_to_public()], [], []),
            username="nbdist",
            client_keys=[self._order],
            agent_path=None,
            preferred_auth="publickey",
            encryption_algs=CIPHERS,
            compression_algs=None,
            login_timeout=_LOGIN_S,
            **ALIVE,
        )
        self._port = acceptor.get_port()
        return acceptor

    async def _hear(self, connection: asyncssh.SSHClientConnection) -> None:
        """A host has called: it takes its place; one that has called from there is gone."""
        done = await connection.run(WHO, encoding=None)
        caller = msgspec.json.decode(done.stdout or b"", type=Caller)
        job = self._jobs.get(caller.job)
        places = job.places[caller.task : caller.task + 1] if job is not None else ()
        if not places or self._owners[places[0]] != caller.job:
            await connection.run(END)  # another one was asked for in its place
            connection.abort()
            return
        (place,) = places
        if place in self._calls:
            self._calls[place][1].abort()
        self._calls[place] = caller, connection
        self._used.discard(place)
        await connection.wait_closed()
        if self._calls.get(place, (None, None))[1] is connection:
            del self._calls[place]

    def _called(self, place: int) -> asyncssh.SSHClientConnection:
        if place not in self._calls:
            raise StartError("it has not called")
        return self._calls[place][1]

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

    async def _do_submit(self, places: list[int]) -> _Answer:
        """Ask for hosts, if none are about to be had for these places."""
        for number in {self._owners[place] for place in places if place in self._owners}:
            if await self._goes_on(self._jobs[number], places):
                return {"job": str(self._jobs[number])}
        number = len(self._jobs) + 1
        job = _new_job(self._batch, number, tuple(places), self._folder)
        await asyncio.to_thread(job.submit, self._write_calling(number))
        self._jobs[number] = job
        self._owners |= dict.fromkeys(places, number)
        for former in self._jobs.values():
            if former.number not in self._owners.values():
                await asyncio.to_thread(former.cancel)
        return {"job": str(job)}

    async def _settled(self, job: Job) -> JobState:
        """What becomes of a job whose hosts are gone; a scheduler may not know it at once."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            state = await asyncio.to_thread(job.state)
            bound_s = _SETTLE_S if state.word in _ENDING else LOOK_S
            is_settled = state.over or state.waits or job.has_successors
            if is_settled or loop.time() > began + bound_s:
                return state
            await asyncio.sleep(LOOK_S / 4)

    async def _goes_on(self, job: Job, places: list[int]) -> bool:
        """Whether it was queued again, or has even begun again, with hosts for these places."""
        state = await self._settled(job)
        if state.over or state.waits or job.has_successors:
            return not state.over
        loop = asyncio.get_running_loop()
        until = loop.time() + _BEGIN_AGAIN_S
        others = set(job.places) - set(places)
        while not any(place in self._calls for place in places):
            if loop.time() > until or any(place in self._calls for place in others):
                return False  # they are gone, and it goes on without
            await asyncio.sleep(LOOK_S / 4)
        return True

    async def _do_comes_again(self, places: list[int]) -> _Answer:
        """Whether hosts that were taken away for these places are asked for again."""
        numbers = {self._owners[place] for place in places if place in self._owners}
        for job in (self._jobs[number] for number in sorted(numbers)):
            state = await self._settled(job)
            if state.over or not (state.waits or job.has_successors):
                return {"again": False}
        return {"again": bool(numbers)}

    def _write_calling(self, job: int) -> Path:
        """What callers of this job read."""
        calling = Calling(
            address=self._address,
            port=self._port,
            key=self._host_key.export_private_key("openssh").decode(),
            trusted=self._order.export_public_key("openssh").decode(),
            job=job,
        )
        file = self._folder / f"job-{job}.json"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(msgspec.json.encode(calling))
        return file

    async def _do_state(self) -> _Answer:
        """Who has called, and what the newest job does."""
        if not self._jobs:
            raise StartError("no job was submitted")
        job = self._jobs[max(self._jobs)]
        state = await self._look(job)
        return {
            "called": sorted(self._calls),
            "job": str(job),
            "state": msgspec.to_builtins(state),
            "address": f"{self._address}:{self._port}",
        }

    async def _do_words(self) -> _Answer:
        """What hosts of the newest job wrote last."""
        return {"words": await asyncio.to_thread(self._jobs[max(self._jobs)].words)}

    async def _look(self, job: Job) -> JobState:
        """The scheduler is not asked each time."""
        now = asyncio.get_running_loop().time()
        at, state = self._looks.get(job.number, (0.0, None))
        if state is None or now > at + LOOK_S:
            state = await asyncio.to_thread(job.state)
            self._looks[job.number] = now, state
        return state

    async def _do_open(self, place: int) -> _Answer:
        self._called(place)
        self._used.add(place)
        return {"pid": os.getpid(), "host": self._calls[place][0].host}

    async def _do_is_open(self, place: int) -> _Answer:
        return {"open": place in self._calls}

    async def _do_run(self, place: int, content: str) -> _Answer:
        run = self._called(place).run(SOW, input=content.encode(), encoding=None)
        done = await asyncio.wait_for(run, _SOW_S)
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
            await call.forward_remote_path_to_port(f"{prefix}:{port}", "127.0.0.1", port)
        return {}

    async def _do_close(self, place: int) -> _Answer:
        """End what goes over the connection; one on which nothing does goes on."""
        if place in self._used and place in self._calls:
            self._used.discard(place)
            self._calls.pop(place)[1].abort()
        return {}


def _new_job(batch: Batch, number: int, places: tuple[int, ...], folder: Path) -> Job:
    kinds = {"mpi": MpiJob, "kubernetes": PodsJob}
    kind = kinds.get(batch.launcher, BatchJob)
    return kind(batch, number, places, folder)


def own_address() -> str:
    """This machine's, on the network by which it reaches others; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)  # a socket's path has room for 108 bytes
    batch = msgspec.json.decode(sys.stdin.buffer.read(), type=Batch)
    logging.basicConfig(level=logging.WARNING)

    async def serve() -> None:
        await Switchboard(batch, folder).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
