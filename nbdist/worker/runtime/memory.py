"""How much memory a rank takes, measured now and then."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 1.0


class MemoryGauge:
    """Measures this process, and its devices where their framework counts.

    Attributes:
        device_bytes: the bytes in use on each device; empty where nobody counts.
    """

    def __init__(self) -> None:
        self.device_bytes: Callable[[], list[int]] = list
        self._process = psutil.Process()
        self.begin()

    def begin(self) -> None:
        """From here on it is due: each cell has its memory measured."""
        self._read_at = -math.inf

    def is_due(self) -> bool:
        """Whether the last time is longer than `INTERVAL_S` ago."""
        return time.monotonic() - self._read_at >= INTERVAL_S

    def read(self) -> dict[str, float]:
        """Bytes of the process, and of its fullest device if that is known."""
        self._read_at = time.monotonic()
        measured = {"process_bytes": float(self._process.memory_info().rss)}
        if used := self.device_bytes():
            measured["device_bytes"] = float(max(used))
        return measured
