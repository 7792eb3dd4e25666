"""Interruption of a cell on the ranks that still run it, in steps of increasing force."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from nbdist.errors import WorkerError
from nbdist.records import AbortCollectives, Diagnose, ForceInterrupt, StatusQuery, Where
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.cluster.collectives import Collectives
    from nbdist.cluster.engines import Engines
    from nbdist.records import CellRequest, Command, StrategyName

    Send = Callable[[Command, Sequence[int]], None]

POLL_S = 0.05
_INTERRUPT_AGAIN_S = 0.25
_DIAGNOSE_S = 0.3
_BREAK_S = 1.0
_COMPUTES_S = 0.5
_SAME_S = 0.1
_SAME_AT_MOST_S = 1.0
"""The time that computing ranks have to raise the error of another rank.

A rank that is interrupted while it traces a function has created fewer collectives than the others.
"""

_AGAIN_S = 4.0


class Cancellation:
    """Interrupts the ranks, then cancels the collectives of ranks that do not respond.

    Args:
        number: the number of the cell.
        running: the ranks that run the cell. The caller removes a rank that has ended it.
        engines: interrupt the ranks.
        collectives: the cluster's collectives. Cancelled ones are marked as broken.
        show: processes the records of the ranks for a number of seconds.

    Attributes:
        number: as given.
        running: as given.
        interrupted: the ranks were interrupted.
        where: the last reported position of each rank.
    """

    def __init__(
        self,
        number: int,
        running: set[int],
        engines: Engines,
        collectives: Collectives,
        show: Callable[[float], None],
    ) -> None:
        self.interrupted = False
        self.where: dict[int, Where] = {}
        self.number = number
        self._hurries = False
        self.running = running
        self._engines = engines
        self._collectives = collectives
        self._show = show

    def begin(self, send: Send, strategy: StrategyName | None) -> None:
        """Prepare for a cell that is sent next.

        Args:
            send: sends orders to ranks.
            strategy: the strategy of the cell. Its collectives are cancelled first.
        """
        self._send = send
        self._strategies = sorted(self._collectives.strategies, key=lambda name: name != strategy)

    def send(self, request: CellRequest, ranks: Iterable[int], grace_s: float) -> None:
        """Send the cell. If a rank cannot be reached, end the cell on the others.

        Args:
            request: the cell.
            ranks: the ranks that run it.
            grace_s: the time limit for ending it.
        """
        unsent = sorted(ranks)
        try:
            self.running.update(unsent)
            while unsent:
                self._send(request, unsent[:1])
                del unsent[0]
        except BaseException:
            self.running.difference_update(unsent)
            self.end(grace_s)
            raise

    def order(self, order: Command, ranks: Sequence[int]) -> None:
        """Send an order. Skip ranks that cannot be reached: the watch reports them as dead."""
        for rank in ranks:
            with contextlib.suppress(WorkerError):
                self._send(order, [rank])

    def interrupt(self, seconds: float) -> None:
        """Interrupt the ranks, and wait for their ends. Repeat it for ranks that begin late."""
        self.interrupted = True
        deadline = time.monotonic() + seconds
        again = 0.0
        while self.running and time.monotonic() < deadline:
            if time.monotonic() >= again:
                if self._hurries:  # before each interrupt: a rank may have begun steps since
                    self.order(ForceInterrupt(number=self.number), sorted(self.running))
                self._engines.interrupt(sorted(self.running))
                again = time.monotonic() + _INTERRUPT_AGAIN_S
            self._show(POLL_S)
            self.running.difference_update(self._engines.dead())

    def wait(self, seconds: float, unless: Callable[[], bool] = bool) -> None:
        """Wait until the ranks have ended, or until `unless` returns True."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline and not unless():
            self._show(POLL_S)
            self.running.difference_update(self._engines.dead())

    def wait_for_same(self) -> None:
        """Wait for ranks that may raise the error that one rank has raised.

        A rank that does not report its position may compute and hold the interpreter's lock.
        """
        self.wait(_SAME_S)
        deadline = time.monotonic() + _SAME_AT_MOST_S
        while self.running and time.monotonic() < deadline:
            if not self.computing(_SAME_S) and self.running <= self.where.keys():
                return
            self.running.difference_update(self._engines.dead())

    def await_reachable(self) -> None:
        """Wait until each unreachable host is back or lost."""
        while any(map(self._engines.unreachable, self.running.difference(self._engines.dead()))):
            self._show(POLL_S)

    def end(self, bound_s: float, *, at_once: bool = False) -> None:
        """End the cell. Ranks that do not respond still run it afterwards.

        Args:
            bound_s: the time limit. The first third is for interrupts alone.
            at_once: cancel the collectives after the first interrupt, as they cannot end.
        """
        self.running.difference_update(self._engines.dead())
        if not self.running:
            return
        deadline = time.monotonic() + bound_s
        self._hurries = True
        self.interrupt(POLL_S if at_once else bound_s / 3)
        while self.running and time.monotonic() < deadline:  # a computing rank may wait later
            self.ask()
            for strategy in self._strategies:
                waiting = self._waiting()
                if waiting:
                    self.abort_collectives(strategy, waiting)
                    self.interrupt(_BREAK_S)
            self.interrupt(min(_INTERRUPT_AGAIN_S, deadline - time.monotonic()))

    def ask(self) -> None:
        """Have ranks report their end again, and drop the cell if they have not begun it."""
        there = self.running.difference(self._engines.dead())
        self.order(StatusQuery(number=self.number), sorted(there))

    def may_kill(self, say: Callable[[str], None], asked: Callable[[], bool]) -> bool:
        """Return whether to kill ranks that do not respond. Outside of steps they may compile.

        Args:
            say: shows a line to the user.
            asked: returns whether the user has interrupted again.
        """
        if not self.running:
            return False
        ranks = formatting.ranks(self.running)
        say(f"rank {ranks} does not respond to the interrupt: interrupt again to kill it")
        self.wait(_AGAIN_S, asked)
        return bool(self.running) and asked()

    def abort_collectives(self, strategy: StrategyName, ranks: Sequence[int]) -> None:
        """Cancel the collectives of a strategy on ranks that wait in them."""
        self._collectives.broken.add(strategy)
        self.order(AbortCollectives(number=self.number, strategy=strategy), ranks)

    def diagnose(self) -> None:
        """Ask the ranks for their positions. Ranks that do not answer in time are left out."""
        self.where.clear()
        self.order(Diagnose(number=self.number), sorted(self.running))
        deadline = time.monotonic() + _DIAGNOSE_S
        while not self.running <= self.where.keys() and time.monotonic() < deadline:
            self._show(POLL_S)

    def computing(self, seconds: float = _COMPUTES_S) -> list[int]:
        """The ranks whose own code computes. Others may wait for these."""
        self.diagnose()
        before = self.where.copy()
        self._show_on(seconds)
        self.diagnose()
        return [
            rank
            for rank, where in self.where.items()
            if not where.waits
            and rank in before
            and where.cpu_s - before[rank].cpu_s > seconds / 10
        ]

    def _show_on(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self._show(min(left_s, POLL_S))

    def _waiting(self) -> list[int]:
        """The ranks that report to wait in a collective."""
        if self.running:
            self.diagnose()
        return [rank for rank in sorted(self.running & self.where.keys()) if self.where[rank].waits]
