"""An interrupt of a step cell: all ranks make the same steps, and what is carried stays whole.

A rank that stopped where the signal met it would leave the others in an all-reduce. So each says
how far it will go by itself, the notebook answers with the farthest of these, and there
all stop. Nothing is exchanged between ranks, and nothing at all until there is an interrupt.

A signal means nothing to a rank that has not begun the cell: it finds the notebook's order to stop
(`SOON`) behind the cell itself.
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
"""How long a rank goes on by itself: until then, the signal has met the others too."""

AHEAD_STEPS = 2
"""With two steps under way at most, a rank that is in a step waits for none beyond the next."""
_POLL_S = 0.05


class StopPoint:
    """The step after which a rank stops, once that is known.

    Args:
        reporter: of this rank.
        interrupts: where an interrupt is noted.
        answer: waits for the notebook's answer for so many seconds; None when none has come.
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
        self._seen_at = -math.inf  # of the first step nobody knows how long it takes

    def is_before(self, step: int) -> bool:
        """Whether `step` is beyond the last one; to be asked before each."""
        now = time.monotonic()
        step_s, self._seen_at = now - self._seen_at, now
        if not self._interrupts.noted:
            return False
        if self._limit < 0:
            ahead = max(AHEAD_STEPS, math.ceil(AHEAD_S / max(step_s, 1e-6)))
            self._limit = step - 1 + ahead
            stopping = Stopping(limit=self._limit, **self._reporter.said())
            self._reporter.say(stopping, urgent=True)
        self._hear(0)
        while self._last < 0 and step > self._limit:
            self._hear(_POLL_S)
        return 0 <= self._last < step

    def _hear(self, seconds: float) -> None:
        if self._last < 0:
            answer = self._answer(seconds)
            if answer is not None:
                self._last = answer.step
                self._limit = max(self._limit, answer.limit)
