"""Which process keeps a run, and whether it is still there."""

from __future__ import annotations

import functools
import os
import socket

import psutil

from nbdist.records import Writer

_TOLERANCE_S = 0.5  # between two looks at a clock that is being set


def this_process() -> Writer:
    """This process, as the writer of what it keeps."""
    return _this(os.getpid())


@functools.cache
def _this(pid: int) -> Writer:
    return Writer(host=socket.gethostname(), pid=pid, started=_started(psutil.Process(pid)))


def process_of(pid: int) -> Writer | None:
    """The process that has this pid now; None where none has."""
    try:
        return Writer(host=socket.gethostname(), pid=pid, started=_started(psutil.Process(pid)))
    except psutil.NoSuchProcess:
        return None


def is_gone(writer: Writer) -> bool:
    """Whether the writer has ended; nobody can tell of one on another host, and it counts as there.

    A process that has ended and waits for its parent counts as gone.
    """
    if writer.host != socket.gethostname():
        return False
    try:
        process = psutil.Process(writer.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return bool(abs(_started(process) - writer.started) > _TOLERANCE_S)
    except psutil.NoSuchProcess:
        return True


def _started(process: psutil.Process) -> float:
    """Seconds after the machine came up: the same however its clock is set later."""
    return float(process.create_time() - psutil.boot_time())
