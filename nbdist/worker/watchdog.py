"""Watchdog thread of the engine: it answers the notebook while the main thread runs a cell.

It sends a heartbeat once a second, samples the use of the host, reports where the main thread is,
and aborts collectives.
Without that, the main thread would wait forever after an exception on another rank.
"""

from __future__ import annotations

import linecache
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from nbdist.errors import UnsentError
from nbdist.records import (
    WATCHDOG,
    AbortCollectives,
    Beat,
    CellEnded,
    Diagnose,
    Failure,
    ForceInterrupt,
    Preempted,
    RankPosition,
    StatusQuery,
)
from nbdist.worker import waiting
from nbdist.worker.runtime.reporter import connect
from nbdist.worker.runtime.shell import place, source
from nbdist.worker.runtime.system_metrics import SystemMetrics

if TYPE_CHECKING:
    from types import FrameType

    from nbdist.records import SocketAddress
    from nbdist.worker.runtime.context import Worker

BEAT_S = 1.0
_MOST_CALLS = 64
"""Limit for the innermost calls of a thread in its stack."""

_OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "jaxpr"))
_Command = ForceInterrupt | Diagnose | AbortCollectives | StatusQuery
_ENTRY_FIELDS = 4
"""Number of fields of a `linecache` entry; an entry whose source is not read yet has fewer."""

_log = logging.getLogger(__name__)

_preemption_pipe: list[int] = []
_FRAMEWORKS = {"jax", "jaxlib", "tensorflow", "keras"}
_LOCKS = {"threading", "queue", "concurrent", "multiprocessing"}
_FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Number of the system call with which a thread waits for another."""


def watch(worker: Worker, address: SocketAddress) -> None:
    """Start the thread. It connects to `address` and receives orders from there."""
    preempted, writer = os.pipe()
    _preemption_pipe.append(writer)
    install_sigterm_handler(worker)
    arguments = (worker, address, threading.get_ident(), preempted)
    threading.Thread(target=_run, args=arguments, name="nbdist-watchdog", daemon=True).start()


def install_sigterm_handler(worker: Worker) -> None:
    """Let SIGTERM end the cell first. Call again after TensorFlow has set its own handler."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: _note_preemption(worker))


def _note_preemption(worker: Worker) -> None:
    """End an idle engine at once; during a cell, let the watchdog notify the notebook."""
    if not worker.cell:
        sys.exit(0)
    worker.preempted = True
    os.write(_preemption_pipe[0], b"!")  # sending a record takes locks, which this thread may hold


def _run(worker: Worker, address: SocketAddress, main: int, preempted: int) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.routing_id = f"{WATCHDOG}{worker.rank}".encode()
    connect(socket, address)
    socket.send(b"")
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(preempted, zmq.POLLIN)
    reporter = worker.reporter
    system = SystemMetrics(reporter) if worker.identity.telemetry else None
    while True:
        ready = dict(poller.poll(int(1000 * BEAT_S)))
        if preempted in ready:
            os.read(preempted, 1)
            reporter.send(Preempted(**reporter.record_fields()), urgent=True)
        if socket in ready:
            _take(worker, socket.recv(), main)
        elif worker.cell:
            reporter.send(_beat(worker))
            if system is not None:
                system.sample_if_due()


def _beat(worker: Worker) -> Beat:
    progress = worker.progress
    return Beat(
        step=progress.step,
        tested=progress.tested,
        trained=progress.trained,
        **worker.reporter.record_fields(),
    )


def _take(worker: Worker, frame: bytes, main: int) -> None:
    try:
        _execute(worker, msgspec.msgpack.decode(frame, type=_Command), main)
    except Exception:  # noqa: BLE001 - the rank would lose its watchdog if the thread ended
        _log.exception("the watchdog failed to execute a command")


def _execute(worker: Worker, command: _Command, main: int) -> None:
    if isinstance(command, StatusQuery):
        _answer_status(worker, command.number)
    elif isinstance(command, Diagnose) and command.waits:
        _answer_waiting(worker, command.number, main)
    elif command.number != worker.cell:
        return  # that cell has ended already
    elif isinstance(command, ForceInterrupt):
        worker.interrupts.force_interrupt()
    elif isinstance(command, Diagnose):
        where = _where(worker, main)
        where = msgspec.structs.replace(where, **waiting.processor_seconds(worker))
        if command.threads:
            where = msgspec.structs.replace(where, threads=_threads(main))
        worker.reporter.send(where, urgent=True)
    elif command.strategy in worker.strategies:
        worker.broken.add(command.strategy)
        if command.strategy == "mirrored":
            from nbdist.worker.tensorflow import strategy as tensorflow_strategy

            tensorflow_strategy.abort_collectives()
        else:
            from nbdist.worker.jax import backend as jax_backend

            jax_backend.abort_collectives()


def _answer_status(worker: Worker, cell: int) -> None:
    """Report the end of the cell again, refuse it if it has not begun, or send a heartbeat."""
    if worker.refuse_unbegun(cell):
        failure = Failure(
            ename=UnsentError.__name__,
            evalue="the cell had not reached this rank",
            traceback=(),
            same="",
        )
        ended = CellEnded(rank=worker.rank, cell=cell, status="error", seconds=0.0, failure=failure)
        worker.reporter.send(ended, urgent=True)
    elif worker.ended is not None and worker.ended.cell == cell:
        worker.reporter.send(worker.ended, urgent=True)
    else:
        worker.reporter.send(_beat(worker), urgent=True)


def _answer_waiting(worker: Worker, cell: int, main: int) -> None:
    """Report whether the cell waits in a collective or, after its end, whether one still runs."""
    found: dict[str, Any] = {"process_s": time.process_time(), "clock_s": time.monotonic()}
    if worker.cell == cell:
        where = _where(worker, main)
        strategy = waiting.strategy_of(worker, main, waits=where.waits)
        answer = msgspec.structs.replace(where, collective=strategy, **found)
    elif worker.ended is not None and worker.ended.cell == cell and not worker.cell:
        found |= {"rank": worker.rank, "cell": cell, "under_way": waiting.under_way(worker)}
        answer = RankPosition(
            step=worker.progress.step, place="", waits=False, cpu_s=0.0, stack="", **found
        )
    else:
        return
    if answer.cell == cell:  # the cell may have ended since
        worker.reporter.send(answer, urgent=True)


def _where(worker: Worker, main: int) -> RankPosition:
    innermost = sys._current_frames()[main]
    calls = [
        (frame, line or frame.f_code.co_firstlineno)  # some instructions have no line
        for frame, line in traceback.walk_stack(innermost)
        if not frame.f_code.co_filename.startswith(_OURS)
    ][::-1]
    own = [i for i, (frame, _) in enumerate(calls) if _is_of_cell(frame)]
    return RankPosition(
        step=worker.progress.step,
        place=place(*calls[own[-1]]) if own else "",
        cpu_s=time.clock_gettime(time.pthread_getcpuclockid(main)),
        waits=_waits(str(innermost.f_globals.get("__name__", ""))),
        stack="\n".join(_call(*call) for call in calls[own[0] :]) if own else "",
        **worker.reporter.record_fields(),
    )


def _threads(main: int) -> str:
    """Format the stacks of all Python threads but this one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return "\n".join(
        f"{names.get(thread, f'thread {thread}')}:\n"
        + "".join(traceback.format_stack(frames[thread], limit=_MOST_CALLS))
        for thread in sorted(frames, key=lambda thread: thread != main)
    )


def _call(frame: FrameType, line: int) -> str:
    return f"  {place(frame, line)}, in {frame.f_code.co_name}\n    {source(frame, line)}"


def _waits(module: str) -> bool:
    """Return True if the main thread, in `module`, waits for a thread of a framework.

    A framework runs collectives on its own threads. Native code without a Python frame may have
    started the wait, so the module alone does not decide. A wait for a Python lock does not count.
    """
    package = module.partition(".")[0]
    try:
        call = Path(f"/proc/self/task/{os.getpid()}/syscall").read_text().split()[0]
    except OSError:  # the machine does not provide the file
        return package in _FRAMEWORKS
    return call == _FUTEX.get(platform.machine()) and package not in _LOCKS


def _is_of_cell(frame: FrameType) -> bool:
    """Return True if the frame runs code of a cell: its source is in no file and cannot expire."""
    known = linecache.cache.get(frame.f_code.co_filename)
    return known is not None and len(known) == _ENTRY_FIELDS and known[1:2] == (None,)
