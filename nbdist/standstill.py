"""Ranks of a cell that say nothing, or make no step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from nbdist.failure import stuck_error
from nbdist.records import StillThere
from nbdist.views.hang import hang

if TYPE_CHECKING:
    from nbdist.cluster.engines import Engines
    from nbdist.cluster.watch import Vitals
    from nbdist.escalation import Escalation
    from nbdist.settings import Settings
    from nbdist.task import Task


class Standstill:
    """Ends a cell in which all would wait in vain.

    Args:
        vitals: what was heard of the ranks.
        ending: of the cell.
        engines: to ask for a rank's process.
        task: the cell, and who shows what there is to say.
        settings: the bounds on waiting.

    Attributes:
        has_steps: the cell makes steps.
    """

    def __init__(
        self,
        vitals: Vitals,
        ending: Escalation,
        engines: Engines,
        task: Task,
        settings: Settings,
    ) -> None:
        self.has_steps = False
        self._vitals = vitals
        self._ending = ending
        self._engines = engines
        self._host_of = task.host_of
        self._say = task.view.say
        self._grace_s = settings.cell_grace_s

    def check(self) -> None:
        """For a rank that is frozen, or steps that nobody makes, all would wait in vain.

        One that is silent and not frozen may hold the interpreter's lock: it is waited for.

        Raises:
            RanksLostError: the cell was ended for it.
        """
        running = self._ending.running
        silent = self._vitals.silent(running)
        for rank in filter(self._engines.frozen, silent):
            self._give_up(f"{self.name(rank)} was stopped by a signal {self.after(rank)}")
        for rank in self._vitals.newly(silent):
            why = self._engines.why_silent(rank)
            self._say(f"{self.name(rank)} says nothing {self.after(rank)}; {why}")
            if not self._engines.unreachable(rank):  # the cell may never have reached it
                self._ending.order(StillThere(number=self._ending.number), [rank])
        still_s = self._vitals.still_s()
        if still_s:
            slow = self._ending.computing()
            where = hang(self._ending.where, {r: self._host_of[r] for r in running})
            if not slow:
                self._give_up(f"no step for {still_s:.0f} s: {where}")
            self._say(f"no step for {still_s:.0f} s: {where.splitlines()[0]}, computing")
            self._vitals.look_again()

    def _give_up(self, reason: str) -> NoReturn:
        self._ending.end(self._grace_s)
        raise stuck_error(self._ending.running, reason)

    def name(self, rank: int) -> str:
        """As users see it."""
        return f"rank {rank}@{self._host_of[rank]}"

    def after(self, rank: int) -> str:
        """The last step that it began, in words."""
        step = self._vitals.step(rank)
        none = "before its first step" if self.has_steps else "in the cell"
        return f"after step {step}" if step else none
