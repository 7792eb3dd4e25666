"""A cell while it runs."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from nbdist.cluster.heartbeats import Vitals
from nbdist.errors import LeftError, RanksLostError
from nbdist.execution.abandoned_collectives import LoneWaits, strategies
from nbdist.execution.cancellation import POLL_S, Cancellation
from nbdist.execution.divergence import drifted
from nbdist.execution.failures import cell_error, lone_error, lost_error, preempted_error, root
from nbdist.execution.stalls import StallMonitor
from nbdist.execution.stop_step import StopAgreement
from nbdist.records import (
    SOON,
    AnyEvent,
    Beat,
    CellEnded,
    Compiled,
    FitBegun,
    Opened,
    Output,
    Preempted,
    StepBegun,
    StopAfter,
    Stopping,
    Where,
)
from nbdist.telemetry.duplicates import Repeats
from nbdist.telemetry.frontend_request import kernel_ends
from nbdist.utils.signals import interrupt_held
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.execution.cancellation import Send
    from nbdist.execution.context import RunContext
    from nbdist.execution.resume import ResumedRun
    from nbdist.records import CellRequest, RunStatus
    from nbdist.settings import Settings
    from nbdist.views.run.cell_output import Shareable

_SAME_STOP_S = 2.0
"""Two pages may ask for the same Stop."""

_SAID_S = 1.0
"""How long the last that a process said may take to arrive."""

_STOP_S = 1.0
"""How long a Stop of steps is repeated, for ranks that are about to begin. Who begins later finds
the order."""


class CellMonitor:
    """Follows one cell on its ranks until all are done, or one has raised.

    Args:
        number: the cell's number.
        context: what it is, and where what the ranks say goes.
        worker_group: who runs it; collectives that have to be broken off are noted there.
        settings: the bounds on waiting.

    Attributes:
        running: the ranks that are in the cell; none before it is sent.
    """

    def __init__(
        self, number: int, context: RunContext, worker_group: WorkerGroup, settings: Settings
    ) -> None:
        self.running: set[int] = set()
        self._number = number
        self._host_of = context.host_of
        self._engines, self._tend = worker_group.engines, worker_group.tend
        self._view = context.view
        self._live = context.live
        self._settings = settings
        self._collectives = collectives = worker_group.collectives
        self._recorder = context.recorder
        self._opened = context.recoveries.opened
        self._vitals = Vitals(context.host_of, context.cell.options.hang_after_s)
        self._ending = Cancellation(
            number, self.running, worker_group.engines, collectives, self._show_for
        )
        self._lone = LoneWaits(self._ending, context.host_of)
        self._detached = context.cell.detached
        self._left = False
        self._repeats = Repeats()
        self._heard: queue.SimpleQueue[AnyEvent] = queue.SimpleQueue()
        self._ended: dict[int, CellEnded] = {}
        self._agreement = StopAgreement(number, self._ending.order, self._vitals.step)
        self._preempted: set[int] = set()
        self._saves = False
        self._over = False
        self._stall_monitor = StallMonitor(
            self._vitals, self._ending, worker_group.engines, context, settings
        )
        self._is_step = self._has_steps = context.cell.request.step is not None
        if self._is_step:
            self._begin_steps()  # the first batch may never come
        self._stopping_at = 0.0
        self._stops = 0
        self._killing = False
        self._asked = threading.Event()  # the kernel was interrupted
        self._heeds = True
        self._status: RunStatus = "finished"
        self._error = ""
        self._failed: CellEnded | None = None

    def hear(self, record: AnyEvent) -> None:
        """On the receiver's thread: take in what a rank says.

        Of a cell that is over, only what becomes of ranks that are left in it still matters.
        """
        fresh = self._repeats.fresh(record) if record.cell == self._number else record
        try:
            if not self._over and fresh is not None and fresh.cell == self._number:
                self._live.hear(fresh)
        finally:  # whatever becomes of what is kept, a rank that has ended is not waited for
            if fresh is not None and (not self._over or isinstance(fresh, (Where, CellEnded))):
                self._heard.put(fresh)
            if isinstance(record, CellEnded) and record.cell == self._number:
                self.running.discard(record.rank)  # last: who sees it gone finds its record

    def follow(self, request: CellRequest, send: Send) -> None:
        """Send the cell and show it until it is over.

        Args:
            request: the cell.
            send: sends it, and later orders, to ranks.

        Raises:
            CellError, WorkerError, KeyboardInterrupt: as `Cluster.run` says.
            LeftError: the cell goes on; `leave` comes next, once nothing is heard any more.
        """
        grace_s, placed = self._settings.interrupt_grace_s, self._live.placed(request)
        self._follow(request, send, lambda: self._ending.send(placed, self._host_of, grace_s))

    def expect(self, request: CellRequest, resumed: ResumedRun, ranks: Iterable[int]) -> None:
        """These ranks are in the cell, which another process has sent."""
        self.running.update(ranks)
        for rows in resumed.reports:
            self._repeats.note(rows)
            self._recorder.keep(rows)
        if resumed.begun is not None:
            self._keep(resumed.begun)

    def resume(self, request: CellRequest, send: Send, *, stopping: bool) -> None:
        """Go on with a cell that is expected to run; otherwise like `follow`.

        Args:
            request: the cell.
            send: sends orders to ranks.
            stopping: its end had been asked for.
        """
        self._follow(request, send, lambda: self._look_for(stopping=stopping))

    def leave(self) -> None:
        """Nothing is heard any more: what was is shown and kept, and the cell goes on."""
        self._drain()
        self._view.say(str(LeftError()))
        self._view.flush()
        self._live.leave()

    def _follow(self, request: CellRequest, send: Send, begin: Callable[[], None]) -> None:
        """An interrupt is raised by `_show_for` alone: anywhere else, something would be lost."""
        self._ending.begin(send, request.strategy)
        self._saves = request.saving is not None
        with interrupt_held() as self._asked:
            self._see_through(request, begin)
            if self._failed is not None and self._failed.failure is not None:
                self._asked.clear()  # the cell is over, as was asked for
                broken = self._collectives.broken
                raise cell_error(self._failed, self._ended, self._host_of, broken)

    def _see_through(self, request: CellRequest, begin: Callable[[], None]) -> None:
        try:
            self._attend(begin)
            self._failed = self._first_failure()
            self._ending.await_reachable()
            self._check_alive()  # what it met may be a death: then the others wait in vain
            self._ending.wait_for_same()
            self._ending.end(self._settings.cell_grace_s)  # they may wait for the one that failed
            self._check_alive()
            self._failed = root(self._failed, self._ended.values()) or drifted(request, self._ended)
            if self._preempted and self._failed is None:
                rank = min(self._preempted)
                name, after = self._stall_monitor.name(rank), self._stall_monitor.after(rank)
                raise preempted_error(self._preempted, name, after, saves=self._saves)
        except KeyboardInterrupt:
            self._heeds = False  # an impatient one more would leave ranks unasked
            self._ending.end(self._settings.interrupt_grace_s)
            self._killing = self._has_steps or self._ending.may_kill(
                self._view.say,
                lambda: self._asked.is_set() or self._live.stops_requested() > self._stops,
            )
            raise
        except LeftError:
            self._left = True
            self._asked.clear()  # one that comes again is for the kernel's end, too
            raise
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._heeds = False
            self._over = not self._left
            self._drain()
            ended = self._ended.values()
            self._collectives.note(request.strategy, ended, len(self._host_of))

    def end_again(self) -> None:
        """The cell is over: ranks that are left in it are told again to end it."""
        with interrupt_held():
            self._ending.end(self._settings.cell_grace_s)

    def _attend(self, begin: Callable[[], None]) -> None:
        """Until all ranks are done, or one has failed; the first interrupt is for the steps."""
        try:
            begin()
            self._new_monitor()
        except KeyboardInterrupt:
            if self.kernel_ends():
                raise LeftError from None
            self._stop_steps()
            raise
        self._drain()

    def _look_for(self, *, stopping: bool) -> None:
        """Ask who is still in the cell: what ranks said while nobody heard it may be lost."""
        self._stops = int(stopping)  # what was asked while nobody was there is still to be done
        self._ending.ask()
        if stopping:
            self._status = "stopped"
            self._ask_to_stop()

    @property
    def ends(self) -> Mapping[int, CellEnded]:
        """How each rank has ended that has."""
        return self._ended

    def kernel_ends(self) -> bool:
        """Whether an interrupt was for the kernel's end, beyond which the cell goes on."""
        return self._detached and kernel_ends(self._show_for)

    def fail(self, error: Exception) -> None:
        """The cell ends with this error."""
        self._status, self._error, self._failed = "failed", str(error), None

    def interrupted(self) -> list[int]:
        """The cell ends with an interrupt, or a second Stop: ranks that are to be killed for it."""
        self._status, self._error = "stopped" if self._stops else "interrupted", ""
        return sorted(self.running) if self._killing else []

    def _new_monitor(self) -> None:
        """Show the cell until all ranks are done, or one has failed."""
        while self.running and not self._first_failure():
            self._show_for(POLL_S)
            if self._engines.is_wanted:
                raise LeftError
            self._check_alive()
            self._tend(self._view.say)
            self._stall_monitor.check()
            self._check_lone()
            self._check_stop()
            if self._preempted and not self._stopping_at:
                self._stop_preempted()

    def _check_lone(self) -> None:
        """Who waits in a collective that a rank which has ended cannot join would do so for ever.

        Raises:
            CellError: the collectives were broken off for it.
        """
        if self._stopping_at or not (where := self._lone.found(self._ended)):
            return
        for strategy, ranks in strategies(where).items():
            self._ending.abort_collectives(strategy, ranks)
        self._ending.end(self._settings.interrupt_grace_s, at_once=True)
        raise lone_error(where, self._ended, self._host_of, self._collectives.broken)

    def _stop_preempted(self) -> None:
        """All ranks end at the same step, and save there what is to be saved."""
        ranks = formatting.ranks(self._preempted)
        self._view.say(f"rank {ranks} was told to end (SIGTERM): stopping all at the same step")
        self._ask_to_stop()
        if not self._has_steps:
            self._ending.end(self._settings.interrupt_grace_s)

    def _stop_steps(self) -> None:
        """The first interrupt ends steps on all ranks alike, however long they take.

        The next one breaks them off, as the first one does where there are none.
        """
        if self._has_steps and not self._stopping_at:
            self._ask_to_stop()
            try:
                self._new_monitor()
            except RanksLostError as lost:  # it was to end: nobody is replaced
                self._view.say(str(lost))

    def how_it_ended(self) -> tuple[RunStatus, str]:
        """And with which error, in a line."""
        failed = self._failed
        if failed is None or failed.failure is None:
            return self._status, self._error
        where = self._stall_monitor.name(failed.rank)
        return "failed", f"{failed.failure.ename} on {where}: {failed.failure.evalue}"

    def _show_for(self, seconds: float) -> None:
        """Take in what is there, waiting for at most `seconds` for the first of it.

        Raises:
            KeyboardInterrupt: the kernel was interrupted meanwhile, or before.
        """
        if self._heeds and self._asked.is_set():
            self._asked.clear()
            raise KeyboardInterrupt
        with contextlib.suppress(queue.Empty):
            self._take(self._heard.get(timeout=seconds))
        for _ in range(self._heard.qsize()):  # not what comes meanwhile: it may never end
            self._take(self._heard.get())
        if self._over:
            return
        self._agreement.seek(self._host_of.keys() - self._ended.keys())
        self._view.flush()
        for line in self._live.tick():
            self._view.say(line)

    def _drain(self) -> None:
        while not self._heard.empty():
            self._take(self._heard.get())

    def _take(self, record: AnyEvent) -> None:
        if record.cell != self._number:
            return  # of an earlier cell, or of none: it is in the logs
        self._vitals.hear(record)
        if isinstance(record, CellEnded):
            self._ended[record.rank] = record
        elif isinstance(record, Stopping):
            self._agreement.hear(record)
        elif isinstance(record, Preempted):
            self._preempted.add(record.rank)
        elif isinstance(record, Where):
            self._lone.hear(record)
            if record.rank in self.running:
                self._ending.where[record.rank] = record
        elif not isinstance(record, Beat):
            self._keep(record)
            hidden = self._collectives.broken and isinstance(record, Output)  # of breaking off
            if not (hidden or isinstance(record, (Opened, Compiled))):
                self._view.add(record)

    def _keep(self, record: Shareable | Opened | Compiled) -> None:
        self._recorder.keep(record)
        if isinstance(record, (StepBegun, FitBegun)):
            self._begin_steps()
        elif isinstance(record, Opened):
            self._opened(record)

    def _begin_steps(self) -> None:
        self._has_steps = self._stall_monitor.has_steps = True
        self._vitals.begin_steps()

    def _check_stop(self) -> None:
        """Somebody who watches asks for the end: at the end of a step, where the cell is one.

        Raises:
            KeyboardInterrupt: it is none, and what comes after its last batch has not been run; or
                the step is to be broken off, as this is the second time.
        """
        asked = self._live.stops_requested()
        if asked <= self._stops:
            return
        self._stops = asked
        self._live.stopping()
        if time.monotonic() - self._stopping_at < _SAME_STOP_S:
            return
        if self._stopping_at or not self._is_step:
            raise KeyboardInterrupt
        self._status = "stopped"
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """Ask the ranks to stop at the end of a step, the same on all."""
        self._stopping_at = time.monotonic()
        self._live.stopping()
        self._ending.order(StopAfter(number=self._number, step=SOON), sorted(self.running))
        self._ending.interrupt(_STOP_S)
        if self.running:
            self._view.say("stopping at the end of a step; interrupt again to break it off")

    def _first_failure(self) -> CellEnded | None:
        """The first end that nobody asked for; an interrupt is one that a cell may raise itself."""
        failed = ("error",) if self._ending.interrupted else ("error", "interrupted")
        return next((e for e in self._ended.values() if e.status in failed), None)

    def _check_alive(self) -> None:
        """A rank that died will never say that it ended."""
        dead = self._dead()
        if self._preempted.intersection(dead):  # it ends after it has said so, which may come later
            deadline = time.monotonic() + _SAID_S
            while (dead := self._dead()) and time.monotonic() < deadline:
                self._show_for(POLL_S)
        if dead:
            self._live.lost(dead)
            self._ending.end(self._settings.interrupt_grace_s, at_once=True)
            words = self._engines.last_words(dead[0], lines=5)
            step = self._vitals.step(dead[0])
            fate = self._engines.fate(dead[0])
            raise lost_error(dead, self._host_of, self.running, step, words, fate)

    def _dead(self) -> list[int]:
        """The ranks of the cell that are dead, and have not said that they had ended it."""
        unheard = self._host_of.keys() - self._ended.keys()
        return [rank for rank in self._engines.dead() if rank in unheard]
