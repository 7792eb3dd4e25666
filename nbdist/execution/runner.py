"""Runner of cells on a worker group, with the recovery of runs that have lost ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.cells.rank_comparison import differing_generators
from nbdist.cluster.handover import controllers_of, of_worker_group
from nbdist.errors import (
    LeftError,
    NbdistError,
    PreemptedError,
    RanksLostError,
    ReplayError,
    StartError,
    WorkerError,
)
from nbdist.execution.context import RunContext
from nbdist.execution.live_run import NullRun
from nbdist.execution.module_sync import ModuleSync
from nbdist.execution.monitor import CellMonitor
from nbdist.execution.recorder import Recorder
from nbdist.execution.recovery import Recovery, RecoveryLog
from nbdist.execution.result import Run
from nbdist.records import RunningCell
from nbdist.telemetry.receiver import Repeats
from nbdist.utils.signals import interrupt_held
from nbdist.views import formatting
from nbdist.views.run.cell_output import SilentView
from nbdist.worker.checkpoint.folder import names_in
from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from nbdist.cells.dependencies import Entry
    from nbdist.cluster.handover import HandoverFile
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.errors import CellInterrupt
    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.replay_journal import Journal
    from nbdist.execution.resume import ResumedRun
    from nbdist.records import CellEnded, CellRequest
    from nbdist.settings import Settings
    from nbdist.views.cluster.workers import StartView
    from nbdist.views.run.cell_output import View


class Alignment:
    """Last reported states of the ranks' random generators.

    Attributes:
        states: states of rank 0, packed; empty if they are unknown.
    """

    def __init__(self) -> None:
        self.states = b""
        self._digests: dict[int, dict[str, int]] = {}

    def forget(self) -> None:
        """Drop all states, after nbdist has seeded the ranks again."""
        self._digests, self.states = {}, b""

    def note(self, ended: Mapping[int, CellEnded]) -> None:
        """Store the states of the generators of the ranks that ran a cell."""
        for rank, end in ended.items():
            if end.generators:
                self._digests[rank] = end.generators
                self.states = end.generator_states or self.states

    def due(self, ranks: Collection[int], world_size: int) -> tuple[bytes, str]:
        """Return the states that the ranks of a cell must restore first, and a message.

        Args:
            ranks: the ranks of the cell.
            world_size: the number of ranks of the cluster.

        Returns:
            Rank 0's states, packed, and the message; both empty if all ranks have equal states or
            the cell does not run on all ranks.
        """
        if len(ranks) < world_size or not self.states or 0 not in self._digests:
            return b"", ""
        message = differing_generators(self._digests)
        return (self.states, message) if message else (b"", "")


_INTERRUPTED = "run %dist_restart for new workers, or run the cell again with --resume"
_READS_CHECKPOINTS = ("orbax.checkpoint",)
"""Modules that spares import in advance. The import takes 0.35 s."""


class Runner:
    """Runner of cells, one at a time.

    Args:
        worker_group: the workers.
        journal: the earlier cells and pushed objects.
        handover: stores the state that a successor of this process needs.
        settings: the time limits.

    Attributes:
        number: the number of the last cell that was sent, from 1.
        stuck: the ranks that did not respond to the cancellation of a step. They must be killed.
        last_run: the result of the last cell, also if it failed.
        evaluate: runs an expression on all ranks, for `Run.export`.
        modules: the user's own modules on the workers.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        journal: Journal,
        handover: HandoverFile,
        settings: Settings,
    ) -> None:
        self.number = handover.handover.cells
        self.last_run = Run(0)
        self.evaluate: Callable[[str], object] | None = None
        self._worker_group = worker_group
        self._journal = journal
        self._handover = handover
        self._settings = settings
        self.modules = ModuleSync(worker_group)
        self._recovery = Recovery(
            worker_group, journal, handover, self.modules, self._run_again, settings.replace_wait_s
        )
        self._monitors: tuple[CellMonitor, ...] = ()
        self.alignment = Alignment()
        self._fits: dict[int, bytes] = {}
        self.stuck: list[int] = []

    @property
    def is_recovery_interrupted(self) -> bool:
        """True if a recovery of the workers was interrupted."""
        return self._handover.handover.loss is not None

    def refuse_unready(self, ranks: Sequence[int]) -> None:
        """Raise WorkerError if one of these ranks is dead or cannot run a cell."""
        if self.is_recovery_interrupted:
            raise WorkerError(f"recovery was interrupted, some workers are missing: {_INTERRUPTED}")
        self._worker_group.engines.refuse_dead(ranks)
        busy = [rank for rank in ranks if rank in self.busy()]
        if busy:
            raise WorkerError(
                f"rank {formatting.ranks(busy)} is still in an earlier cell: wait for it "
                "(%dist_status), or run %dist_restart for new workers"
            )

    def settle(self) -> None:
        """End earlier cells on ranks that still run them, and check the collectives."""
        for monitor in self._monitors:
            monitor.end_again()
        if not self.unavailable():
            self._worker_group.collectives.check()

    def busy(self) -> frozenset[int]:
        """Return the ranks that run a cell."""
        return frozenset().union(*(frozenset(monitor.running) for monitor in self._monitors))

    def unavailable(self) -> list[int]:
        """Return the ranks that are dead or still run an earlier cell."""
        return sorted({*self._worker_group.engines.dead(), *self.busy()})

    def forget(self) -> None:
        """Reset the state of the ranks, after their engines were replaced."""
        self._keep_monitors()
        self.stuck = []
        self.alignment.forget()

    def _keep_monitors(self, *monitors: CellMonitor) -> None:
        """Keep only these monitors, and close the others."""
        for monitor in self._monitors:
            if monitor not in monitors:
                monitor.close()
        self._monitors = monitors

    def check_replayable(self, request: CellRequest) -> None:
        """Raise ReplayError if the inputs of a run cannot be created again on fresh workers."""
        self._needed(request)

    def _needed(self, request: CellRequest) -> list[Entry]:
        saved = names_in(Path(request.saving.folder)) if request.saving else ()
        return self._recovery.needed(request, saved).entries

    def recreate_inputs(self, request: CellRequest, phases: StartView) -> None:
        """Create the inputs of a run again on fresh workers, before it resumes.

        Raises:
            ReplayError: an input cannot be created again.
        """
        self.modules.find(request.source)
        self._recovery.recreate_inputs(phases, self._needed(request))

    def send_modules(self, names: Sequence[str], ranks: Sequence[int]) -> None:
        """Send those of these modules that are the user's own, before objects that need them.

        Raises:
            UsageError, TransferError: a file cannot be read, sent or stored.
            WorkerError: one of the ranks is dead, or still runs a cell.
        """
        self.refuse_unready(ranks)
        self.modules.find_named(names)
        self.modules.send(ranks)

    def run(self, cell: RunningCell, view: View, live: LiveRun, host_of: Mapping[int, str]) -> None:
        """Run a cell to its end. Recover its run after losses of ranks.

        Args:
            cell: the cell. The runner sets its number.
            view: shows the records of the ranks.
            live: stores the records of the ranks.
            host_of: the host of each rank that runs the cell.

        Raises:
            CellError, WorkerError, KeyboardInterrupt: see `Cluster.run`.
            LeftError: the cell continues, and another process follows it.
        """
        run = self.number + 1
        cell = structs.replace(cell, request=structs.replace(cell.request, run=run))
        recorder = Recorder(run, is_step=cell.request.step is not None)
        recoveries = RecoveryLog(
            recorder, live, view, self._handover, cell.options.max_heals, self._pids
        )
        saving = cell.request.saving
        if saving is not None and saving.resume:
            recoveries.saved = names_in(Path(saving.folder))
            self._handover.opened(recoveries.saved)
        context = RunContext(cell, view, live, host_of, recorder, recoveries, Repeats())
        monitor = self._new_monitor(context)
        sending = self._sending(context, monitor, cell.request)

        def send() -> None:
            self._require_names(cell.request, recoveries.saved)
            sending()

        self._finish(context, monitor, self._resume_recovery() or send)
        source = cell.request.source
        if "keras" in source and "KERAS_BACKEND" not in source:
            self._worker_group.use_keras()

    def expect(
        self, cell: RunningCell, resumed: ResumedRun, view: View, host_of: Mapping[int, str]
    ) -> Callable[[], None]:
        """Prepare to follow a cell that another process has sent.

        Args:
            cell: the cell.
            resumed: the stored part of the run.
            view: shows the records of the ranks.
            host_of: the host of each rank that runs the cell.

        Returns:
            A function that follows the cell to its end. It raises the same errors as `run`.
        """
        recorder = Recorder(cell.request.number, is_step=cell.request.step is not None)
        recoveries = RecoveryLog(
            recorder, resumed.live, view, self._handover, cell.options.max_heals, self._pids
        )
        for recovery in resumed.recoveries:
            recorder.recovered(recovery)
        recoveries.take_over(cell, resumed)
        repeats = Repeats(resumed.reports)
        context = RunContext(cell, view, resumed.live, host_of, recorder, recoveries, repeats)
        self.number = cell.request.number - 1
        monitor = self._new_monitor(context)
        resume_recovery = self._resume_recovery()
        monitor.expect(cell.request, resumed, () if resume_recovery else host_of)
        if resumed.begun is not None:
            view.resume(resumed.begun)

        def resume() -> None:
            monitor.resume(cell.request, stopping=resumed.stopping)

        return lambda: self._finish(context, monitor, resume_recovery or resume)

    def _resume_recovery(self) -> Callable[[], None] | None:
        """Return a call that restarts an interrupted recovery, or None."""
        loss = self._handover.handover.loss
        if loss is None:
            return None

        def lose() -> None:
            raise RanksLostError(loss.ranks, loss.reason, ": run %dist_restart for new workers")

        return lose

    def _finish(
        self, context: RunContext, monitor: CellMonitor, follow: Callable[[], None]
    ) -> None:
        request, left = context.cell.request, False
        try:
            while True:
                try:
                    follow()
                except (RanksLostError, PreemptedError) as ended:
                    lost = self._lost(ended, request)
                    monitor.fail(lost)
                    request = self._recovered(request, lost, context, monitor)
                    self._handover.update(**controllers_of(self._worker_group))
                    context = self._shrunk(context)
                    monitor = self._new_monitor(context)
                    follow = self._sending(context, monitor, request)
                else:
                    if monitor.is_stopped:
                        context.view.show_message(str(monitor.interrupt(())))
                    return
        except LeftError:
            left = True
            raise
        except KeyboardInterrupt:
            raise self._interrupted(context, monitor) from None
        finally:
            with interrupt_held():
                self.last_run = replace(
                    context.recorder.run(), state=context.live.state, evaluate=self.evaluate
                )
                self.alignment.note(monitor.ends)
                self._fits = {rank: end.fits for rank, end in monitor.ends.items() if end.fits}
                if left:
                    self._worker_group.close_sockets()
                    monitor.leave()
                else:
                    self._close(context, monitor)

    def _interrupted(self, context: RunContext, monitor: CellMonitor) -> CellInterrupt:
        """Show the consequence of an interrupt if it is not only the end of the cell.

        Returns:
            The interrupt to raise.
        """
        stuck = monitor.interrupted()
        if self.is_recovery_interrupted:
            context.view.show_message(
                f"interrupted during the replacement of workers: {_INTERRUPTED}"
            )
        elif stuck:
            self.stuck = stuck
            named = formatting.ranks(self.stuck)
            context.view.show_message(
                f"rank {named} does not respond: nbdist kills it and restarts all workers"
            )
        return monitor.interrupt(stuck)

    def _close(self, context: RunContext, monitor: CellMonitor) -> None:
        messages = monitor.close_live()
        self.last_run = replace(self.last_run, state=context.live.state)
        try:
            context.view.close(self.last_run, messages)
        finally:
            context.live.close()

    def _sending(
        self, context: RunContext, monitor: CellMonitor, request: CellRequest
    ) -> Callable[[], None]:
        """Return a function that sends the cell, with the monitor's number, and follows it."""
        states, message = self.alignment.due(context.cell.ranks, self._worker_group.world_size)
        sent = structs.replace(request, number=self.number, generators=states or request.generators)

        def follow() -> None:
            self._require_all(request)
            self.modules.send(tuple(context.host_of))
            if message and request.options.seed is None:
                context.view.show_message(message)
            self._handover.sent(sent, **of_worker_group(self._worker_group))
            if context.cell.detached:
                self._worker_group.detach(on=True)
            if sent.saving is not None:
                self._worker_group.warm_spares(_READS_CHECKPOINTS)
            now = structs.replace(sent, seconds=context.recoveries.begin_steps())
            monitor.follow(now)

        return follow

    def _require_all(self, request: CellRequest) -> None:
        """Raise RanksLostError for ranks that died between cells or still run an earlier one."""
        if request.saving is None:
            return
        lost = self.unavailable()
        if lost or request.strategy in self._worker_group.collectives.broken:
            named = f"rank {formatting.ranks(lost)} died" if lost else "collectives are broken"
            raise RanksLostError(lost, named, ": run %dist_restart for new workers")

    def _require_names(self, request: CellRequest, saved: Sequence[str]) -> None:
        """Raise RanksLostError if saved names are missing on a rank and can be created again.

        A failed step may have deleted the arrays that it donated. The recovery restores them.
        """
        if not saved or self.unavailable() or not self._worker_group.engines.can_restart():
            return
        try:
            lacking = self._worker_group.engines.apply(transfer.missing, saved)
        except WorkerError:  # the next check reports a rank that died meanwhile
            return
        gone = sorted({*itertools.chain(*lacking)})
        if gone and self._recovery.can_recreate(gone, request, saved):
            names = ", ".join(f"`{name}`" for name in gone)
            raise RanksLostError((), f"{names} missing after a failed step")

    def _new_monitor(self, context: RunContext) -> CellMonitor:
        self.number += 1
        monitor = CellMonitor(self.number, context, self._worker_group, self._settings)
        self._keep_monitors(*(w for w in self._monitors if w.running), monitor)
        return monitor

    def _lost(self, ended: RanksLostError | PreemptedError, request: CellRequest) -> RanksLostError:
        """Return the loss to recover. Preempted ranks are lost if a scheduler requeues their job.

        Raises:
            PreemptedError: the run has no checkpoint, or the job is not queued again.
        """
        if isinstance(ended, RanksLostError):
            return ended
        if request.saving is None or not self._worker_group.engines.places.will_be_requeued(
            ended.ranks
        ):
            raise ended
        named = (
            f"rank {formatting.ranks(ended.ranks)} received SIGTERM, and its job is queued again"
        )
        return RanksLostError(ended.ranks, named, ": run %dist_restart for new workers")

    def _recovered(
        self, request: CellRequest, lost: RanksLostError, context: RunContext, monitor: CellMonitor
    ) -> CellRequest:
        """Recover the ranks, and return the cell that resumes the run.

        Raises:
            RanksLostError: the run cannot be recovered, or `--max-heals` forbids it.
            LeftError: another process continues the recovery.
        """
        recoveries = context.recoveries
        while True:
            if request.saving is None or not recoveries.may_begin(lost):
                raise lost
            self._keep_monitors()
            recoveries.begin(lost)
            try:
                self._recovery.recover(lost, request, recoveries.saved)
                self.alignment.forget()
                break
            except LeftError:
                raise
            except KeyboardInterrupt:
                if monitor.kernel_ends():
                    raise LeftError from None
                raise
            except NbdistError as error:
                dead = self._worker_group.engines.dead()
                if not dead or isinstance(error, (ReplayError, StartError)):
                    lost.add_note(f"nbdist cannot recover the run: {error}")
                    raise lost from error
                named = f"rank {formatting.ranks(dead)} died during the recovery"
                lost = RanksLostError(dead, named, ": run %dist_restart for new workers")
        saving = structs.replace(
            request.saving, resume=request.saving.resume or recoveries.has_opened
        )
        # Without a checkpoint, the run begins again.
        generators = self._journal.generators() or request.generators
        return structs.replace(request.with_options(saving=saving), generators=generators)

    def _shrunk(self, context: RunContext) -> RunContext:
        """Return the context with the remaining ranks, if a recovery left out some."""
        if self._worker_group.world_size == len(context.host_of):
            return context
        host_of = {rank: hello.host for rank, hello in self._worker_group.hellos.items()}
        self._handover.shrunk(tuple(host_of))
        context.view.shrink(host_of)
        return context._replace(host_of=host_of)

    def add_to_journal(self, cell: RunningCell | None, failed: bool) -> None:
        """Add the last cell to the journal. For the arguments see `Journal.add_cell`."""
        self._journal.add_cell(
            cell,
            self.last_run,
            failed,
            generators=self.alignment.states,
            fits=self._fits,
            modules=self.modules.digests(),
        )

    def _pids(self) -> dict[int, int]:
        return {rank: hello.pid for rank, hello in self._worker_group.hellos.items()}

    def _run_again(self, request: CellRequest, ranks: Sequence[int]) -> None:
        """Run an earlier cell again for the names that it binds, without output.

        Raises:
            CellError, WorkerError: see `Cluster.run`.
        """
        self.number += 1
        request = request.with_options(saving=None, detach=False, hang_after_s=0.0)
        again = structs.replace(request, number=self.number, replays=True)
        cell = RunningCell(request=again, ranks=tuple(ranks))
        view, live = SilentView(), NullRun("")
        recorder = Recorder(self.number, is_step=False)
        recoveries = RecoveryLog(recorder, live, view, self._handover, 0, self._pids)
        hosts = {rank: self._worker_group.hellos[rank].host for rank in ranks}
        context = RunContext(cell, view, live, hosts, recorder, recoveries, Repeats())
        monitor = CellMonitor(self.number, context, self._worker_group, self._settings)
        self._keep_monitors(monitor)
        monitor.follow(again)
