"""Interrupts of a step cell: all ranks end at the same step, with a complete state.

A rank that stopped at once would leave the others in an all-reduce. Instead, each rank reports the
step that it may reach without a command. The notebook answers with the largest of these, and all
ranks stop there. The ranks exchange nothing with each other, and send nothing before an interrupt.

A rank that has not begun the cell ignores the signal. It finds the notebook's command to stop
(`SOON`) queued behind the cell.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from nbdist.records import SOON, Stopping

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import StopAfter
    from nbdist.worker.runtime.interrupts import Interrupts
    from nbdist.worker.runtime.rank_reporter import RankReporter

AHEAD_S = 0.3
"""Time that a rank continues without a command; by then, the signal has reached all ranks."""

AHEAD_STEPS = 2
"""Minimum of steps that a rank continues: as many as may be under way."""
_POLL_S = 0.05


class StopPoint:
    """The last step before a stop, once the ranks have agreed on it.

    Args:
        reporter: reporter of this rank.
        interrupts: records an interrupt.
        answer: waits for the notebook's answer for the given seconds; returns None without one.
    """

    def __init__(
        self,
        reporter: RankReporter,
        interrupts: Interrupts,
        answer: Callable[[float], StopAfter | None],
    ) -> None:
        self._reporter = reporter
        self._interrupts = interrupts
        self._answer = answer
        self._limit = -1
        self._last = SOON
        self._seen_at = -math.inf  # the duration of the first step is unknown

    def is_before(self, step: int) -> bool:
        """Return True if the stop is before `step`. Call it before each step."""
        now = time.monotonic()
        step_s, self._seen_at = now - self._seen_at, now
        if not self._interrupts.is_pending:
            return False
        if self._limit < 0:
            ahead = max(AHEAD_STEPS, math.ceil(AHEAD_S / max(step_s, 1e-6)))
            self._limit = step - 1 + ahead
            stopping = Stopping(limit=self._limit, **self._reporter.record_fields())
            self._reporter.send(stopping, urgent=True)
        self._read_answer(0)
        while self._last < 0 and step > self._limit:
            self._read_answer(_POLL_S)
        return 0 <= self._last < step

    def _read_answer(self, seconds: float) -> None:
        if self._last < 0:
            answer = self._answer(seconds)
            if answer is not None:
                self._last = answer.step
                self._limit = max(self._limit, answer.limit)
