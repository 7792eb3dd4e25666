"""Time limits for benchmarks, so that each wait ends with a clear error."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLEANUP_S = 120.0
"""Time to end processes after a limit has passed. The benchmarks then exit."""


@contextlib.contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Interrupt the main thread if the body does not end in time.

    If the interrupt has no effect within `CLEANUP_S`, print the stacks of all threads and exit.

    Args:
        seconds: the limit.
        what: description of the body, for the error.

    Raises:
        TimeoutError: the body did not end in time.
    """
    has_expired = threading.Event()

    def expire() -> None:
        has_expired.set()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    faulthandler.dump_traceback_later(seconds + CLEANUP_S, exit=True)
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if has_expired.is_set():
            raise TimeoutError(f"{what} did not end within {seconds:.0f} s") from None
        raise
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def wait_until(
    condition: Callable[[], object], seconds: float, what: str, interval_s: float = 0.05
) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it was not true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(interval_s)
