"""An interrupt of the kernel waits for what must not be left half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def interrupt_held() -> Iterator[threading.Event]:
    """Within it, an interrupt is held; it comes at the end, to whoever handled it before.

    On another thread than the main one nothing is held: no interrupt comes there.

    Yields:
        What is set when one came.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    former = signal.signal(signal.SIGINT, lambda _number, _frame: came.set())
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, former)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)
