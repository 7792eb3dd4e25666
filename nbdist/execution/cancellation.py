"""Cancellation of a cell on its ranks: at the end of a step, or with increasing force."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbdist.records import SOON, AbortCollectives, Diagnose, ForceInterrupt, RankPosition, StopAfter
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from nbdist.cluster.collectives import Collectives
    from nbdist.cluster.engines import Engines
    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.sending import CellSender
    from nbdist.records import StrategyName

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

QUIET_LOOKS = 2
"""Successive looks at which no rank computes, before nbdist interrupts the ranks.

On a busy machine, a rank that computes may get no processor for as long as one look lasts.
"""

_AGAIN_S = 4.0
_SAME_STOP_S = 2.0
"""The time within which requests of two pages count as one."""

_STOP_S = 1.0
"""The time for which nbdist repeats a stop, for ranks that are about to begin the cell.

A rank that begins later finds the command.
"""


_COMPUTING = 0.2
_WITH_QUEUES = 0.5
"""Share of a look for which the threads of a rank compute, or compute and wait for a processor.

On two cores with 15 busy threads, idle ranks waited for 0.16 of a look and computed for 0.02.
Ranks that computed had 0.3 and waited for 2 to 4 (2026-11-30).
"""


class Positions:
    """Positions of the ranks, which nbdist requests from them.

    Args:
        sender: sends to the ranks of the cell.
        show: processes the records of the ranks for a number of seconds.

    Attributes:
        where: the last reported position of each rank.
    """

    def __init__(self, sender: CellSender, show: Callable[[float], None]) -> None:
        self.where: dict[int, RankPosition] = {}
        self._sender = sender
        self._show = show

    def receive(self, where: RankPosition) -> None:
        """Store a rank's answer."""
        if where.rank in self._sender.running:
            self.where[where.rank] = where

    def request(self) -> None:
        """Request the positions of the ranks. Ranks that do not respond in time are omitted."""
        self.where.clear()
        running = self._sender.running
        self._sender.send_command(Diagnose(number=self._sender.number), sorted(running))
        deadline = time.monotonic() + _DIAGNOSE_S
        while not running <= self.where.keys() and time.monotonic() < deadline:
            self._show(POLL_S)

    def computing(self, seconds: float = _COMPUTES_S, *, on_any_thread: bool = False) -> list[int]:
        """Return the ranks whose own code computes. Other ranks may wait for them.

        Args:
            seconds: the time for which nbdist observes the ranks.
            on_any_thread: count other threads than the main thread too, if devices are CPUs.
        """
        self.request()
        before = self.where.copy()
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self._show(min(left_s, POLL_S))
        self.request()
        return [
            rank
            for rank, where in self.where.items()
            if rank in before
            and (
                (not where.waits and where.cpu_s - before[rank].cpu_s > seconds / 10)
                or (on_any_thread and _threads_compute(before[rank], where, seconds))
            )
        ]

    def waiting(self) -> list[int]:
        """Return the ranks that wait in a collective."""
        running = self._sender.running
        if running:
            self.request()
        return [rank for rank in sorted(running & self.where.keys()) if self.where[rank].waits]


def _threads_compute(before: RankPosition, where: RankPosition, seconds: float) -> bool:
    used_s = where.process_s - before.process_s
    wanted_s = used_s + where.queued_s - before.queued_s
    return used_s > _COMPUTING * seconds or wanted_s > _WITH_QUEUES * seconds


class Cancellation:
    """Cancellation of a cell: interrupts, then aborted collectives for ranks that do not respond.

    Args:
        sender: sends to the ranks of the cell.
        strategy: the strategy of the cell. nbdist cancels its collectives first.
        engines: interrupt the ranks.
        collectives: the cluster's collectives. Cancelled ones are marked as broken.
        show: processes the records of the ranks for a number of seconds.

    Attributes:
        interrupted: True after the first interrupt.
        is_forced: True after an interrupt that does not wait for the end of a step.
        positions: the positions of the ranks.
    """

    def __init__(
        self,
        sender: CellSender,
        strategy: StrategyName | None,
        engines: Engines,
        collectives: Collectives,
        show: Callable[[float], None],
    ) -> None:
        self.interrupted = False
        self.positions = Positions(sender, show)
        self.is_forced = False
        self._sender = sender
        self._strategies = sorted(collectives.strategies, key=lambda name: name != strategy)
        self._engines = engines
        self._collectives = collectives
        self._show = show

    @property
    def running(self) -> set[int]:
        """The ranks that run the cell."""
        return self._sender.running

    @property
    def broken(self) -> Collection[StrategyName]:
        """The strategies whose collectives were cancelled."""
        return self._collectives.broken

    def interrupt(self, seconds: float) -> None:
        """Interrupt the ranks and wait until they end. Interrupt ranks that begin late again.

        Args:
            seconds: the time limit.
        """
        self.interrupted = True
        deadline = time.monotonic() + seconds
        again = 0.0
        while self.running and time.monotonic() < deadline:
            if time.monotonic() >= again:
                if self.is_forced:  # before each interrupt: a rank may have begun steps since
                    self._sender.send_command(
                        ForceInterrupt(number=self._sender.number), sorted(self.running)
                    )
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
        """Wait for ranks that may still raise the same error as the first rank.

        A rank that does not report its position may compute and hold the interpreter's lock.
        """
        self.wait(_SAME_S)
        deadline = time.monotonic() + _SAME_AT_MOST_S
        quiet_looks = 0
        while self.running and time.monotonic() < deadline and quiet_looks < QUIET_LOOKS:
            computing = self.positions.computing(_SAME_S)
            quiet = not computing and self.running <= self.positions.where.keys()
            quiet_looks = quiet_looks + 1 if quiet else 0
            self.running.difference_update(self._engines.dead())

    def await_reachable(self) -> None:
        """Wait until each unreachable host is back or lost."""
        while any(map(self._engines.is_unreachable, self.running.difference(self._engines.dead()))):
            self._show(POLL_S)

    def end(self, bound_s: float, *, at_once: bool = False) -> None:
        """End the cell on all ranks. Ranks that do not respond remain in `running`.

        Args:
            bound_s: the time limit. The first third is for interrupts alone.
            at_once: cancel the collectives after the first interrupt, because they cannot end.
        """
        self.running.difference_update(self._engines.dead())
        if not self.running:
            return
        deadline = time.monotonic() + bound_s
        self.is_forced = True
        self.interrupt(POLL_S if at_once else bound_s / 3)
        while self.running and time.monotonic() < deadline:  # a computing rank may wait later
            self.request_ends()
            for strategy in self._strategies:
                waiting = self.positions.waiting()
                if waiting:
                    self.abort_collectives(strategy, waiting)
                    self.interrupt(_BREAK_S)
            self.interrupt(min(_INTERRUPT_AGAIN_S, deadline - time.monotonic()))

    def request_ends(self) -> None:
        """Request the ends of the ranks again. Ranks that have not begun the cell drop it."""
        self._sender.request_status(self.running.difference(self._engines.dead()))

    def may_kill(
        self, show_message: Callable[[str], None], interrupted_again: Callable[[], bool]
    ) -> bool:
        """Return True if the user agrees to kill ranks that do not respond.

        Outside of steps, such ranks may compile.

        Args:
            show_message: shows a line to the user.
            interrupted_again: returns whether the user has interrupted again.
        """
        if not self.running:
            return False
        ranks = formatting.ranks(self.running)
        show_message(f"rank {ranks} does not respond to the interrupt: interrupt again to kill it")
        self.wait(_AGAIN_S, interrupted_again)
        return bool(self.running) and interrupted_again()

    def abort_collectives(self, strategy: StrategyName, ranks: Sequence[int]) -> None:
        """Cancel the collectives of a strategy on ranks that wait in them."""
        self._collectives.broken.add(strategy)
        self._sender.send_command(
            AbortCollectives(number=self._sender.number, strategy=strategy), ranks
        )


class StopRequests:
    """Stops a cell at the end of a step, at the same step on all ranks.

    Args:
        sender: sends to the ranks of the cell.
        cancellation: interrupts the ranks.
        live: counts the stop requests from browsers.
        show_message: shows a line to the user.
        is_step: True for a step cell.

    Attributes:
        count: the number of stop requests from browsers that were processed.
    """

    def __init__(
        self,
        sender: CellSender,
        cancellation: Cancellation,
        live: LiveRun,
        show_message: Callable[[str], None],
        *,
        is_step: bool,
    ) -> None:
        self.count = 0
        self._sender = sender
        self._cancellation = cancellation
        self._live = live
        self._show_message = show_message
        self._is_step = is_step
        self._requested_at = 0.0

    @property
    def under_way(self) -> bool:
        """True after nbdist has asked the ranks to stop."""
        return bool(self._requested_at)

    def check(self) -> bool:
        """Process a stop request from a browser.

        Returns:
            True if nbdist has asked the ranks to stop.

        Raises:
            KeyboardInterrupt: the cell has no steps, or this is the second request.
        """
        if not self.has_new_request():
            return False
        self.count = self._live.stops_requested()
        self._live.stopping()
        if time.monotonic() - self._requested_at < _SAME_STOP_S:
            return False
        if self._requested_at or not self._is_step:
            raise KeyboardInterrupt
        self.request_stop()
        return True

    def has_new_request(self) -> bool:
        """Return True if a browser has sent another request."""
        return self._live.stops_requested() > self.count

    def request_stop(self) -> None:
        """Ask the ranks to stop at the end of a step."""
        self._requested_at = time.monotonic()
        self._live.stopping()
        command = StopAfter(number=self._sender.number, step=SOON)
        self._sender.send_command(command, sorted(self._sender.running))
        self._cancellation.interrupt(_STOP_S)
        if self._sender.running:
            self._show_message("stopping at the end of a step; interrupt again to cancel the step")
