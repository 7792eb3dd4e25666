"""Connection that a host opens to this machine, as an alternative to ssh."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.cluster.forkserver.control_socket import connect
from nbdist.cluster.forkserver.logs import log_file, read_tail
from nbdist.cluster.remote_host.ssh_connection import CONNECT_S
from nbdist.cluster.schedulers.allocations import LOOK_S, RENDEZVOUS_SOCKET
from nbdist.cluster.schedulers.jobs import LOG_LINES
from nbdist.errors import StartError
from nbdist.records import JobState
from nbdist.utils.processes import wait_or_kill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.cluster.forkserver.client import ForkServerProcess
    from nbdist.records import Batch, Host

CONNECT_TIMEOUT_S = 60.0
"""Time for the hosts of a started job to connect."""

_BEGIN_S = 30.0
_END_S = 5.0
_ANSWER_S = 15.0
_ANSWERS_S = {
    "reserve": 180.0,
    "will_be_requeued": 120.0,
    "status": 60.0,
    "start_fork_server": 40.0,
    "log_tail": 40.0,
    "release": 60.0,
}
"""Timeouts of the operations that query a scheduler or a host."""

_POLL_S = 0.05


class RendezvousClient:
    """Client of the rendezvous process (`rendezvous.py`) of one cluster.

    Args:
        batch: the options for the scheduler.
        home: this machine's fork server, which ends the rendezvous process.
        wait_s: the seconds that a job may be queued.
    """

    def __init__(self, batch: Batch, home: ForkServerProcess, wait_s: float) -> None:
        self._batch = batch
        self._home = home
        self._wait_s = wait_s
        self._process: subprocess.Popen[bytes] | None = None

    def link(self, host: Host, place: int) -> ReverseConnection:
        """Create the connection of the host at a place."""
        return ReverseConnection(self, host, place, f"b{place}")

    def request_hosts(
        self, places: Sequence[int], show_message: Callable[[str], None]
    ) -> tuple[str, bool]:
        """Request hosts for places from the scheduler, and wait until they have connected.

        After a failure or an interrupt, this releases the places.

        Args:
            places: the places, none of which has a host.
            show_message: receives progress messages.

        Returns:
            A description of the outcome, and whether all hosts have connected.

        Raises:
            StartError: the scheduler refuses, or the job ended or was queued for too long.
        """
        self._start()
        try:
            return self._await_connections(list(places), show_message)
        except BaseException:
            self.release(places)
            raise

    def _await_connections(
        self, places: list[int], show_message: Callable[[str], None]
    ) -> tuple[str, bool]:
        began, begun_at = time.monotonic(), 0.0
        since = time.strftime("%H:%M:%S")
        named: dict[str, None] = {}
        fresh = {self._reserve(places)}
        while True:
            answer = self.ask("status", places=places)
            there = len(answer["connected"])
            jobs = [(j["job"], msgspec.convert(j["state"], JobState)) for j in answer["jobs"]]
            named |= dict.fromkeys(job for job, _ in jobs)
            if there == len(places):
                return ", ".join(named), True
            show_message(
                "; ".join(_progress(*job, since) for job in jobs) + f", {there} of {len(places)}"
            )
            now = time.monotonic()
            for job, state in jobs:
                if state.over and job in fresh:
                    raise StartError(self._describe_end(job, state, places))
                if state.over:  # an older job was already ending: submit another one
                    fresh.add(self._reserve(places))
                if state.waits and now > began + self._wait_s:
                    if there:
                        return f"{there} of {len(places)} within {self._wait_s:g} s", False
                    raise StartError(
                        f"{job} was queued for {self._wait_s:g} s (NBDIST_QUEUE_WAIT_S): "
                        f"{state.word}"
                    )
            waits = any(state.waits for _, state in jobs)
            begun_at = 0.0 if waits else begun_at or now
            if begun_at and now > begun_at + CONNECT_TIMEOUT_S:
                if not there:
                    raise StartError(self._describe_timeout(answer, *jobs[0], places))
                return f"{there} of {len(places)} connected within {CONNECT_TIMEOUT_S:g} s", False
            time.sleep(LOOK_S / 2 if waits and not there else LOOK_S / 10)

    def _reserve(self, places: list[int]) -> str:
        return str(self.ask("reserve", places=places)["job"])

    def release(self, places: Sequence[int]) -> None:
        """Give places up, and end their hosts."""
        with contextlib.suppress(StartError):
            self.ask("release", places=list(places))

    def _describe_end(self, job: str, state: JobState, places: Sequence[int]) -> str:
        log = self._last_lines(places, "; ")
        return f"{job} provides no hosts: {state.word}{_detail(state)}{log}"

    def _describe_timeout(
        self, answer: dict[str, Any], job: str, state: JobState, places: Sequence[int]
    ) -> str:
        log = self._last_lines(places, "\n")
        return (
            f"{job} is {state.word.lower()}, but none of its hosts has connected to "
            f"{answer['address']} within {CONNECT_TIMEOUT_S:g} s: allow connections to "
            f"this address, or set another address of this machine with --listen{log}"
        )

    def _last_lines(self, places: Sequence[int], before: str) -> str:
        try:
            log = str(self.ask("log_tail", place=places[0])["log"])
        except StartError:
            return ""
        return f"{before}the last lines of its log:\n{log}" if log else ""

    def will_be_requeued(self, places: Sequence[int]) -> bool:
        """Return True if the scheduler replaces lost hosts of these places."""
        try:
            return bool(self.ask("will_be_requeued", places=list(places))["requeued"])
        except StartError:
            return False

    def job(self, place: int) -> str:
        """Return the name of a place's job."""
        return self.describe_job(place).partition(":")[0] or "nobody"

    def describe_job(self, place: int) -> str:
        """Describe the state of a place's job; empty if unknown."""
        try:
            answer = self.ask("job_status", place=place)
        except StartError:
            return ""
        state = msgspec.convert(answer["state"], JobState)
        return f"{answer['job']}: {state.word or 'it has ended'}{_detail(state)}"

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Send a request, and return the answer. Raise StartError if it fails."""
        try:
            peer = connect(self._home.folder / RENDEZVOUS_SOCKET)
        except OSError as error:
            raise StartError("the rendezvous process is gone: run %dist_restart") from error
        deadline = time.monotonic() + _ANSWERS_S.get(op, _ANSWER_S)
        answers: list[dict[str, Any]] = []
        try:
            peer.send({"op": op, **request})
            while not answers and peer.wait(max(0.0, deadline - time.monotonic())):
                answers = peer.read()
        except (OSError, EOFError) as error:
            raise StartError("the rendezvous process has ended: run %dist_restart") from error
        finally:
            peer.close()
        if not answers or "error" in answers[0]:
            raise StartError(
                answers[0]["error"] if answers else "the rendezvous process does not respond"
            )
        return answers[0]

    def close(self) -> None:
        """Wait for the end of the rendezvous process, which follows that of the fork server."""
        if self._process is not None:
            wait_or_kill(self._process, _END_S)

    def _start(self) -> None:
        """Start the rendezvous process if none responds."""
        folder = self._home.folder
        if not self._listens():
            (folder / RENDEZVOUS_SOCKET).unlink(missing_ok=True)
            self.close()
            with log_file(folder, "rendezvous").open("ab") as log:
                self._process = process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "nbdist.cluster.schedulers.rendezvous"),
                        *(str(folder.absolute()), str(self._home.state.pid)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._home.guard(process.pid)
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(msgspec.json.encode(self._batch))
            self._await_start(process)

    def _listens(self) -> bool:
        """Return True if the rendezvous process accepts requests."""
        try:
            connect(self._home.folder / RENDEZVOUS_SOCKET).close()
        except OSError:
            return False
        return True

    def _await_start(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _BEGIN_S
        while not self._listens():  # the socket's file exists a moment before it is usable
            if process.poll() is not None or time.monotonic() > deadline:
                log = read_tail(self._home.folder, "rendezvous", LOG_LINES)
                raise StartError(f"the rendezvous process failed to start:\n{log}")
            time.sleep(_POLL_S)


class ReverseConnection:
    """Connection opened by a host, an `ssh.host_connection.HostConnection`.

    Args:
        rendezvous: the client of the rendezvous process.
        host: the host.
        place: the place of the host's rank.
        name: the name of the connection, unique in the cluster.
    """

    def __init__(self, rendezvous: RendezvousClient, host: Host, place: int, name: str) -> None:
        self.host = host
        self.name = name
        self._rendezvous = rendezvous
        self._place = place

    def open(self) -> int:
        """Wait until the host has connected, and return the pid of the rendezvous process.

        Raises:
            StartError: the host does not connect in time.
        """
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return int(self._ask("open")["pid"])
            except StartError as error:
                if time.monotonic() > deadline:
                    job = self._rendezvous.describe_job(self._place)
                    raise StartError(f"{error}; {job}" if job else str(error)) from None
            time.sleep(_POLL_S)

    def is_open(self) -> bool:
        """Return True if the host is connected."""
        try:
            return bool(self._ask("is_open")["open"])
        except StartError:
            return False

    def start_fork_server(self, content: bytes) -> bytes:
        """Start a fork server on the host; see `HostConnection.start_fork_server`.

        Raises:
            StartError: the start failed.
        """
        answer = self._ask("start_fork_server", host=self.host.key, content=content.decode())
        return str(answer["output"]).encode()

    def forward_local(self, there: str, here: str) -> None:
        """Forward a socket of the host to the path `here` in the cluster's folder."""
        self._ask("forward_local", remote=there, local=here)

    def forward_remote(self, ports: Iterable[int], prefix: str) -> None:
        """Forward loopback ports of this machine to sockets `<prefix>:<port>` on the host."""
        self._ask("forward_remote", ports=list(ports), prefix=prefix)

    def why_lost(self) -> str:
        """Return the reason why the host is lost; empty if unknown."""
        return self._rendezvous.describe_job(self._place)

    def close(self) -> None:
        """Close the connection, with all programs and forwards."""
        try:
            self._ask("close")
        except StartError:
            return  # it has ended with the rendezvous process

    def _ask(self, op: str, **request: Any) -> dict[str, Any]:
        return self._rendezvous.ask(op, place=self._place, **request)


def _progress(job: str, state: JobState, since: str) -> str:
    beside = f", submitted {since}" if state.waits else ""
    return f"{job} is {state.word.lower() or 'unknown'}{_detail(state)}{beside}"


def _detail(state: JobState) -> str:
    return f" ({state.detail})" if state.detail else ""
