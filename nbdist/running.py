"""Runs cells on a crew, and heals a run that has lost ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.errors import NbdistError, RanksLostError
from nbdist.healing import Healer
from nbdist.held import interrupt_held
from nbdist.live import UnkeptRun
from nbdist.recorder import Recorder
from nbdist.records import Heal
from nbdist.result import Run
from nbdist.run import CellWatch
from nbdist.views import labels
from nbdist.views.silent import SilentView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.crew import Crew
    from nbdist.journal import Journal
    from nbdist.live import LiveRun
    from nbdist.records import CellRequest, Opened, Speech
    from nbdist.settings import Settings
    from nbdist.views.cell import CellView, View

_HOUR_S = 3600.0


class Runner:
    """Runs cells, one at a time.

    Args:
        crew: who runs them.
        journal: what was done to them before.
        settings: the bounds on waiting.

    Attributes:
        number: of the last cell that was sent; they count from 1.
        last_run: the cell that ran last, also when it failed.
    """

    def __init__(self, crew: Crew, journal: Journal, settings: Settings) -> None:
        self.number = 0
        self.last_run = Run(0)
        self._crew = crew
        self._settings = settings
        self._healer = Healer(crew, journal, self._run_again)
        self._watches: tuple[CellWatch, ...] = ()

    def busy(self) -> frozenset[int]:
        """The ranks that are in a cell."""
        return frozenset().union(*(frozenset(watch.running) for watch in self._watches))

    def hear(self, record: Speech) -> None:
        """On the receiver's thread: tell whoever follows a cell."""
        for watch in self._watches:
            watch.hear(record)

    def forget(self) -> None:
        """The engines are others: nobody is in a cell any more."""
        self._watches = ()

    def run(
        self,
        request: CellRequest,
        view: CellView,
        live: LiveRun,
        host_of: Mapping[int, str],
        *,
        hang_after_s: float = 0.0,
        max_heals: int = 0,
    ) -> None:
        """Run a cell to its end, however often it has to be healed for that.

        Args:
            request: the cell; its number is set here.
            view: shows what the ranks say.
            live: keeps what they report.
            host_of: the host of each rank that runs it.
            hang_after_s: see `Vitals`.
            max_heals: how often, in an hour.

        Raises:
            CellError, WorkerError, KeyboardInterrupt: as `Cluster.run` says.
        """
        recorder = Recorder(self.number + 1, is_step=request.step is not None)
        heals = _Heals(recorder, live, view, max_heals, self._pids)
        watch = None
        try:
            while True:
                watch = self._watch(view, live, host_of, recorder, heals.opened, hang_after_s)
                try:
                    self._require_all(request)
                    sent = structs.replace(request, number=self.number)
                    watch.follow(sent, self._crew.dispatcher.send)
                except RanksLostError as lost:
                    watch.fail(lost)
                    request = self._healed(request, lost, heals)
                else:
                    return
        finally:
            with interrupt_held():
                self.last_run = recorder.run()
                if watch is not None:
                    _close(watch, view, live, self.last_run)

    def _require_all(self, request: CellRequest) -> None:
        """Raises RanksLostError for ranks that died between cells, or are stuck in one before."""
        if request.saving is None:
            return
        lost = {*self._crew.engines.dead(), *self.busy()}
        if lost or self._crew.collectives.broken:
            named = f"rank {labels.ranks(sorted(lost))} died" if lost else "collectives are broken"
            raise RanksLostError(sorted(lost), named, ": type %dist_restart for new workers")

    def _watch(
        self,
        view: View,
        live: LiveRun,
        host_of: Mapping[int, str],
        recorder: Recorder,
        opened: Callable[[Opened], None],
        hang_after_s: float,
    ) -> CellWatch:
        self.number += 1
        watch = CellWatch(
            self.number,
            host_of,
            self._crew,
            view,
            live,
            self._settings,
            recorder,
            opened,
            hang_after_s,
        )
        self._watches = (*(w for w in self._watches if w.running), watch)
        return watch

    def _healed(self, request: CellRequest, lost: RanksLostError, heals: _Heals) -> CellRequest:
        """What is to be run instead, by ranks that are all there again.

        Raises:
            RanksLostError: it may not be healed, or cannot.
        """
        if request.saving is None or not heals.may_begin(lost):
            raise lost
        self._watches = ()
        heals.begin(lost)
        try:
            self._healer.heal(lost, request, heals.saved)
        except NbdistError as error:
            lost.add_note(f"It could not be healed: {error}")
            raise lost from error
        saving = structs.replace(request.saving, resume=request.saving.resume or heals.has_opened)
        return structs.replace(request, saving=saving, seconds=heals.resume())

    def _pids(self) -> dict[int, int]:
        return {rank: hello.pid for rank, hello in self._crew.hellos.items()}

    def _run_again(self, request: CellRequest, ranks: Sequence[int]) -> None:
        """A cell of before, for the names that it binds; nothing of it is shown.

        Raises:
            CellError, WorkerError: as `Cluster.run` says.
        """
        recorder = Recorder(self.number + 1, is_step=False)
        hosts = {rank: self._crew.hellos[rank].host for rank in ranks}
        watch = self._watch(SilentView(), UnkeptRun(""), hosts, recorder, _ignore, 0.0)
        again = structs.replace(request, number=self.number, saving=None, replays=True)
        watch.follow(again, self._crew.dispatcher.send)


class _Heals:
    """How often a run was healed, and what came of it.

    Args:
        recorder: keeps the run's result.
        live: keeps the run.
        view: shows it.
        most: in an hour.
        pids: of all ranks, as they are by then.

    Attributes:
        saved: names whose values its checkpoints have.
        has_opened: the checkpoints in its folder are its own.
    """

    def __init__(
        self,
        recorder: Recorder,
        live: LiveRun,
        view: CellView,
        most: int,
        pids: Callable[[], Mapping[int, int]],
    ) -> None:
        self.saved: tuple[str, ...] = ()
        self.has_opened = False
        self._recorder = recorder
        self._live = live
        self._view = view
        self._most = most
        self._pids = pids
        self._began = time.monotonic()
        self._resumed_s = 0.0
        self._at: list[float] = []
        self._lost: RanksLostError | None = None

    def begin(self, lost: RanksLostError) -> None:
        """These ranks are about to be replaced."""
        self._live.healing(lost.reason)
        self._view.healing(lost.reason)

    def resume(self) -> float:
        """Ranks begin again: seconds since the run began, from which they count on."""
        self._resumed_s = time.monotonic() - self._began
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
        self.saved, self.has_opened = opened.names, True
        if self._lost is not None:
            lost, self._lost = self._lost, None
            heal = Heal(
                time_s=self._resumed_s,
                ranks=lost.ranks,
                reason=lost.reason,
                step=max(0, opened.step),
                lost_s=time.monotonic() - self._at[-1],
            )
            self._recorder.healed(heal)
            self._live.healed(heal, self._pids())
            self._view.healed(heal)


def _ignore(_: Opened) -> None:
    """What a cell saves that is run again is nothing."""


def _close(watch: CellWatch, view: CellView, live: LiveRun, run: Run) -> None:
    said = live.end(*watch.how_it_ended())
    try:
        view.close(run._repr_mimebundle_, said)
    finally:
        live.close()
