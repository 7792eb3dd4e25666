"""Connection of the ranks of a program to a process beside rank 0 that stores the runs."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import platform
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from nbdist.records import CellEnded, ProgramCell, SocketAddress, WorkerState
from nbdist.utils.processes import wait_or_kill
from nbdist.worker.runtime.reporter import Reporter
from nbdist.worker.runtime.row_buffer import RowBuffer
from nbdist.worker.script.output import report_output

if TYPE_CHECKING:
    from nbdist.records import CellRequest
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.script.progress import Progress
    from nbdist.worker.script.rendezvous import Connection

_STORE = "nbdist.execution.program_runs"
_END_S = 30.0
"""Time in which the process must store the end of the last run (seconds)."""

_PACKAGES = ("tensorflow", "keras", "jax")


class _Greeting(msgspec.Struct):
    """A rank, and the address of the process that stores the runs, from rank 0."""

    worker: WorkerState
    stream: SocketAddress | None


class StoreProcess:
    """Process beside rank 0 that stores the runs. It starts while rank 0 loads its framework.

    Args:
        address: address of this host for the other ranks.
    """

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _STORE, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the terminal reaches the ranks only
        )
        self._source = _source_of_program()
        atexit.register(self.close)

    def stream(self) -> SocketAddress | None:
        """Wait for its address for records; None if it stores nothing and has ended."""
        with _pipe(self._process.stdout) as answer:
            line = answer.readline()
        return msgspec.json.decode(line, type=SocketAddress) if line else None

    def begin(
        self, request: CellRequest, header: str, workers: tuple[WorkerState, ...], seed: int
    ) -> None:
        """Begin a run."""
        cell = ProgramCell(
            request=request,
            header=header,
            program=Path(sys.argv[0]).name,
            source=self._source,
            workers=workers,
            seed=seed,
        )
        frame = msgspec.msgpack.encode(cell)
        cells = _pipe(self._process.stdin)
        with contextlib.suppress(OSError):  # the process has ended: the program goes on
            cells.write(struct.pack("<I", len(frame)) + frame)
            cells.flush()

    def close(self) -> None:
        """Wait until the process has stored all runs. May be called more than once."""
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()
        wait_or_kill(self._process, _END_S)


class RunStore:
    """Sends the cells and the records of this rank to the process that stores the runs.

    Without it, as with `NBDIST_TELEMETRY=0`, the program stores no runs.

    Args:
        worker: this rank.
        connection: connection to the other ranks.
        progress: recipient of the rank's records; it passes them on.
        process: the process, on rank 0.
    """

    def __init__(
        self,
        worker: Worker,
        connection: Connection,
        progress: Progress,
        process: StoreProcess | None,
    ) -> None:
        self._worker = worker
        self._process = process
        own = _Greeting(_state(worker, connection), process.stream() if process else None)
        texts = connection.exchange(msgspec.json.encode(own))
        greetings = [msgspec.json.decode(text, type=_Greeting) for text in texts]
        self._workers = tuple(greeting.worker for greeting in greetings)
        self._reporter: Reporter | None = None
        self._open: CellRequest | None = None
        if (stream := greetings[0].stream) is not None:
            rows = RowBuffer(worker.rank, worker.memory)
            self._reporter = progress.stream = Reporter(
                stream, rows, worker.world_size, waits=False
            )
            report_output(worker.reporter)
        atexit.register(self.close)

    def begin(self, request: CellRequest, header: str) -> None:
        """Begin a run. Its header is the line of the program that begins it."""
        self._open = request
        if self._process is not None and self._reporter is not None:
            self._process.begin(request, header, self._workers, self._worker.identity.seed)

    def end(self, request: CellRequest, error: BaseException | None) -> None:
        """End a cell on this rank."""
        self._open = None
        if self._reporter is None:
            return
        failure = None
        if error is not None:
            from nbdist.worker import failure as failures

            failure = failures.describe(error, None, follows=False)
        interrupted = isinstance(error, KeyboardInterrupt)
        ended = CellEnded(
            status="interrupted" if interrupted else "error" if error else "ok",
            seconds=self._worker.reporter.seconds(),
            failure=failure,
            rank=self._worker.rank,
            cell=request.number,
        )
        self._reporter.send(ended, urgent=True)

    def fail(self, error: Exception) -> None:
        """End the cell that this rank runs, if any, with an error. Any thread may call it."""
        if (request := self._open) is not None:
            self.end(request, error)

    def close(self) -> None:
        """Send all records. Rank 0 waits until they are stored. May be called more than once."""
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None
        if self._process is not None:
            self._process.close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "each stream of the process is a pipe"
    return stream


def _source_of_program() -> str:
    """Return the source; empty if the program is no file."""
    program = Path(sys.argv[0])
    return program.read_text(encoding="utf-8") if program.is_file() else ""


def _state(worker: Worker, connection: Connection) -> WorkerState:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            versions[package] = importlib.metadata.version(package)
    return WorkerState(
        rank=worker.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=versions,
        devices=connection.devices,
    )
