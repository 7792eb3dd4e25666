"""Monitor of a cell: it processes the records of the ranks until all have ended the cell."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from nbdist.errors import LeftError, RanksLostError
from nbdist.execution.cancellation import POLL_S, Cancellation, StopRequests
from nbdist.execution.divergence import different_modules, drifted
from nbdist.execution.failures import (
    CellOutcome,
    cell_error,
    interrupt,
    preempted_error,
    root,
)
from nbdist.execution.health import RankHealth
from nbdist.execution.sending import CellSender
from nbdist.records import (
    AnyEvent,
    Beat,
    CellEnded,
    Compiled,
    Diagnose,
    FitBegun,
    Media,
    Opened,
    Output,
    Preempted,
    RankPosition,
    StepBegun,
    Stopping,
    SystemSample,
)
from nbdist.telemetry.frontend_request import kernel_ends
from nbdist.telemetry.receiver import CellStream
from nbdist.utils.signals import interrupt_held
from nbdist.utils.stop_agreement import StopAgreement
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.errors import CellInterrupt
    from nbdist.execution.context import RunContext
    from nbdist.execution.resume import ResumedRun
    from nbdist.records import CellRequest
    from nbdist.settings import Settings
    from nbdist.views.run.cell_output import Shareable


class CellMonitor:
    """Monitor of one cell, until all ranks have ended it or one has failed.

    Args:
        number: the number of the cell.
        context: the cell, its view and its storage.
        worker_group: the workers. The monitor marks cancelled collectives there.
        settings: the time limits.
    """

    def __init__(
        self,
        number: int,
        context: RunContext,
        worker_group: WorkerGroup,
        settings: Settings,
    ) -> None:
        request, view = context.cell.request, context.view
        engines, collectives, show = worker_group.engines, worker_group.collectives, self._show_for
        self._context = context
        self._worker_group = worker_group
        self._settings = settings
        self._outcome = outcome = CellOutcome(context.host_of)
        self._sender = sender = CellSender(number, worker_group.dispatcher)
        self._cancellation = cancellation = Cancellation(
            sender, request.strategy, engines, collectives, show
        )
        self._health = RankHealth(context, outcome, sender, cancellation, engines, settings, show)
        is_step = request.step is not None
        self._stops = StopRequests(
            sender, cancellation, context.live, view.show_message, is_step=is_step
        )
        self._agreement: StopAgreement | None = None
        if is_step:
            self._health.begin_steps()  # the first batch may never arrive
        self._received: queue.SimpleQueue[AnyEvent] = queue.SimpleQueue()
        self._is_over = self._may_kill = False
        self._interrupt_requested = threading.Event()  # the kernel was interrupted
        self._takes_interrupts = True
        self._stream = CellStream(worker_group.receiver, number, context.repeats)
        self._stream.subscribers.add(*context.live.subscribers, self._receive)

    def _receive(self, record: AnyEvent) -> None:
        """Queue a record on the receiver's thread. After the cell, only the ranks' ends matter."""
        if not self._is_over or isinstance(record, (RankPosition, CellEnded)):
            self._received.put(record)
        if isinstance(record, CellEnded):
            self.running.discard(record.rank)  # last: its record must be in the queue by then

    def close(self) -> None:
        """Receive no more records."""
        self._stream.close()

    @property
    def running(self) -> set[int]:
        """The ranks that run the cell; empty before nbdist sends it."""
        return self._sender.running

    @property
    def ends(self) -> Mapping[int, CellEnded]:
        """The end of each rank that has ended the cell."""
        return self._outcome.ended

    def follow(self, request: CellRequest) -> None:
        """Send the cell and show it until it is over.

        Raises:
            CellError, WorkerError, KeyboardInterrupt: see `Cluster.run`.
            LeftError: the cell continues. Call `leave` after the last record has arrived.
        """
        placed = self._context.live.placed(request)

        def send() -> None:
            try:
                self._sender.send(placed, self._context.host_of)
            except BaseException:
                self._cancellation.end(self._settings.interrupt_grace_s)
                raise

        self._follow(request, send)

    def expect(self, request: CellRequest, resumed: ResumedRun, ranks: Iterable[int]) -> None:
        """Prepare for a cell that another process has sent.

        Args:
            request: the cell.
            resumed: the stored part of the run.
            ranks: the ranks that run it.
        """
        self.running.update(ranks)
        for rows in resumed.reports:
            self._context.recorder.keep(rows)
        if resumed.begun is not None:
            self._keep(resumed.begun)

    def resume(self, request: CellRequest, *, stopping: bool) -> None:
        """Follow a cell that another process has sent; otherwise like `follow`.

        Args:
            request: the cell.
            stopping: True if its end was requested.
        """
        self._follow(request, lambda: self._request_state(stopping=stopping))

    def leave(self) -> None:
        """Show and store the records that have arrived. The cell continues."""
        self._drain()
        self._context.view.show_message(str(LeftError()))
        self._context.view.flush()
        self._context.live.leave()

    def _follow(self, request: CellRequest, begin: Callable[[], None]) -> None:
        """Follow the cell. Only `_show_for` raises interrupts: others would lose records."""
        with interrupt_held() as self._interrupt_requested:
            self._follow_to_end(request, begin)
            failed = self._outcome.failed
            if failed is not None and failed.failure is not None:
                self._interrupt_requested.clear()  # the cell is over, as requested
                raise cell_error(
                    failed, self.ends, self._context.host_of, self._cancellation.broken
                )

    def _follow_to_end(self, request: CellRequest, begin: Callable[[], None]) -> None:
        left = False
        try:
            self._watch(begin)
            self._find_failure(request)
        except KeyboardInterrupt:
            self._takes_interrupts = False  # another one could leave ranks without a command
            self._cancellation.end(self._settings.interrupt_grace_s)
            self._may_kill = self._health.has_steps or self._cancellation.may_kill(
                self._context.view.show_message,
                lambda: self._interrupt_requested.is_set() or self._stops.has_new_request(),
            )
            raise
        except LeftError:
            left = True
            self._interrupt_requested.clear()  # another interrupt also belongs to the kernel's end
            raise
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._takes_interrupts = False
            if not left:
                self._is_over = True
                self._stream.subscribers.remove(*self._context.live.subscribers)
            self._drain()
            self._worker_group.collectives.note(
                request.strategy, self.ends.values(), len(self._context.host_of)
            )

    def _find_failure(self, request: CellRequest) -> None:
        """Find the failure of the cell, and end it on the other ranks.

        Raises:
            RanksLostError: a rank died.
            PreemptedError: ranks received SIGTERM.
        """
        outcome = self._outcome
        outcome.failed = self._first_failure()
        self._cancellation.await_reachable()
        self._health.check_alive()  # after a death, the other ranks wait forever
        self._cancellation.wait_for_same()
        # Ranks may wait for the one that failed.
        self._cancellation.end(self._settings.cell_grace_s)
        self._health.check_alive()
        outcome.failed = (
            different_modules(self.ends)
            or root(outcome.failed, self.ends.values())
            or drifted(request, self.ends)
        )
        if outcome.preempted and outcome.failed is None:
            rank = min(outcome.preempted)
            name, after = outcome.name(rank), self._health.after(rank)
            saves = request.saving is not None
            raise preempted_error(outcome.preempted, name, after, saves=saves)

    def end_again(self) -> None:
        """End the cell on ranks that still run it, after it is over."""
        with interrupt_held():
            self._cancellation.end(self._settings.cell_grace_s)

    def _watch(self, begin: Callable[[], None]) -> None:
        """Follow the cell until its end. The first interrupt stops steps."""
        try:
            begin()
            self._show_until_end()
        except KeyboardInterrupt:
            if self.kernel_ends():
                raise LeftError from None
            self._stop_steps()
            raise
        self._drain()

    def _request_state(self, *, stopping: bool) -> None:
        """Ask which ranks run the cell: records without a receiver may be lost."""
        self._stops.count = int(stopping)  # no process has answered other requests yet
        self._cancellation.request_ends()
        if stopping:
            self._outcome.stop()
            self._stops.request_stop()

    def kernel_ends(self) -> bool:
        """Return True if an interrupt belonged to the kernel's end. The cell survives it."""
        return self._context.cell.detached and kernel_ends(self._show_for)

    def fail(self, error: Exception) -> None:
        """End the cell with this error."""
        self._outcome.fail(error)

    def interrupted(self) -> list[int]:
        """Set the status after an interrupt or a second stop request. Return the ranks to kill."""
        self._outcome.stop(requested=bool(self._stops.count))
        return sorted(self.running) if self._may_kill else []

    @property
    def is_stopped(self) -> bool:
        """True if the cell ended without an error because a stop was requested."""
        return self._outcome.summary()[0] == "stopped"

    def interrupt(self, killed: Collection[int]) -> CellInterrupt:
        """Return the interrupt to raise for the user.

        Args:
            killed: the ranks that nbdist kills.
        """
        step = max(map(self._health.heartbeats.step, self._context.host_of))
        saves = self._context.cell.request.saving is not None
        forced = self._cancellation.is_forced
        return interrupt(self.ends.values(), step, killed, forced=forced, saves=saves)

    def close_live(self) -> tuple[str, ...]:
        """End the stored run. Return messages for the user."""
        return self._context.live.end(*self._outcome.summary())

    def _show_until_end(self) -> None:
        """Show the cell until all ranks have ended it, or one has failed."""
        while self.running and not self._first_failure():
            self._show_for(POLL_S)
            if self._worker_group.engines.is_requested:
                raise LeftError
            self._health.check_alive()
            self._worker_group.maintain(self._context.view.show_message)
            self._health.check_progress()
            self._request_stacks()
            if not self._stops.under_way:
                self._health.check_collectives()
            if self._stops.check():
                self._outcome.stop()
            if self._outcome.preempted and not self._stops.under_way:
                self._stop_preempted()

    def _request_stacks(self) -> None:
        """Request the stacks that browsers ask for. The run's directory stores the answers."""
        ranks = self._context.live.stacks_requested() & self.running
        if ranks:
            self._sender.send_command(
                Diagnose(number=self._sender.number, threads=True), sorted(ranks)
            )

    def _stop_preempted(self) -> None:
        """Stop all ranks at the same step, and save the state there."""
        ranks = formatting.ranks(self._outcome.preempted)
        self._context.view.show_message(
            f"rank {ranks} received SIGTERM: stopping all ranks at the same step"
        )
        self._stops.request_stop()
        if not self._health.has_steps:
            self._cancellation.end(self._settings.interrupt_grace_s)

    def _stop_steps(self) -> None:
        """Stop a cell with steps at the same step on all ranks. Wait for their ends.

        Another interrupt cancels the step. A cell without steps is cancelled at once.
        """
        if self._health.has_steps and not self._stops.under_way:
            self._stops.request_stop()
            try:
                self._show_until_end()
            except RanksLostError as lost:  # the run ends anyway: nbdist replaces no rank
                self._context.view.show_message(str(lost))

    def _show_for(self, seconds: float) -> None:
        """Process records. Wait for at most `seconds` for the first one.

        Raises:
            KeyboardInterrupt: the kernel was interrupted before the call.
        """
        if self._takes_interrupts and self._interrupt_requested.is_set():
            self._interrupt_requested.clear()
            raise KeyboardInterrupt
        with contextlib.suppress(queue.Empty):
            self._process(self._received.get(timeout=seconds))
        for _ in range(self._received.qsize()):  # records that arrive meanwhile may never end
            self._process(self._received.get())
        if self._is_over:
            return
        if self._agreement is not None:
            self._agreement.send_agreed_step(self._context.host_of.keys() - self.ends.keys())
        self._context.view.flush()
        self._context.live.tick()

    def _drain(self) -> None:
        while not self._received.empty():
            self._process(self._received.get())

    def _process(self, record: AnyEvent) -> None:
        self._health.receive(record)
        if isinstance(record, CellEnded):
            self._outcome.ended[record.rank] = record
        elif isinstance(record, Stopping):
            if self._agreement is None:
                self._agreement = StopAgreement(self._sender, self._health.heartbeats.step)
            self._agreement.receive(record)
        elif isinstance(record, Preempted):
            self._outcome.preempted.add(record.rank)
        elif not isinstance(record, (Beat, Media, RankPosition, SystemSample)):
            self._keep(record)
            # Cancelled collectives write to the ranks' output.
            hidden = self._cancellation.broken and isinstance(record, Output)
            if not (hidden or isinstance(record, (Opened, Compiled))):
                self._context.view.add(record)

    def _keep(self, record: Shareable | Opened | Compiled) -> None:
        self._context.recorder.keep(record)
        if isinstance(record, (StepBegun, FitBegun)):
            self._health.begin_steps()
        elif isinstance(record, Opened):
            self._context.recoveries.opened(record)

    def _first_failure(self) -> CellEnded | None:
        return self._outcome.first_failure(interrupted=self._cancellation.interrupted)
