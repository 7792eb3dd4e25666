"""Identity, liveness and end of processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.records import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


CONTINUES = 75
"""Exit status (`EX_TEMPFAIL`) of a program that continues from a checkpoint when started again."""

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a program that ended after SIGTERM and cannot continue."""

BEAT_S = 10.0
"""Seconds between two changes of the time of a file that shows other hosts that a process runs."""

_SILENT_S = 180.0
"""Age in seconds of such a file from which the process does not respond.

Shared disks show changes late, and the clocks of hosts differ.
"""

_TOLERANCE_S = 0.5  # start times are computed from a clock that may be adjusted in between


def this_process() -> Writer:
    """Return the identity of this process."""
    return _this(os.getpid())


@functools.cache
def _this(pid: int) -> Writer:
    return Writer(host=socket.gethostname(), pid=pid, started=_started(psutil.Process(pid)))


def process_of(pid: int) -> Writer | None:
    """Return the identity of the process with this pid; None if there is none."""
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


def is_here(writer: Writer) -> bool:
    """Return True if the process is one of this host."""
    return writer.host == socket.gethostname()


def is_gone(writer: Writer) -> bool:
    """Return True if the process has ended. A zombie counts as ended.

    Returns False for a process on another host, because its state is unknown here.
    """
    if not is_here(writer):
        return False
    try:
        process = psutil.Process(writer.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return bool(abs(_started(process) - writer.started) > _TOLERANCE_S)
    except psutil.NoSuchProcess:
        return True


def is_silent(path: Path) -> bool:
    """Return True if a process no longer changes the time of a file every `BEAT_S`.

    Raises:
        OSError: the file does not exist.
    """
    return time.time() - path.stat().st_mtime > _SILENT_S


def _started(process: psutil.Process) -> float:
    """Return the start time in seconds after boot, which later clock changes do not affect."""
    return float(process.create_time() - psutil.boot_time())


_POLL_S = 0.02


def is_alive(process: psutil.Process) -> bool:
    """Return True if the same process still runs. A zombie or a reused pid does not count."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.is_running():
            return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def await_ends(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until processes end, and return those that still run after the timeout.

    `psutil.wait_procs` also waits until zombies are reaped. `init` may take seconds to reap a
    process whose parent died.
    """
    deadline = time.monotonic() + timeout_s
    running = list(filter(is_alive, processes))
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        running = list(filter(is_alive, running))
    return running


def queued_s() -> float:
    """Return the seconds for which the threads of this process waited for a processor.

    Returns:
        The sum over the running threads; 0 if the machine does not count it.
    """
    waited_ns = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            waited_ns += int(file.read_text(encoding="ascii").split()[1])
    return waited_ns / 1e9


def cause_of(code: int) -> str:
    """Describe how a process ended, from its exit code (negative: minus the signal's number)."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL), possibly because the machine ran out of memory"
    return f"its process was killed by signal {-code} ({signal.strsignal(-code)})"


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Give threads that start meanwhile the Linux policy SCHED_BATCH, with an unchanged priority.

    Such a thread does not interrupt a running thread when it wakes up.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
