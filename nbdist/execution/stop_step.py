"""The step after which all ranks of a cell stop, once somebody has asked for its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbdist.records import SOON, StopAfter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from nbdist.records import Command, Stopping

_LET_GO_ON_S = 0.5
"""How long ranks wait where they would go no farther by themselves."""


class StopAgreement:
    """The farthest that any rank goes by itself.

    Ranks whose steps need nobody drift apart. One that waits for the answer may be waited for in
    what they have in common now and then, as a comparison of their states: it is let go on.

    Args:
        number: the cell's.
        order: sends orders to ranks.
        step: the last one that a rank has begun, as far as is known.
    """

    def __init__(
        self,
        number: int,
        order: Callable[[Command, Sequence[int]], None],
        step: Callable[[int], int],
    ) -> None:
        self._number = number
        self._order = order
        self._step = step
        self._limits: dict[int, int] = {}
        self._answered = False
        self._since = 0.0

    def hear(self, stopping: Stopping) -> None:
        """A rank has said how far it goes."""
        self._limits[stopping.rank] = stopping.limit
        self._since = time.monotonic()

    def seek(self, still: Set[int]) -> None:
        """Answer the ranks that still run, once each of them has said it."""
        if not self._limits or self._answered:
            return
        if still <= self._limits.keys():
            self._answered = True
            last = max(self._limits.values())
            self._order(StopAfter(number=self._number, step=last), sorted(still))
        elif time.monotonic() - self._since > _LET_GO_ON_S:
            self._since = time.monotonic()
            self._let_go_on(still)

    def _let_go_on(self, still: Set[int]) -> None:
        reached = max(map(self._step, still)) + 1
        behind = [r for r in sorted(still & self._limits.keys()) if self._limits[r] < reached]
        if behind:
            self._limits |= dict.fromkeys(behind, reached)
            self._order(StopAfter(number=self._number, step=SOON, limit=reached), behind)
