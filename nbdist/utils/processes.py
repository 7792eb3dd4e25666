"""Which process keeps a run, and whether it is still there."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import psutil

from nbdist.records import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable


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


def wait_or_kill(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """Wait until a child process has ended, and kill it if it takes longer."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    process.kill()
    process.wait()


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


_POLL_S = 0.02


def is_alive(process: psutil.Process) -> bool:
    """Whether the very process still runs, and is not only waited for by its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.is_running():
            return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def await_ends(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run when the time is over.

    psutil waits until a process has vanished: that of a parent that died is left to `init`, which
    may take seconds to see to it.
    """
    deadline = time.monotonic() + timeout_s
    running = list(filter(is_alive, processes))
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        running = list(filter(is_alive, running))
    return running


def cause_of(code: int) -> str:
    """How a process ended, by its exit status."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL), as when a machine has no memory left"
    return f"its process was killed by signal {-code} ({signal.strsignal(-code)})"
