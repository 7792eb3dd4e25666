"""How a cell is ended on ranks that still run it: each means harder than the one before."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from nbdist.errors import WorkerError
from nbdist.records import BreakOff, Diagnose, Hurry, StillThere, Where
from nbdist.views import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.cluster.engines import Engines
    from nbdist.collectives import Collectives
    from nbdist.records import CellRequest, Order, StrategyName

    Send = Callable[[Order, Sequence[int]], None]

POLL_S = 0.05
_INTERRUPT_AGAIN_S = 0.25
_DIAGNOSE_S = 0.3
_BREAK_S = 1.0
_COMPUTES_S = 0.5
_SAME_S = 0.1
_SAME_AT_MOST_S = 1.0
"""How long ranks may take to raise what another has raised, as long as they compute: one that was
interrupted as it traces a function would have made fewer collectives than the others."""

_AGAIN_S = 4.0


class Escalation:
    """Interrupts first; who does not heed it and waits in a collective is broken out of it.

    Args:
        number: the cell's.
        running: the ranks that run it; whoever hears their end takes them out.
        engines: to interrupt them.
        collectives: the cluster's; those that are broken off are noted there.
        show: takes in what the ranks say, for so many seconds.

    Attributes:
        number: as given.
        running: likewise.
        interrupted: ranks were interrupted.
        where: what ranks last said of where they are.
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
        """The cell is about to be sent.

        Args:
            send: sends orders to ranks.
            strategy: the one that the cell uses, as a rule.
        """
        self._send = send
        self._strategies = sorted(self._collectives.strategies, key=lambda name: name != strategy)

    def send(self, request: CellRequest, ranks: Iterable[int], grace_s: float) -> None:
        """Send the cell; when not all ranks can be reached, those that were are stopped again.

        Args:
            request: the cell.
            ranks: those that run it.
            grace_s: how long it may take to stop them.
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

    def order(self, order: Order, ranks: Sequence[int]) -> None:
        """Send it; who cannot be reached is left out, and found to be dead by whoever watches."""
        for rank in ranks:
            with contextlib.suppress(WorkerError):
                self._send(order, [rank])

    def interrupt(self, seconds: float) -> None:
        """Wait for the ranks; one that had not begun when it was interrupted is so again."""
        self.interrupted = True
        deadline = time.monotonic() + seconds
        again = 0.0
        while self.running and time.monotonic() < deadline:
            if time.monotonic() >= again:
                if self._hurries:  # before each: a rank may have begun steps since the last
                    self.order(Hurry(number=self.number), sorted(self.running))
                self._engines.interrupt(sorted(self.running))
                again = time.monotonic() + _INTERRUPT_AGAIN_S
            self._show(POLL_S)
            self.running.difference_update(self._engines.dead())

    def wait(self, seconds: float, unless: Callable[[], bool] = bool) -> None:
        """Let ranks end by themselves, unless this becomes true."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline and not unless():
            self._show(POLL_S)
            self.running.difference_update(self._engines.dead())

    def wait_for_same(self) -> None:
        """A rank has raised: the others may be about to raise the same.

        One that does not say where it is may compute, and keep the interpreter to itself.
        """
        self.wait(_SAME_S)
        deadline = time.monotonic() + _SAME_AT_MOST_S
        while self.running and time.monotonic() < deadline:
            if not self.computing(_SAME_S) and self.running <= self.where.keys():
                return
            self.running.difference_update(self._engines.dead())

    def await_reachable(self) -> None:
        """A host that cannot be reached is back, or lost, before long."""
        while any(map(self._engines.unreachable, self.running.difference(self._engines.dead()))):
            self._show(POLL_S)

    def end(self, bound_s: float, *, at_once: bool = False) -> None:
        """End the cell; ranks that heed nothing still run it then.

        Args:
            bound_s: how long that may take; a third of it, interrupts are tried alone.
            at_once: collectives cannot end by themselves: they are broken off with the first.
        """
        self.running.difference_update(self._engines.dead())
        if not self.running:
            return
        deadline = time.monotonic() + bound_s
        self._hurries = True
        self.interrupt(POLL_S if at_once else bound_s / 3)
        while self.running and time.monotonic() < deadline:  # one that computes may wait later
            self.ask()
            for strategy in self._strategies:
                waiting = self._waiting()
                if waiting:
                    self.break_off(strategy, waiting)
                    self.interrupt(_BREAK_S)
            self.interrupt(min(_INTERRUPT_AGAIN_S, deadline - time.monotonic()))

    def ask(self) -> None:
        """Ranks that have ended say so again; those that have not begun never will."""
        there = self.running.difference(self._engines.dead())
        self.order(StillThere(number=self.number), sorted(there))

    def may_kill(self, say: Callable[[str], None], asked: Callable[[], bool]) -> bool:
        """Whether ranks that heed nothing are to be killed: outside steps they may compile.

        Args:
            say: tells the user something, in a line.
            asked: whether the interrupt came again; for a moment, it is waited for.
        """
        if not self.running:
            return False
        ranks = labels.ranks(self.running)
        say(f"rank {ranks} heeds no interrupt: interrupt again to have it killed")
        self.wait(_AGAIN_S, asked)
        return bool(self.running) and asked()

    def break_off(self, strategy: StrategyName, ranks: Sequence[int]) -> None:
        """End the collectives of a strategy in which these ranks wait."""
        self._collectives.broken.add(strategy)
        self.order(BreakOff(number=self.number, strategy=strategy), ranks)

    def diagnose(self) -> None:
        """Learn where the ranks are; one that does not say so within a moment is left out."""
        self.where.clear()
        self.order(Diagnose(number=self.number), sorted(self.running))
        deadline = time.monotonic() + _DIAGNOSE_S
        while not self.running <= self.where.keys() and time.monotonic() < deadline:
            self._show(POLL_S)

    def computing(self, seconds: float = _COMPUTES_S) -> list[int]:
        """The ranks whose own code computes: the others may wait for these, and not in vain."""
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
        """The ranks that wait in a collective, by their own account."""
        if self.running:
            self.diagnose()
        return [rank for rank in sorted(self.running & self.where.keys()) if self.where[rank].waits]
