"""A thread of the engine that answers while the main thread is in a cell, whatever it waits for.

It beats once a second, says where the main thread is, and breaks off the collectives that it waits
in: an exception or a death elsewhere would else leave it there for ever.
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
    StatusQuery,
    Where,
)
from nbdist.worker import waiting
from nbdist.worker.runtime.reporter import connect
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from types import FrameType

    from nbdist.records import SocketAddress
    from nbdist.worker.runtime.context import Worker

BEAT_S = 1.0
_OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "jaxpr"))
_Orders = ForceInterrupt | Diagnose | AbortCollectives | StatusQuery
_OF_SOURCE = 4
"""The fields of a source in `linecache`; one that has yet to be read has fewer."""

_log = logging.getLogger(__name__)

_noted: list[int] = []
_FRAMEWORKS = {"jax", "jaxlib", "tensorflow", "keras"}
_LOCKS = {"threading", "queue", "concurrent", "multiprocessing"}
_FUTEX = {"x86_64": "202", "aarch64": "98"}
"""The number of the system call in which a thread waits for another."""


def watch(worker: Worker, address: SocketAddress) -> None:
    """Start the thread, which announces itself at `address` and takes orders from there."""
    preempted, noted = os.pipe()
    _noted.append(noted)
    heed_preemption(worker)
    arguments = (worker, address, threading.get_ident(), preempted)
    threading.Thread(target=_run, args=arguments, name="nbdist-watchdog", daemon=True).start()


def heed_preemption(worker: Worker) -> None:
    """From here on SIGTERM ends the cell first; TensorFlow's strategy takes the signal over."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: _note_preemption(worker))


def _note_preemption(worker: Worker) -> None:
    """Between cells, the engine ends at once; in one, the notebook is told, and ends it."""
    if not worker.cell:
        sys.exit(0)
    worker.preempted = True
    os.write(_noted[0], b"!")  # what says it takes locks, which this very thread may hold


def _run(worker: Worker, address: SocketAddress, main: int, preempted: int) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.routing_id = f"{WATCHDOG}{worker.rank}".encode()
    connect(socket, address)
    socket.send(b"")
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(preempted, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(int(1000 * BEAT_S)))
        if preempted in ready:
            os.read(preempted, 1)
            worker.say(Preempted(**worker.said()), urgent=True)
        if socket in ready:
            _take(worker, socket.recv(), main)
        elif worker.cell:
            worker.say(Beat(step=worker.step, tested=worker.tested, **worker.said()))


def _take(worker: Worker, frame: bytes, main: int) -> None:
    try:
        _obey(worker, msgspec.msgpack.decode(frame, type=_Orders), main)
    except Exception:  # noqa: BLE001 - a thread that ended would leave the rank without a watchdog
        _log.exception("an order could not be carried out")


def _obey(worker: Worker, order: _Orders, main: int) -> None:
    if isinstance(order, StatusQuery):
        _say_whether_there(worker, order.number)
    elif isinstance(order, Diagnose) and order.waits:
        _say_whether_waiting(worker, order.number, main)
    elif order.number != worker.cell:
        return  # it has ended meanwhile
    elif isinstance(order, ForceInterrupt):
        worker.force_interrupt()
    elif isinstance(order, Diagnose):
        worker.say(_where(worker, main), urgent=True)
    elif order.strategy in worker.strategies:
        worker.broken.add(order.strategy)
        if order.strategy == "mirrored":
            from nbdist.worker.tensorflow import strategy as tensorflow_strategy

            tensorflow_strategy.abort_collectives()
        else:
            from nbdist.worker.jax import backend as jax_backend

            jax_backend.abort_collectives()


def _say_whether_there(worker: Worker, cell: int) -> None:
    """Whoever asks may have missed the end of the cell; where it was not begun, it never is."""
    if worker.refuse_unbegun(cell):
        failure = Failure(
            ename=UnsentError.__name__,
            evalue="the cell had not reached this rank",
            traceback=(),
            same="",
        )
        ended = CellEnded(rank=worker.rank, cell=cell, status="error", seconds=0.0, failure=failure)
        worker.say(ended, urgent=True)
    elif worker.ended is not None and worker.ended.cell == cell:
        worker.say(worker.ended, urgent=True)
    else:
        worker.say(Beat(step=worker.step, tested=worker.tested, **worker.said()), urgent=True)


def _say_whether_waiting(worker: Worker, cell: int, main: int) -> None:
    """In the cell: whether in a collective; after it: whether one is under way."""
    found: dict[str, Any] = {"process_s": time.process_time(), "clock_s": time.monotonic()}
    if worker.cell == cell:
        where = _where(worker, main)
        strategy = waiting.strategy_of(worker, main, waits=where.waits)
        said = msgspec.structs.replace(where, collective=strategy, **found)
    elif worker.ended is not None and worker.ended.cell == cell and not worker.cell:
        found |= {"rank": worker.rank, "cell": cell, "under_way": waiting.under_way(worker)}
        said = Where(step=worker.step, place="", waits=False, cpu_s=0.0, stack="", **found)
    else:
        return
    if said.cell == cell:  # it may have ended meanwhile
        worker.say(said, urgent=True)


def _where(worker: Worker, main: int) -> Where:
    innermost = sys._current_frames()[main]
    calls = [
        (frame, line or frame.f_code.co_firstlineno)  # some instructions have no line
        for frame, line in traceback.walk_stack(innermost)
        if not _is_ours(frame)
    ][::-1]
    own = [i for i, (frame, _) in enumerate(calls) if _is_of_cell(frame)]
    return Where(
        step=worker.step,
        place=_place(*calls[own[-1]]) if own else "",
        cpu_s=time.clock_gettime(time.pthread_getcpuclockid(main)),
        waits=_waits(str(innermost.f_globals.get("__name__", ""))),
        stack="\n".join(_call(*call) for call in calls[own[0] :]) if own else "",
        **worker.said(),
    )


def _call(frame: FrameType, line: int) -> str:
    code = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
    return f"  {_place(frame, line)}, in {frame.f_code.co_name}\n    {code}"


def _waits(module: str) -> bool:
    """Whether the main thread, in that module, waits for another, not for a lock of Python's.

    Threads of the framework make the collective. It may have been called from the user's own line
    by code that is no Python, and so has no frame.
    """
    package = module.partition(".")[0]
    try:
        call = Path(f"/proc/self/task/{os.getpid()}/syscall").read_text().split()[0]
    except OSError:  # the machine does not tell
        return package in _FRAMEWORKS
    return call == _FUTEX.get(platform.machine()) and package not in _LOCKS


def _place(frame: FrameType, line: int) -> str:
    """As IPython has it in tracebacks: `Cell In[3], line 14`."""
    file = frame.f_code.co_filename
    name = engine_shell().compile.format_code_name(file)
    return f"{' '.join(name) if name else file}, line {line}"


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_of_cell(frame: FrameType) -> bool:
    """Whether the source is that of a cell, which is in no file: it never goes out of date."""
    known = linecache.cache.get(frame.f_code.co_filename)
    return known is not None and len(known) == _OF_SOURCE and known[1:2] == (None,)
