"""Deferral of SIGINT during critical sections, and signals at the end of the parent process."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


_PR_SET_PDEATHSIG = 1


def signal_at_end_of_parent(number: int) -> None:
    """Let Linux send a signal to this process when its parent ends for any reason.

    Args:
        number: the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def interrupt_held() -> Iterator[threading.Event]:
    """Defer SIGINT until the block ends, then raise it for the previous handler.

    Python runs signal handlers on the main thread only, so other threads defer nothing.

    Yields:
        An event that is set when a SIGINT arrives.
    """
    arrived = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    previous = signal.signal(signal.SIGINT, lambda _number, _frame: arrived.set())
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGINT, previous)
        if arrived.is_set():
            signal.raise_signal(signal.SIGINT)
