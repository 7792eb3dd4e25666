"""Memory use of a rank, measured at intervals."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 1.0


class MemoryGauge:
    """Measures this process, and its devices if their framework reports memory.

    Attributes:
        device_bytes: returns the bytes in use on each device; empty if unknown.
    """

    def __init__(self) -> None:
        self.device_bytes: Callable[[], list[int]] = list
        self._process = psutil.Process()
        self.begin()

    def begin(self) -> None:
        """Make the next measurement due, so that each cell has at least one."""
        self._read_at = -math.inf

    def is_due(self) -> bool:
        """Return True if the last measurement is at least `INTERVAL_S` old."""
        return time.monotonic() - self._read_at >= INTERVAL_S

    def read(self) -> dict[str, float]:
        """Return the bytes of the process, and of its fullest device if known."""
        self._read_at = time.monotonic()
        measured = {"process_bytes": float(self._process.memory_info().rss)}
        if used := self.device_bytes():
            measured["device_bytes"] = float(max(used))
        return measured
