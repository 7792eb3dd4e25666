"""Runs cells on a crew, and heals a run that has lost ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.cluster.takeover import controllers_of, of_crew
from nbdist.errors import (
    LeftError,
    NbdistError,
    PreemptedError,
    RanksLostError,
    ReplayError,
    StartError,
    WorkerError,
)
from nbdist.execution.context import Task
from nbdist.execution.monitor import CellWatch
from nbdist.execution.null_run import UnkeptRun
from nbdist.execution.recorder import Recorder
from nbdist.execution.recovery import Healer
from nbdist.execution.recovery_log import Heals
from nbdist.execution.result import Run
from nbdist.execution.rng_alignment import Alignment
from nbdist.records import CellUnderWay
from nbdist.utils.signals import interrupt_held
from nbdist.views import formatting
from nbdist.views.run.null_output import SilentView
from nbdist.worker.checkpoint.folder import names_in
from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.cells.dependencies import Entry
    from nbdist.cluster.handover import EstateFile
    from nbdist.cluster.worker_group import Crew
    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.replay_journal import Journal
    from nbdist.execution.resume import Former
    from nbdist.records import CellRequest, Speech
    from nbdist.settings import Settings
    from nbdist.views.cluster.start_progress import StartView
    from nbdist.views.run.cell_output import View

_HALFWAY = "type %dist_restart for new ones, or run it again with --resume"
_READS_CHECKPOINTS = ("orbax.checkpoint",)
"""What a spare needs when it takes a place, and takes 0.35 s to import."""


class Runner:
    """Runs cells, one at a time.

    Args:
        crew: who runs them.
        journal: what was done to them before.
        estate: keeps what another process needs that comes in the place of this one.
        settings: the bounds on waiting.

    Attributes:
        number: of the last cell that was sent; they count from 1.
        stuck: the ranks that are left in steps which were broken off: only their end helps.
        last_run: the cell that ran last, also when it failed.
    """

    def __init__(
        self, crew: Crew, journal: Journal, estate: EstateFile, settings: Settings
    ) -> None:
        self.number = estate.estate.cells
        self.last_run = Run(0)
        self._crew = crew
        self._journal = journal
        self._estate = estate
        self._settings = settings
        self._healer = Healer(crew, journal, estate, self._run_again, settings.replace_wait_s)
        self._watches: tuple[CellWatch, ...] = ()
        self._alignment = Alignment()
        self.stuck: list[int] = []

    @property
    def is_halfway(self) -> bool:
        """Whether the workers are as a heal has left them that was broken off."""
        return self._estate.estate.loss is not None

    def refuse_unready(self, ranks: Sequence[int]) -> None:
        """Raises WorkerError where one of these ranks is dead, or can take no cell."""
        if self.is_halfway:
            raise WorkerError(f"the workers are not whole: {_HALFWAY}")
        self._crew.engines.refuse_dead(ranks)
        busy = [rank for rank in ranks if rank in self.busy()]
        if busy:
            raise WorkerError(
                f"rank {formatting.ranks(busy)} is still in an earlier cell: wait for it "
                "(%dist_status), or type %dist_restart for new workers"
            )

    def settle(self) -> None:
        """Ranks that are left in a cell of before end it; collectives out of step are found."""
        for watch in self._watches:
            watch.end_again()
        if not self.gone():
            self._crew.collectives.check()

    def busy(self) -> frozenset[int]:
        """The ranks that are in a cell."""
        return frozenset().union(*(frozenset(watch.running) for watch in self._watches))

    def gone(self) -> list[int]:
        """The ranks that are dead, or stuck in a cell of before."""
        return sorted({*self._crew.engines.dead(), *self.busy()})

    def hear(self, record: Speech) -> None:
        """On the receiver's thread: tell whoever follows a cell."""
        for watch in self._watches:
            watch.hear(record)

    def forget(self) -> None:
        """The engines are others: nobody is in a cell any more."""
        self._watches, self.stuck = (), []
        self._alignment.forget()

    def refuse_unmade(self, request: CellRequest) -> None:
        """Raises ReplayError where fresh workers cannot be made to have what a run needs."""
        self._needed(request)

    def _needed(self, request: CellRequest) -> list[Entry]:
        saved = names_in(Path(request.saving.folder)) if request.saving else ()
        return self._journal.needed(request, saved, self._crew.world_size)

    def make_again(self, request: CellRequest, phases: StartView) -> None:
        """Have fresh workers do what a run needs that goes on from its checkpoints.

        Raises:
            ReplayError: something cannot be done again.
        """
        self._healer.make_again(phases, self._needed(request))

    def run(
        self, cell: CellUnderWay, view: View, live: LiveRun, host_of: Mapping[int, str]
    ) -> None:
        """Run a cell to its end, however often it has to be healed for that.

        Args:
            cell: what is run; its number is set here.
            view: shows what the ranks say.
            live: keeps what they report.
            host_of: the host of each rank that runs it.

        Raises:
            CellError, WorkerError, KeyboardInterrupt: as `Cluster.run` says.
            LeftError: it goes on, and another process follows it.
        """
        recorder = Recorder(self.number + 1, is_step=cell.request.step is not None)
        heals = Heals(recorder, live, view, self._estate, cell.options.max_heals, self._pids)
        saving = cell.request.saving
        if saving is not None and saving.resume:
            heals.saved = names_in(Path(saving.folder))
            self._estate.opened(heals.saved)
        task = Task(cell, view, live, host_of, recorder, heals)
        watch = self._watch(task)
        sending = self._sending(task, watch, cell.request)

        def send() -> None:
            self._require_names(cell.request, heals.saved)
            sending()

        self._finish(task, watch, self._losing() or send)
        source = cell.request.source
        if "keras" in source and "KERAS_BACKEND" not in source:
            self._crew.use_keras()

    def expect(
        self, cell: CellUnderWay, former: Former, view: View, host_of: Mapping[int, str]
    ) -> Callable[[], None]:
        """The ranks are in a cell that another process has sent: what they say counts from here.

        Args:
            cell: which.
            former: what was kept of it.
            view: shows what the ranks say.
            host_of: the host of each rank that runs it.

        Returns:
            What follows it to its end; it raises as `run` does.
        """
        recorder = Recorder(cell.request.number, is_step=cell.request.step is not None)
        heals = Heals(recorder, former.live, view, self._estate, cell.options.max_heals, self._pids)
        for heal in former.heals:
            recorder.healed(heal)
        heals.take_over(cell, former)
        task = Task(cell, view, former.live, host_of, recorder, heals)
        self.number = cell.request.number - 1
        watch = self._watch(task)
        losing = self._losing()
        watch.expect(cell.request, former, () if losing else host_of)
        if former.begun is not None:
            view.resume(former.begun)

        def resume() -> None:
            send = self._crew.dispatcher.send
            watch.resume(cell.request, send, stopping=former.stopping)

        return lambda: self._finish(task, watch, losing or resume)

    def _losing(self) -> Callable[[], None] | None:
        """What says that a heal was not brought to its end, and so begins it anew, if it is so."""
        loss = self._estate.estate.loss
        if loss is None:
            return None

        def lose() -> None:
            raise RanksLostError(loss.ranks, loss.reason, ": type %dist_restart for new workers")

        return lose

    def _finish(self, task: Task, watch: CellWatch, follow: Callable[[], None]) -> None:
        request, left = task.cell.request, False
        try:
            while True:
                try:
                    follow()
                except (RanksLostError, PreemptedError) as ended:
                    lost = self._lost(ended, request)
                    watch.fail(lost)
                    request = self._healed(request, lost, task, watch)
                    self._estate.update(**controllers_of(self._crew))
                    task = self._shrunk(task)
                    watch = self._watch(task)
                    follow = self._sending(task, watch, request)
                else:
                    return
        except LeftError:
            left = True
            raise
        except KeyboardInterrupt:
            stuck = watch.interrupted()
            if self.is_halfway:
                task.view.say(f"interrupted while workers were replaced: {_HALFWAY}")
            elif stuck:
                self.stuck = stuck
                named = formatting.ranks(self.stuck)
                task.view.say(f"rank {named} heeds nothing: it is killed, and all workers are new")
            raise
        finally:
            with interrupt_held():
                self.last_run = task.recorder.run()
                self._alignment.note(watch.ends)
                if left:
                    self._crew.close_sockets()
                    watch.leave()
                else:
                    self._close(task, watch)

    def _close(self, task: Task, watch: CellWatch) -> None:
        said = task.live.end(*watch.how_it_ended())
        try:
            task.view.close(self.last_run._repr_mimebundle_, said)
        finally:
            task.live.close()

    def _sending(self, task: Task, watch: CellWatch, request: CellRequest) -> Callable[[], None]:
        """What sends the cell, with the number that is the watch's, and follows it."""
        states, said = self._alignment.due(task.cell.ranks, self._crew.world_size)
        sent = structs.replace(request, number=self.number, generators=states)

        def follow() -> None:
            self._require_all(request)
            if said and request.options.seed is None:
                task.view.say(said)
            self._estate.sent(sent, **of_crew(self._crew))
            if task.cell.detached:
                self._crew.detach(on=True)
            if sent.saving is not None:
                self._crew.warm_spares(_READS_CHECKPOINTS)
            now = structs.replace(sent, seconds=task.heals.begin_steps())
            watch.follow(now, self._crew.dispatcher.send)

        return follow

    def _require_all(self, request: CellRequest) -> None:
        """Raises RanksLostError for ranks that died between cells, or are stuck in one before."""
        if request.saving is None:
            return
        lost = self.gone()
        if lost or request.strategy in self._crew.collectives.broken:
            named = f"rank {formatting.ranks(lost)} died" if lost else "collectives are broken"
            raise RanksLostError(lost, named, ": type %dist_restart for new workers")

    def _require_names(self, request: CellRequest, saved: Sequence[str]) -> None:
        """Raises RanksLostError where names are gone that can be made again, to be restored then.

        A step that failed may have taken its arrays along.
        """
        if not saved or self.gone() or not self._crew.engines.can_restart():
            return
        try:
            lacking = self._crew.engines.apply(transfer.missing, saved)
        except WorkerError:  # who died meanwhile is found next
            return
        gone = sorted({*itertools.chain(*lacking)})
        if gone and self._healer.can_make(gone, request, saved):
            names = ", ".join(f"`{name}`" for name in gone)
            raise RanksLostError((), f"{names} went with a step that failed")

    def _watch(self, task: Task) -> CellWatch:
        self.number += 1
        watch = CellWatch(self.number, task, self._crew, self._settings)
        self._watches = (*(w for w in self._watches if w.running), watch)
        return watch

    def _lost(self, ended: RanksLostError | PreemptedError, request: CellRequest) -> RanksLostError:
        """Ranks that were told to end are lost where a scheduler gives their hosts once more.

        Raises:
            PreemptedError: it does not.
        """
        if isinstance(ended, RanksLostError):
            return ended
        if request.saving is None or not self._crew.engines.places.are_given_again(ended.ranks):
            raise ended
        named = f"rank {formatting.ranks(ended.ranks)} was told to end, and its job is queued again"
        return RanksLostError(ended.ranks, named, ": type %dist_restart for new workers")

    def _healed(
        self, request: CellRequest, lost: RanksLostError, task: Task, watch: CellWatch
    ) -> CellRequest:
        """What is to be run instead, by ranks that are all there again.

        Raises:
            RanksLostError: it may not be healed, or cannot.
            LeftError: another process begins it anew.
        """
        heals = task.heals
        while True:
            if request.saving is None or not heals.may_begin(lost):
                raise lost
            self._watches = ()
            heals.begin(lost)
            try:
                self._healer.heal(lost, request, heals.saved)
                self._alignment.forget()
                break
            except LeftError:
                raise
            except KeyboardInterrupt:
                if watch.kernel_ends():
                    raise LeftError from None
                raise
            except NbdistError as error:
                dead = self._crew.engines.dead()
                if not dead or isinstance(error, (ReplayError, StartError)):
                    lost.add_note(f"It could not be healed: {error}")
                    raise lost from error
                named = f"rank {formatting.ranks(dead)} died while it was healed"
                lost = RanksLostError(dead, named, ": type %dist_restart for new workers")
        saving = structs.replace(request.saving, resume=request.saving.resume or heals.has_opened)
        return request.with_options(saving=saving)

    def _shrunk(self, task: Task) -> Task:
        """With the ranks that there are now, where they are fewer."""
        if self._crew.world_size == len(task.host_of):
            return task
        host_of = {rank: hello.host for rank, hello in self._crew.hellos.items()}
        self._estate.shrunk(tuple(host_of))
        task.view.shrink(host_of)
        return task._replace(host_of=host_of)

    def _pids(self) -> dict[int, int]:
        return {rank: hello.pid for rank, hello in self._crew.hellos.items()}

    def _run_again(self, request: CellRequest, ranks: Sequence[int]) -> None:
        """A cell of before, for the names that it binds; nothing of it is shown.

        Raises:
            CellError, WorkerError: as `Cluster.run` says.
        """
        self.number += 1
        request = request.with_options(saving=None, detach=False, hang_after_s=0.0)
        again = structs.replace(request, number=self.number, replays=True)
        cell = CellUnderWay(request=again, ranks=tuple(ranks))
        view, live = SilentView(), UnkeptRun("")
        recorder = Recorder(self.number, is_step=False)
        heals = Heals(recorder, live, view, self._estate, 0, self._pids)
        hosts = {rank: self._crew.hellos[rank].host for rank in ranks}
        task = Task(cell, view, live, hosts, recorder, heals)
        watch = CellWatch(self.number, task, self._crew, self._settings)
        self._watches = (watch,)
        watch.follow(again, self._crew.dispatcher.send)
