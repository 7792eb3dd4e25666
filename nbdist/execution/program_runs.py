"""Storage of the runs of an exported program: a process of its own, beside rank 0.

Rank 0 starts it, passes each cell through its standard input, and closes the input at its end. All
ranks send their records to its socket, as engines do to the notebook.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import struct
import sys
import threading
import time
from collections import Counter
from typing import IO, TYPE_CHECKING

import msgspec

from nbdist.execution import live_run
from nbdist.execution.failures import CellOutcome, root
from nbdist.records import (
    DROPPED_TEXT,
    JOB_FOLDER_VARIABLE,
    JOB_VARIABLE,
    CellEnded,
    Media,
    Metrics,
    Output,
    ProgramCell,
    Rows,
    SocketAddress,
)
from nbdist.settings import Settings
from nbdist.telemetry.receiver import Receiver, Repeats, Subscribers
from nbdist.utils.sockets import url_host
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import AnyEvent

_TICK_S = 0.05
_LAST_RECORDS_S = 5.0
"""Time for the records of other ranks after the first has ended the cell, or rank 0 the program."""

_MOST_EARLY = 10_000
"""Most records of a cell that other ranks have begun before rank 0. nbdist drops further text."""


class _OpenRun:
    """A run in progress.

    Args:
        cell: its cell.
        settings: the folder and the number of stored runs.
    """

    def __init__(self, cell: ProgramCell, settings: Settings) -> None:
        self._run = live_run.begin(
            cell.request,
            cell.header,
            [cell.source or cell.request.source],
            cell.workers,
            settings,
            cell.seed,
            program=cell.program,
            job=os.environ.get(JOB_VARIABLE, ""),
            job_folder=os.environ.get(JOB_FOLDER_VARIABLE, ""),
        )
        self._outcome = CellOutcome({worker.rank: worker.host for worker in cell.workers})
        self._ranks = {worker.rank for worker in cell.workers}
        self._repeats = Repeats()
        self._subscribers = Subscribers()
        self._subscribers.add(*self._run.subscribers)
        self._until = float("inf")
        self._is_stopping = False
        self._unannounced = settings.runs_path / self._run.id if self._run.id else None

    def take(self, record: AnyEvent) -> None:
        """Store a record."""
        if isinstance(record, CellEnded) and record.rank not in self._outcome.ended:
            self._outcome.ended[record.rank] = record
            self.limit_wait()
        if self._unannounced is not None and isinstance(record, Rows | Metrics | Media):
            _print(f"the run is in {self._unannounced}")  # a run without values is not kept
            self._unannounced = None
        if (fresh := self._repeats.fresh(record)) is not None:
            self._subscribers.deliver(fresh)

    def limit_wait(self) -> None:
        """Wait only a short time for the ranks that have not ended the cell."""
        self._until = min(self._until, time.monotonic() + _LAST_RECORDS_S)

    def has_ended(self) -> bool:
        """Write new records. Return True if the run has ended."""
        self._run.tick()
        requested = self._run.stops_requested() > 0  # the page cancels the job
        if requested != self._is_stopping:
            self._is_stopping = requested
            self._run.stopping(requested=requested)
        return self._outcome.ended.keys() == self._ranks or time.monotonic() > self._until

    def end(self) -> tuple[str, ...]:
        """Store the end of the run, and return messages about it."""
        outcome = self._outcome
        outcome.failed = root(outcome.first_failure(interrupted=True), outcome.ended.values())
        silent = sorted(self._ranks - outcome.ended.keys())
        if any(end.status == "interrupted" for end in outcome.ended.values()):
            outcome.stop(requested=self._is_stopping)
        status, error = outcome.summary()
        if silent:
            self._run.lost(silent)
        if silent and (status == "finished" or outcome.is_consequence()):
            status = "failed"
            error = f"rank {formatting.ranks(silent)} ended before the end of the cell"
        messages = self._run.end(status, error)
        self._run.close()
        return messages


class _Early:
    """Records of a cell that rank 0 has not begun.

    Args:
        cell: number of the cell.
    """

    def __init__(self, cell: int) -> None:
        self._cell = cell
        self._records: list[AnyEvent] = []
        self._dropped: Counter[int] = Counter()

    def add(self, record: AnyEvent) -> None:
        """Keep a record. Text is dropped and counted if there are too many records."""
        if isinstance(record, Output) and len(self._records) >= _MOST_EARLY:
            self._dropped[record.rank] += len(record.text)
        else:
            self._records.append(record)

    def records(self) -> Iterator[AnyEvent]:
        """Yield the records, and a remark for each rank whose text was dropped."""
        yield from self._records
        for rank, count in self._dropped.items():
            text = DROPPED_TEXT.format(count=count)
            yield Output(rank=rank, cell=self._cell, stream="stdout", text=text)


class ProgramRuns:
    """Runs of a program.

    Args:
        settings: the folder and the number of stored runs.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[int, _OpenRun] = {}
        self._early: dict[int, _Early] = {}
        self._newest = 0
        self._until = float("inf")

    def take(self, item: AnyEvent | ProgramCell | None) -> None:
        """Take a cell, a record, or None at the end of rank 0."""
        if item is None:
            self._until = time.monotonic() + _LAST_RECORDS_S
            for run in self._open.values():
                run.limit_wait()
        elif isinstance(item, ProgramCell):
            self._begin(item)
        elif item.cell in self._open:
            self._open[item.cell].take(item)
        elif item.cell > self._newest:  # this rank is ahead of rank 0
            self._early.setdefault(item.cell, _Early(item.cell)).add(item)

    def _begin(self, cell: ProgramCell) -> None:
        number = self._newest = cell.request.number
        run = self._open[number] = _OpenRun(cell, self._settings)
        if (early := self._early.pop(number, None)) is not None:
            for record in early.records():
                run.take(record)

    def tick(self) -> None:
        """Write new records, and end the runs that all ranks have ended."""
        for number, run in list(self._open.items()):
            if run.has_ended():
                del self._open[number]
                for message in run.end():
                    _print(message)

    def is_over(self) -> bool:
        """Return True if rank 0 has ended and all runs have."""
        return self._until < float("inf") and not self._open


def _print(message: str) -> None:
    sys.stderr.write(f"nbdist: {message}\n")
    sys.stderr.flush()


def _read(stream: IO[bytes], items: queue.SimpleQueue[AnyEvent | ProgramCell | None]) -> None:
    """Put the cells that rank 0 begins, and None when it closes the stream."""
    decoder = msgspec.msgpack.Decoder(ProgramCell)
    while len(head := stream.read(4)) == 4:
        (size,) = struct.unpack("<I", head)
        frame = stream.read(size)
        if len(frame) < size:
            break
        items.put(decoder.decode(frame))
    items.put(None)


def main(address: str) -> None:
    """Store the runs of a program until rank 0 has ended.

    Args:
        address: address of this host for the ranks.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    settings = Settings.from_environment()
    if not settings.telemetry:
        return
    items: queue.SimpleQueue[AnyEvent | ProgramCell | None] = queue.SimpleQueue()
    receiver = Receiver(host=address)
    receiver.subscribers.add(items.put)
    bound = receiver.bound_socket
    stream = SocketAddress(
        url=f"tcp://{url_host(address)}:{bound.port}", server_key=bound.public_key
    )
    with receiver:
        sys.stdout.buffer.write(msgspec.json.encode(stream) + b"\n")
        sys.stdout.flush()
        threading.Thread(target=_read, args=(sys.stdin.buffer, items), daemon=True).start()
        runs = ProgramRuns(settings)
        while not runs.is_over():
            with contextlib.suppress(queue.Empty):
                runs.take(items.get(timeout=_TICK_S))
            runs.tick()


if __name__ == "__main__":
    main(sys.argv[1])
