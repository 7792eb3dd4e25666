"""Detection of ranks that wait in a collective after another rank has ended the cell."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.records import Diagnose

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.execution.cancellation import Cancellation
    from nbdist.records import CellEnded, StrategyName, Where

_EVERY_S = 0.25
_WAIT_S = 1.8
"""The time that all ranks must be idle before nbdist cancels the collective."""

_STALE_S = 1.0
_MOST_BUSY = 0.1
"""The share of a core that an idle process may use (measured on 2 cores: 0.003 to 0.007)."""

_NOISE_S = 0.05
_MAIN_NOISE_S = 0.005
"""The processor time that a waiting main thread may use. An endless wait uses none."""


@dataclass
class _Idle:
    """An idle rank.

    Attributes:
        first: the first answer since which the rank is idle.
        last: the last answer.
        heard_at: the time at which the last answer arrived, by this process's clock.
    """

    first: Where
    last: Where
    heard_at: float

    @property
    def seconds(self) -> float:
        return self.last.clock_s - self.first.clock_s


class LoneWaits:
    """Finds collectives that cannot end.

    It asks the ranks after one of them has ended the cell. A collective cannot end if all other
    ranks wait in a collective and all processes are idle. A rank may also compute, sleep or save:
    nbdist waits for it.

    Args:
        ending: sends orders to the ranks of the cell.
        ranks: the ranks of the cell.
    """

    def __init__(self, ending: Cancellation, ranks: Iterable[int]) -> None:
        self._ending = ending
        self._ranks = sorted(ranks)
        self._idle: dict[int, _Idle] = {}
        self._asked_at = 0.0

    def hear(self, where: Where) -> None:
        """Store a rank's answer."""
        if not where.clock_s:
            return  # the answer to another question
        idle = self._idle.get(where.rank)
        if idle is None or not _goes_on(idle.first, where):
            idle = self._idle[where.rank] = _Idle(where, where, 0.0)
        idle.last, idle.heard_at = where, time.monotonic()

    def found(self, ended: Mapping[int, CellEnded]) -> dict[int, Where]:
        """Return the ranks whose collective cannot end, each with its position.

        Args:
            ended: the ends of the cell, by rank.

        Returns:
            Empty if the ranks may wait for another reason.
        """
        running = sorted(self._ending.running)
        if not running or not any(end.status == "ok" for end in ended.values()):
            return {}
        now = time.monotonic()
        if now - self._asked_at >= _EVERY_S:
            self._asked_at = now
            self._ending.order(Diagnose(number=self._ending.number, waits=True), self._ranks)
        idle = self._idle
        if not all(
            rank in idle and idle[rank].seconds >= _WAIT_S and now - idle[rank].heard_at < _STALE_S
            for rank in self._ranks
        ):
            return {}
        where = {rank: idle[rank].last for rank in running}
        busy = any(idle[rank].last.under_way for rank in self._ranks)
        return {} if busy or not all(one.collective for one in where.values()) else where


def strategies(where: Mapping[int, Where]) -> dict[StrategyName, list[int]]:
    """Group waiting ranks by the strategy of their collective."""
    found: dict[StrategyName, list[int]] = {}
    for rank, one in where.items():
        if one.collective is not None:
            found.setdefault(one.collective, []).append(rank)
    return found


def _goes_on(first: Where, where: Where) -> bool:
    """Return whether the rank has been idle since its first answer."""
    used_s = where.process_s - first.process_s
    main_s = where.cpu_s - first.cpu_s
    return (
        (first.collective, first.under_way, first.step, first.place, first.stack)
        == (where.collective, where.under_way, where.step, where.place, where.stack)
        and used_s <= _NOISE_S + _MOST_BUSY * (where.clock_s - first.clock_s)
        and main_s <= _MAIN_NOISE_S
    )
