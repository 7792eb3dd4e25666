"""Heartbeats and progress of the ranks while they run a cell."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from nbdist.records import Beat, RankPosition, Rows, SystemSample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import Event

SILENT_S = 5.0
"""Time without a record after which a rank is silent: five heartbeats of `worker/watchdog.py`."""

HANG_STEPS = 10
"""Multiple of the median step time after which a step counts as hanging."""

HANG_S = 30.0
FIRST_STEP_HANGS_S = 600.0
"""Limit of the first step, in seconds. Its compilation may take minutes."""

_MAX_STEP_TIMES = 64


class Heartbeats:
    """Time and step of the last record of each rank in one cell.

    Args:
        ranks: the ranks that run the cell.
        hang_after_s: the seconds without progress that count as a hang; 0 for the time of
            `HANG_STEPS` steps, at least `HANG_S`.
    """

    def __init__(self, ranks: Iterable[int], hang_after_s: float = 0.0) -> None:
        self._hang_after_s = hang_after_s
        self._received_at = dict.fromkeys(ranks, time.monotonic())
        self._beats: dict[int, tuple[int, int]] = {}
        self._training = set(self._received_at)
        self._moved_at: float | None = None
        self._steps = dict.fromkeys(self._received_at, 0)
        self._stepped_at = 0.0
        self._step_times: deque[float] = deque(maxlen=_MAX_STEP_TIMES)
        self._reported: set[int] = set()

    def begin_steps(self) -> None:
        """Start to expect steps."""
        if self._moved_at is None:
            self._moved_at = self._stepped_at = time.monotonic()

    def receive(self, record: Event) -> None:
        """Process a record of a rank. Every record counts as progress, except signs of life.

        Between two trainings of the cell, no rank is expected to make progress.
        """
        now = time.monotonic()
        self._received_at[record.rank] = now
        self._reported.discard(record.rank)
        if isinstance(record, Beat):
            beat = record.step, record.tested
            if record.trained:
                self._training.discard(record.rank)
            else:
                self._training.add(record.rank)
            moved = self._beats.get(record.rank) != beat or not self._training
            self._beats[record.rank] = beat
            self._record_step(record.rank, record.step, now)
        else:
            moved = not isinstance(record, RankPosition | SystemSample)
            if isinstance(record, Rows) and record.values:
                self._record_step(record.rank, record.last().step, now)
        if moved and self._moved_at is not None:
            self._moved_at = now

    def _record_step(self, rank: int, step: int, now: float) -> None:
        before = max(self._steps.values())
        self._steps[rank] = max(self._steps[rank], step)
        if step > before:
            if before > 0:
                self._step_times.append((now - self._stepped_at) / (step - before))
            self._stepped_at = now

    def step(self, rank: int) -> int:
        """Return the last step that a rank is known to have begun; 0 if none."""
        return self._steps[rank]

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have sent no record for `SILENT_S`."""
        now = time.monotonic()
        return [rank for rank in ranks if now - self._received_at[rank] > SILENT_S]

    def newly_silent(self, silent: Iterable[int]) -> list[int]:
        """Return the silent ranks that this method has not returned since their last record."""
        fresh = sorted(set(silent) - self._reported)
        self._reported.update(fresh)
        return fresh

    def stalled_s(self) -> float:
        """Return the seconds without progress on any rank, if they count as a hang; else 0."""
        if self._moved_at is None:
            return 0.0
        stalled_s = time.monotonic() - self._moved_at
        return stalled_s if stalled_s > self._limit_s() else 0.0

    def restart_wait(self) -> None:
        """Restart the wait for progress, as after a step."""
        self._moved_at = time.monotonic()

    def _limit_s(self) -> float:
        if self._hang_after_s:
            return self._hang_after_s
        if not self._step_times:
            return FIRST_STEP_HANGS_S
        return max(HANG_S, HANG_STEPS * median(self._step_times))
