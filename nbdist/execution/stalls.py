"""Detection of ranks that do not respond, and of steps that make no progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from nbdist.execution.failures import stuck_error
from nbdist.records import StatusQuery
from nbdist.views.run.hangs import hang

if TYPE_CHECKING:
    from nbdist.cluster.engines import Engines
    from nbdist.cluster.heartbeats import Vitals
    from nbdist.execution.cancellation import Cancellation
    from nbdist.execution.context import RunContext
    from nbdist.settings import Settings


class StallMonitor:
    """Ends a cell that cannot continue.

    Args:
        vitals: the signs of life of the ranks.
        ending: ends the cell.
        engines: return the state of a rank's process.
        context: the cell and its view.
        settings: the time limits.

    Attributes:
        has_steps: the cell runs steps.
    """

    def __init__(
        self,
        vitals: Vitals,
        ending: Cancellation,
        engines: Engines,
        context: RunContext,
        settings: Settings,
    ) -> None:
        self.has_steps = False
        self._vitals = vitals
        self._ending = ending
        self._engines = engines
        self._host_of = context.host_of
        self._say = context.view.say
        self._grace_s = settings.cell_grace_s

    def check(self) -> None:
        """End the cell if a rank is frozen or no rank makes a step.

        A silent rank that is not frozen may hold the interpreter's lock: nbdist waits for it.

        Raises:
            RanksLostError: nbdist has ended the cell.
        """
        running = self._ending.running
        silent = self._vitals.silent(running)
        for rank in filter(self._engines.frozen, silent):
            self._give_up(f"{self.name(rank)} was stopped by a signal {self.after(rank)}")
        for rank in self._vitals.newly(silent):
            why = self._engines.why_silent(rank)
            self._say(f"{self.name(rank)} does not respond {self.after(rank)}; {why}")
            if not self._engines.unreachable(rank):  # the cell may not have reached it
                self._ending.order(StatusQuery(number=self._ending.number), [rank])
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
        """The label of a rank, as users see it."""
        return f"rank {rank}@{self._host_of[rank]}"

    def after(self, rank: int) -> str:
        """The last step that the rank began, in words."""
        step = self._vitals.step(rank)
        none = "before its first step" if self.has_steps else "in the cell"
        return f"after step {step}" if step else none
