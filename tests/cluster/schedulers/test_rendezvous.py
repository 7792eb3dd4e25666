"""Rendezvous of hosts: requests over its socket, and hosts that connect to it.

It serves in the event loop of the test. The hosts are those of `dial_in.py`, in the same loop.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nbdist.cluster.schedulers import allocations, rendezvous
from nbdist.cluster.schedulers.allocations import RENDEZVOUS_SOCKET
from nbdist.cluster.schedulers.dial_in import _Host
from nbdist.cluster.schedulers.jobs import Job
from nbdist.cluster.schedulers.rendezvous import LOOPBACK, Rendezvous
from nbdist.records import Batch, DialInTicket, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

Answer = dict[str, Any]
Play = Callable[[], Coroutine[Any, Any, None]]

CLUSTER = "0123456789ab"
BOUND_S = 20.0
NEVER = 2**22 + 1
"""Pid beyond Linux's maximum."""


class RunningJob(Job):
    """Double of a scheduler's job that runs at once."""

    title = "Job"

    def submit(self, ticket: Path) -> None:
        self._id = str(self.number)
        self._log.write_text("last line\n")

    def state(self) -> JobState:
        return JobState(word="RUNNING")

    def ending(self) -> list[str]:
        return ["cancel", str(self.number)]


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the numbers of the cancelled jobs, and install a double of a scheduler."""
    numbers: list[str] = []

    def cancel(commands: Sequence[Sequence[str]]) -> None:
        numbers.extend(number for _, number in commands)

    monkeypatch.setitem(allocations._KINDS, "slurm", RunningJob)
    monkeypatch.setattr(allocations, "cancel", cancel)
    return numbers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: list[str]) -> Path:
    """Return the cluster's folder, which is the working directory."""
    folder = tmp_path / CLUSTER
    (folder / "log").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


async def ask(op: str, **request: Any) -> Answer:
    reader, writer = await asyncio.open_unix_connection(RENDEZVOUS_SOCKET)
    writer.write(json.dumps({"op": op, **request}).encode() + b"\n")
    answer: Answer = json.loads(await reader.readline())
    writer.close()
    await writer.wait_closed()
    return answer


async def until(done: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Repeat until a condition is true."""
    async with asyncio.timeout(BOUND_S):
        while not await done():
            await asyncio.sleep(0.005)


async def is_served() -> bool:
    return Path(RENDEZVOUS_SOCKET).exists()


async def are_connected(*places: int) -> None:
    """Wait until the hosts of exactly these places are connected."""

    async def are() -> bool:
        answer = await ask("status", places=[0, 1])
        return bool(answer["connected"] == list(places))

    await until(are)


@pytest.fixture
def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], None]:
    """Return a function that runs a test while the rendezvous serves.

    A pipe replaces the descriptor of the fork server's process.
    """

    async def both(play: Play) -> None:
        end, fork_server = os.pipe()
        monkeypatch.setattr(rendezvous.os, "pidfd_open", lambda _pid: end)
        batch = Batch(launcher="slurm", listen=LOOPBACK)
        serving = asyncio.create_task(Rendezvous(batch, folder).serve(NEVER))
        await until(is_served)
        try:
            await play()
        finally:
            os.close(fork_server)
            await asyncio.wait_for(serving, BOUND_S)
            asyncio.get_running_loop().remove_reader(end)
            os.close(end)

    return lambda play: asyncio.run(both(play))


def host(folder: Path, job: int, task: int) -> asyncio.Task[str]:
    """Start a host that reads the ticket of the first job."""
    ticket = msgspec.json.decode((folder / "job-1.json").read_bytes(), type=DialInTicket)
    return asyncio.create_task(_Host(msgspec.structs.replace(ticket, job=job), task).serve())


async def end(*hosts: asyncio.Task[str]) -> None:
    """End hosts as the end of their job does."""
    for task in hosts:
        task.cancel()
    await asyncio.gather(*hosts, return_exceptions=True)


# Requests.


def test_places_without_a_job_have_no_host(serve: Callable[[Play], None], folder: Path) -> None:
    async def play() -> None:
        assert (folder / RENDEZVOUS_SOCKET).stat().st_mode & 0o777 == 0o600
        assert await ask("open", place=0) == {"error": "the host has not connected"}
        assert await ask("is_open", place=0) == {"open": False}
        assert await ask("close", place=0) == {}
        assert await ask("log_tail", place=0) == {"log": ""}
        assert await ask("will_be_requeued", places=[0]) == {"requeued": False}
        assert await ask("job_status", place=0) == {"error": "no job provides this place"}
        (folder / "host.sock").touch()
        answer = await ask("forward_local", place=0, remote="/x", local="host.sock")
        assert answer == {"error": "the host has not connected"}

    serve(play)


def test_an_invalid_request_is_answered_with_its_error(serve: Callable[[Play], None]) -> None:
    async def play() -> None:
        assert "_do_shutdown" in (await ask("shutdown"))["error"]
        assert "unexpected keyword argument 'x'" in (await ask("is_open", place=0, x=1))["error"]
        assert await ask("is_open", place=0) == {"open": False}

    serve(play)


def test_a_reserved_place_has_the_state_and_the_log_of_its_job(
    serve: Callable[[Play], None], cancelled: list[str]
) -> None:
    state = msgspec.to_builtins(JobState(word="RUNNING"))

    async def play() -> None:
        assert await ask("reserve", places=[0, 1]) == {"job": "Job 1"}
        status = await ask("status", places=[1, 0])
        assert (status["connected"], status["jobs"]) == ([], [{"job": "Job 1", "state": state}])
        assert status["address"].startswith(f"{LOOPBACK}:")
        assert await ask("job_status", place=1) == {"job": "Job 1", "state": state}
        assert await ask("log_tail", place=1) == {"log": "last line"}
        assert cancelled == []

    serve(play)
    assert cancelled == ["1"]  # at the end of the fork server


def test_the_rendezvous_ends_without_its_fork_server(folder: Path) -> None:
    async def play() -> None:
        batch = Batch(launcher="slurm", listen=LOOPBACK)
        await asyncio.wait_for(Rendezvous(batch, folder).serve(NEVER), BOUND_S)

    asyncio.run(play())


# Hosts.


def test_a_host_of_a_job_is_connected_at_its_place(
    serve: Callable[[Play], None], folder: Path
) -> None:
    async def play() -> None:
        await ask("reserve", places=[0, 1])
        second = host(folder, job=1, task=1)
        await are_connected(1)
        assert await ask("open", place=1) == {"pid": os.getpid()}
        status = await ask("status", places=[1])
        assert (status["connected"], status["jobs"]) == ([1], [])
        await end(second)

    serve(play)


@pytest.mark.parametrize(("job", "task"), [(9, 0), (1, 2)])
def test_a_host_without_a_place_is_dismissed(
    serve: Callable[[Play], None], folder: Path, job: int, task: int
) -> None:
    async def play() -> None:
        await ask("reserve", places=[0, 1])
        assert await asyncio.wait_for(host(folder, job, task), BOUND_S) == ""
        assert (await ask("status", places=[0, 1]))["connected"] == []

    serve(play)


def test_a_new_host_replaces_the_previous_one_of_its_place(
    serve: Callable[[Play], None], folder: Path
) -> None:
    async def play() -> None:
        await ask("reserve", places=[0])
        previous = host(folder, job=1, task=0)
        await are_connected(0)
        current = host(folder, job=1, task=0)
        assert await asyncio.wait_for(previous, BOUND_S) == ""
        await are_connected(0)
        await end(current)

    serve(play)


def test_hosts_of_released_places_end(
    serve: Callable[[Play], None], folder: Path, cancelled: list[str]
) -> None:
    async def play() -> None:
        await ask("reserve", places=[0, 1])
        hosts = [host(folder, job=1, task=task) for task in (0, 1)]
        await are_connected(0, 1)
        await ask("release", places=[0])
        assert await asyncio.wait_for(hosts[0], BOUND_S) == ""
        await are_connected(1)
        assert cancelled == []
        await end(*hosts)

    serve(play)


def test_only_a_used_connection_is_closed(serve: Callable[[Play], None], folder: Path) -> None:
    async def play() -> None:
        await ask("reserve", places=[0])
        first = host(folder, job=1, task=0)
        await are_connected(0)
        await ask("close", place=0)
        assert await ask("is_open", place=0) == {"open": True}
        await ask("open", place=0)
        await ask("close", place=0)
        assert await ask("is_open", place=0) == {"open": False}
        await are_connected(0)  # the host connects again
        await ask("close", place=0)
        assert await ask("is_open", place=0) == {"open": True}
        await end(first)

    serve(play)
