"""Polling of a condition until a deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def repeat_until(done: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Call `done` until it returns true or the time runs out, and return its last result."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True
