"""Runs cells on a crew, and heals a run that has lost ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from nbdist.adoption import controllers_of, of_crew
from nbdist.errors import LeftError, NbdistError, RanksLostError
from nbdist.healing import Healer
from nbdist.held import interrupt_held
from nbdist.recorder import Recorder
from nbdist.records import Heal
from nbdist.result import Run
from nbdist.run import CellWatch
from nbdist.unkept import UnkeptRun
from nbdist.views import labels
from nbdist.views.silent import SilentView
from nbdist.worker import setup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.crew import Crew
    from nbdist.former import Former
    from nbdist.journal import Journal
    from nbdist.live import LiveRun
    from nbdist.records import CellRequest, CellUnderWay, Opened, Speech
    from nbdist.settings import Settings
    from nbdist.telemetry.estate import EstateFile
    from nbdist.views.cell import CellView

_HOUR_S = 3600.0
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
        last_run: the cell that ran last, also when it failed.
    """

    def __init__(
        self, crew: Crew, journal: Journal, estate: EstateFile, settings: Settings
    ) -> None:
        self.number = estate.estate.cells
        self.last_run = Run(0)
        self._crew = crew
        self._estate = estate
        self._settings = settings
        self._healer = Healer(crew, journal, self._run_again, settings.replace_wait_s)
        self._watches: tuple[CellWatch, ...] = ()

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
        self._watches = ()

    def run(
        self, cell: CellUnderWay, view: CellView, live: LiveRun, host_of: Mapping[int, str]
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
        heals = _Heals(recorder, live, view, self._estate, cell.max_heals, self._pids)
        task = _Task(cell, view, live, host_of, recorder, heals)
        watch = self._watch(task)
        self._finish(task, watch, self._sending(task, watch, cell.request))

    def expect(
        self, cell: CellUnderWay, former: Former, view: CellView, host_of: Mapping[int, str]
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
        heals = _Heals(recorder, former.live, view, self._estate, cell.max_heals, self._pids)
        for heal in former.heals:
            recorder.healed(heal)
        heals.saved, heals.began = cell.saved, heals.began - former.age_s
        heals.has_opened = bool(cell.saved)
        task = _Task(cell, view, former.live, host_of, recorder, heals)
        self.number = cell.request.number - 1
        watch = self._watch(task)
        watch.expect(cell.request, former)
        if former.begun is not None:
            view.resume(former.begun)

        def resume() -> None:
            send = self._crew.dispatcher.send
            watch.resume(cell.request, send, stopping=former.stopping)

        return lambda: self._finish(task, watch, resume)

    def _finish(self, task: _Task, watch: CellWatch, follow: Callable[[], None]) -> None:
        request, left = task.cell.request, False
        try:
            while True:
                try:
                    follow()
                except RanksLostError as lost:
                    watch.fail(lost)
                    request = self._healed(request, lost, task.heals)
                    self._estate.update(**controllers_of(self._crew))
                    task = self._shrunk(task)
                    watch = self._watch(task)
                    follow = self._sending(task, watch, request)
                else:
                    return
        except LeftError:
            left = True
            raise
        finally:
            with interrupt_held():
                self.last_run = task.recorder.run()
                if left:
                    self._crew.close_sockets()
                    watch.leave()
                else:
                    self._close(task, watch)

    def _close(self, task: _Task, watch: CellWatch) -> None:
        said = task.live.end(*watch.how_it_ended())
        try:
            task.view.close(self.last_run._repr_mimebundle_, said)
        finally:
            task.live.close()

    def _sending(self, task: _Task, watch: CellWatch, request: CellRequest) -> Callable[[], None]:
        """What sends the cell, with the number that is the watch's, and follows it."""
        sent = structs.replace(request, number=self.number)

        def follow() -> None:
            self._require_all(request)
            self._estate.sent(sent, **of_crew(self._crew))
            if task.cell.detached:
                self._crew.engines.detach(on=True)
            if sent.saving is not None:
                self._crew.engines.warm_spares(setup.load, _READS_CHECKPOINTS)
            watch.follow(sent, self._crew.dispatcher.send)

        return follow

    def _require_all(self, request: CellRequest) -> None:
        """Raises RanksLostError for ranks that died between cells, or are stuck in one before."""
        if request.saving is None:
            return
        lost = self.gone()
        if lost or request.strategy in self._crew.collectives.broken:
            named = f"rank {labels.ranks(lost)} died" if lost else "collectives are broken"
            raise RanksLostError(lost, named, ": type %dist_restart for new workers")

    def _watch(self, task: _Task) -> CellWatch:
        self.number += 1
        watch = CellWatch(
            self.number,
            task.host_of,
            self._crew,
            task.view,
            task.live,
            self._settings,
            task.recorder,
            task.heals.opened,
            task.cell.hang_after_s,
            detached=task.cell.detached,
        )
        self._watches = (*(w for w in self._watches if w.running), watch)
        return watch

    def _healed(self, request: CellRequest, lost: RanksLostError, heals: _Heals) -> CellRequest:
        """What is to be run instead, by ranks that are all there again.

        Raises:
            RanksLostError: it may not be healed, or cannot.
        """
        while True:
            if request.saving is None or not heals.may_begin(lost):
                raise lost
            self._watches = ()
            heals.begin(lost)
            try:
                self._healer.heal(lost, request, heals.saved)
                break
            except NbdistError as error:
                dead = self._crew.engines.dead()
                if not dead:
                    lost.add_note(f"It could not be healed: {error}")
                    raise lost from error
                named = f"rank {labels.ranks(dead)} died while it was healed"
                lost = RanksLostError(dead, named, ": type %dist_restart for new workers")
        saving = structs.replace(request.saving, resume=request.saving.resume or heals.has_opened)
        return structs.replace(request, saving=saving, seconds=heals.resume())

    def _shrunk(self, task: _Task) -> _Task:
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
        hosts = {rank: self._crew.hellos[rank].host for rank in ranks}
        self.number += 1
        watch = CellWatch(
            self.number,
            hosts,
            self._crew,
            SilentView(),
            UnkeptRun(""),
            self._settings,
            Recorder(self.number, is_step=False),
            _ignore,
            0.0,
            detached=False,
        )
        self._watches = (watch,)
        again = structs.replace(request, number=self.number, saving=None, replays=True)
        watch.follow(again, self._crew.dispatcher.send)


class _Heals:
    """How often a run was healed, and what came of it.

    Args:
        recorder: keeps the run's result.
        live: keeps the run.
        view: shows it.
        estate: is told what is saved.
        most: in an hour.
        pids: of all ranks, as they are by then.

    Attributes:
        saved: names whose values its checkpoints have.
        has_opened: the checkpoints in its folder are its own.
        began: when the run did, by `time.monotonic`.
    """

    def __init__(
        self,
        recorder: Recorder,
        live: LiveRun,
        view: CellView,
        estate: EstateFile,
        most: int,
        pids: Callable[[], Mapping[int, int]],
    ) -> None:
        self.saved: tuple[str, ...] = ()
        self.has_opened = False
        self.began = time.monotonic()
        self._recorder = recorder
        self._live = live
        self._view = view
        self._estate = estate
        self._most = most
        self._pids = pids
        self._workers = len(pids())
        self._resumed_s = 0.0
        self._at: list[float] = []
        self._lost: RanksLostError | None = None

    def begin(self, lost: RanksLostError) -> None:
        """These ranks are about to be replaced."""
        self._live.healing(lost.reason)
        self._view.healing(lost.reason)

    def resume(self) -> float:
        """Ranks begin again: seconds since the run began, from which they count on."""
        self._resumed_s = time.monotonic() - self.began
        return self._resumed_s

    def may_begin(self, lost: RanksLostError) -> bool:
        """Whether this loss is healed, which is counted."""
        now = time.monotonic()
        self._at = [*(at for at in self._at if now - at < _HOUR_S), now]
        if len(self._at) > self._most:
            if self._most:
                lost.add_note(f"It was healed {self._most} times within an hour (--max-heals)")
            return False
        self._lost = lost
        return True

    def opened(self, opened: Opened) -> None:
        """A rank has its state; the first one that has it after a loss tells where it goes on."""
        self.has_opened = True
        if self.saved != opened.names:  # all ranks say the same
            self.saved = opened.names
            self._estate.opened(opened.names)
        if self._lost is not None:
            lost, self._lost = self._lost, None
            pids = self._pids()
            heal = Heal(
                time_s=self._resumed_s,
                ranks=lost.ranks,
                reason=lost.reason,
                step=max(0, opened.step),
                lost_s=time.monotonic() - self._at[-1],
                workers=len(pids) if len(pids) < self._workers else 0,
            )
            self._workers = len(pids)
            self._recorder.healed(heal)
            self._live.healed(heal, pids)
            self._view.healed(heal)


def _ignore(_: Opened) -> None:
    """What a cell saves that is run again is nothing."""


class _Task(NamedTuple):
    """A cell, and where what comes of it goes."""

    cell: CellUnderWay
    view: CellView
    live: LiveRun
    host_of: Mapping[int, str]
    recorder: Recorder
    heals: _Heals
