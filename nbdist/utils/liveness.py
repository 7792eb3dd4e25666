"""Whether processes run that are perhaps nobody's children any more, and how they ended."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

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
