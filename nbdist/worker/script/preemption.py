"""Stop of a program after SIGTERM: all ranks end after the same step, save, and exit.

Under Open MPI, SIGUSR1 does the same. A scheduler may send the signal to one rank only. That rank
notifies rank 0, which notifies the others. Each rank then reports the last step that it may begin
(`nbdist/worker/runtime/stop_point.py`), and rank 0 answers with the step after which all end. The
network is trusted, as for the collectives.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from nbdist.records import SOON, StopAfter, Stopping
from nbdist.utils.stop_agreement import StopAgreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.records import Command
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.script.placement import Placement

_POLL_S = 0.1
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that stop a program. SIGUSR1 does under Open MPI, which kills ranks after SIGTERM."""

_OPEN_MPI = "OMPI_COMM_WORLD_RANK"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Report(msgspec.Struct, frozen=True):
    """Position of a rank.

    Attributes:
        rank: the rank.
        cell: number of its cell.
        step: its last step.
        limit: last step that it may begin without a command; -1 if it does not know of the stop.
        stops: True if it knows that the program stops.
    """

    rank: int
    cell: int
    step: int
    limit: int
    stops: bool


class Preemption:
    """Agreement of this rank with the others on the last step before the program ends.

    Args:
        placement: place of this process.
        worker: this rank.
        gather: gathers int32 numbers from all ranks: shape (n,) to (ranks, n). Collective.

    Attributes:
        is_requested: True after a rank received the signal.
        is_agreed: True if the ranks have agreed on the last step.
    """

    def __init__(
        self, placement: Placement, worker: Worker, gather: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self.is_requested = False
        self.is_agreed = False
        self._placement = placement
        self._worker = worker
        self._gather = gather
        self._limit = -1
        self._answers: queue.SimpleQueue[StopAfter] = queue.SimpleQueue()
        self._wake = -1

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Let the signal stop the steps of a cell that saves checkpoints. Begin it on all ranks."""
        self._connect()
        before = {
            number: signal.signal(number, lambda _number, _frame: self._request())
            for number in _REQUESTS[: 2 if _OPEN_MPI in os.environ else 1]
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _connect(self) -> None:
        """Connect to rank 0, once. Collective."""
        if self._wake >= 0:
            return
        reader, self._wake = os.pipe()
        port = 0
        if self._placement.rank == 0:
            port = _Server(self._placement).port
        if self._placement.world_size > 1:
            port = int(self._gather(np.array([port], np.int32))[0, 0])
        threading.Thread(
            target=self._follow, args=(port, reader), name="nbdist-preemption", daemon=True
        ).start()

    def stopping(self, record: Stopping) -> None:
        """Report the last step that this rank may begin."""
        self._limit = record.limit
        self._notify()

    def answer(self, seconds: float) -> StopAfter | None:
        """Wait for rank 0 to name the last step; return None if it does not in this time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                left_s = max(0.0, deadline - time.monotonic())
                found = self._answers.get(timeout=left_s) if left_s else self._answers.get_nowait()
            except queue.Empty:
                return None
            if found.number == self._worker.cell:
                self.is_agreed |= found.step != SOON
                return found

    def of_rank_0(self, fact: bool) -> bool:
        """Return the fact as rank 0 sees it. Collective."""
        return bool(self._gather(np.array([fact], np.int32))[0, 0])

    def begin_cell(self) -> None:
        """Forget the last step of the cell before."""
        self._limit = -1

    def _request(self) -> None:
        """Stop at the end of a step. Call it in the main thread or in the one that follows."""
        self.is_requested = True
        self._worker.interrupts.is_pending = True
        self._notify()

    def _notify(self) -> None:
        os.write(self._wake, b"!")

    def _follow(self, port: int, wake: int) -> None:
        """Exchange messages with rank 0."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)
        host = self._placement.coordinator.rpartition(":")[0] or _LOOPBACK[0]
        socket.connect(f"tcp://{host}:{port}")
        socket.send(self._report())
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(1000 * _POLL_S) if self.is_requested else None))
            if wake in ready:
                os.read(wake, 64)
            if socket in ready:
                command = msgspec.json.decode(socket.recv(), type=StopAfter)
                self._answers.put(command)
                if not self.is_requested:
                    self._request()
            if self.is_requested:
                socket.send(self._report())

    def _report(self) -> bytes:
        worker = self._worker
        report = _Report(
            worker.rank, worker.cell, worker.progress.step, self._limit, self.is_requested
        )
        return msgspec.json.encode(report)


class _Server:
    """Thread of rank 0 that agrees with all ranks on the last step.

    Attributes:
        port: port at which it listens.
        number: number of the cell of the newest reports.
    """

    def __init__(self, placement: Placement) -> None:
        self.number = 0
        self._ranks = placement.world_size
        self._agreement = StopAgreement(self, self._step)
        self._routes: dict[int, bytes] = {}
        self._reports: dict[int, _Report] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.IPV6, 1)
        is_local = placement.host in ("", *_LOOPBACK)
        self.port: int = self._socket.bind_to_random_port(
            f"tcp://{_LOOPBACK[0] if is_local else '*'}"
        )
        threading.Thread(target=self._serve, name="nbdist-preemption-server", daemon=True).start()

    def send_command(self, command: Command, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._socket.send_multipart([self._routes[rank], msgspec.json.encode(command)])

    def _step(self, rank: int) -> int:
        return self._reports[rank].step

    def _serve(self) -> None:
        stops = False
        while True:
            if self._socket.poll(int(1000 * _POLL_S) if stops else None):
                self._take(*self._socket.recv_multipart())
            was, stops = stops, any(report.stops for report in self._reports.values())
            if stops and not was:
                self._notify([*self._routes])
            if stops and len(self._reports) == self._ranks:
                self._agreement.send_agreed_step(self._reports.keys())

    def _notify(self, ranks: Sequence[int]) -> None:
        self.send_command(StopAfter(number=self.number, step=SOON), ranks)

    def _take(self, route: bytes, payload: bytes) -> None:
        report = msgspec.json.decode(payload, type=_Report)
        before = self._reports.get(report.rank)
        self._routes[report.rank], self._reports[report.rank] = route, report
        if report.cell > self.number:
            self.number = report.cell
            self._agreement = StopAgreement(self, self._step)
        if before is None and any(other.stops for other in self._reports.values()):
            self._notify([report.rank])
        is_new = before is None or (before.cell, before.limit) != (report.cell, report.limit)
        if is_new and report.limit >= 0 and report.cell == self.number:
            stopping = Stopping(rank=report.rank, cell=report.cell, limit=report.limit)
            self._agreement.receive(stopping)
