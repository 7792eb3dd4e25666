"""What is known of the ranks while they run a cell: who is alive, and how far each is."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from nbdist.records import Beat, Rows, Where

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import Event

SILENT_S = 5.0
"""An engine beats once a second (`worker/watchdog.py`); one that misses five does not run."""

HANG_STEPS = 10
"""A step that takes so many times as long as the others hangs."""

HANG_S = 30.0
FIRST_STEP_HANGS_S = 600.0
"""The first step is compiled, which may take minutes."""

_PACES = 64


class Vitals:
    """The last that was heard of each rank in one cell.

    Args:
        ranks: those that run the cell.
        hang_after_s: to stand still for so long is a hang; 0 for the time of `HANG_STEPS` steps,
            and `HANG_S` at least.
    """

    def __init__(self, ranks: Iterable[int], hang_after_s: float = 0.0) -> None:
        self._hang_after_s = hang_after_s
        self._heard_at = dict.fromkeys(ranks, time.monotonic())
        self._beats: dict[int, tuple[int, int]] = {}
        self._moved_at: float | None = None
        self._steps = dict.fromkeys(self._heard_at, 0)
        self._stepped_at = 0.0
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._told: set[int] = set()

    def begin_steps(self) -> None:
        """From here on, steps are awaited."""
        if self._moved_at is None:
            self._moved_at = self._stepped_at = time.monotonic()

    def hear(self, record: Event) -> None:
        """Take in when a rank said something; whatever it is, but that it lives, is progress."""
        now = time.monotonic()
        self._heard_at[record.rank] = now
        self._told.discard(record.rank)
        if isinstance(record, Beat):
            beat = record.step, record.tested
            moved = self._beats.get(record.rank) != beat
            self._beats[record.rank] = beat
            self._reach(record.rank, record.step, now)
        else:
            moved = not isinstance(record, Where)
            if isinstance(record, Rows) and record.values:
                self._reach(record.rank, record.last().step, now)
        if moved and self._moved_at is not None:
            self._moved_at = now

    def _reach(self, rank: int, step: int, now: float) -> None:
        before = max(self._steps.values())
        self._steps[rank] = max(self._steps[rank], step)
        if step > before:
            if before > 0:
                self._paces.append((now - self._stepped_at) / (step - before))
            self._stepped_at = now

    def step(self, rank: int) -> int:
        """The last one that it is known to have begun; 0 is none."""
        return self._steps[rank]

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that have said nothing for `SILENT_S`."""
        now = time.monotonic()
        return [rank for rank in ranks if now - self._heard_at[rank] > SILENT_S]

    def newly(self, silent: Iterable[int]) -> list[int]:
        """Of silent ranks, those that had said something since this was asked last."""
        fresh = sorted(set(silent) - self._told)
        self._told.update(fresh)
        return fresh

    def still_s(self) -> float:
        """For how long all steps have stood still, where that is too long; else 0."""
        if self._moved_at is None:
            return 0.0
        still_s = time.monotonic() - self._moved_at
        return still_s if still_s > self._patience_s() else 0.0

    def look_again(self) -> None:
        """There is a reason to wait on: as if there had been a step."""
        self._moved_at = time.monotonic()

    def _patience_s(self) -> float:
        if self._hang_after_s:
            return self._hang_after_s
        if not self._paces:
            return FIRST_STEP_HANGS_S
        return max(HANG_S, HANG_STEPS * median(self._paces))
