"""A run that has lost ranks goes on: they are replaced, and what it uses is there again.

Every engine is replaced by a fresh one, which is forked as quickly as one is, and has nothing left
of what went wrong. Under JAX, spares are quicker: they take the places of those that were lost,
and the others stay. TensorFlow takes longer to be wired anew in a process than to start in one.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError, ReplayError, StartError, WorkerError
from nbdist.records import Loss, RecoveryRecord
from nbdist.views import formatting
from nbdist.views.cluster.workers import StartView
from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.cells.dependencies import Entry
    from nbdist.cluster.handover import HandoverFile
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.errors import RanksLostError
    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.recorder import Recorder
    from nbdist.execution.replay_journal import Journal
    from nbdist.execution.resume import ResumedRun
    from nbdist.records import CellRequest, Opened, RunningCell
    from nbdist.views.run.cell_output import View


_IN_PLACE_S = 10.0
"""It takes half a second; fresh engines take two."""

_AGAIN_S = 2.0
"""Between two tries to start workers."""

_TRIES = 2
"""To start workers, before those that die are left out; any may have been killed by chance."""


class Recovery:
    """Brings the worker group of a run back.

    Args:
        worker_group: who runs it.
        journal: what was done to them before.
        handover: keeps that ranks are being replaced, for whoever has to go on with that.
        run: runs a cell of before again on some ranks, in silence.
        wait_s: how long is waited for workers that cannot be started.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        journal: Journal,
        handover: HandoverFile,
        run: Callable[[CellRequest, Sequence[int]], None],
        wait_s: float,
    ) -> None:
        self._worker_group = worker_group
        self._journal = journal
        self._handover = handover
        self._run = run
        self._wait_s = wait_s

    def can_make(self, names: Sequence[str], request: CellRequest, saved: Sequence[str]) -> bool:
        """Whether a recovery of the run would make these names again; see `recover`."""
        try:
            entries = self._journal.needed(request, saved, self._worker_group.world_size)
        except ReplayError:
            return False
        return {name for entry in entries for name in entry.names.binds}.issuperset(names)

    def recover(self, lost: RanksLostError, request: CellRequest, saved: Sequence[str]) -> None:
        """Have all ranks again, or as many as there can be, wired, with what the run uses.

        Args:
            lost: who is to be replaced; nobody else is in a cell.
            request: the run.
            saved: names whose values its checkpoint has.

        Raises:
            ReplayError: what the run uses cannot be made again; nothing was done.
            NbdistError: it did not work, even with fresh engines.
        """
        entries = self._journal.needed(request, saved, self._worker_group.world_size)
        halfway = self._handover.handover.loss is not None  # nobody knows what there is
        self._handover.lose(Loss(ranks=lost.ranks, reason=lost.reason))
        with StartView(f"nbdist: {lost.reason}; recovering") as phases:
            if halfway or not self._in_place(phases, lost, request):
                self._afresh(phases, shrinks=request.saving is not None and request.saving.shrink)
            self.make_again(phases, entries)
            gone = self._journal.gone(entries)
            phases.finish(" ".join(("nbdist: the run goes on", gone)).rstrip(), ())

    def make_again(self, phases: StartView, entries: Sequence[Entry]) -> None:
        """Do what fresh workers lack; see `Journal.needed`."""
        phases.run("set-up run again", lambda: self._replay(entries))

    def _in_place(self, phases: StartView, lost: RanksLostError, request: CellRequest) -> bool:
        """Whether it worked."""
        collectives = self._worker_group.collectives
        can_replace = self._worker_group.engines.can_replace(lost.ranks)
        if request.strategy != "pjrt" or not lost.ranks or not can_replace:
            return False
        if not collectives.recover_in_place:
            return False
        try:
            with self._worker_group.engines.within(_IN_PLACE_S):
                phases.run("replaced", lambda: self._worker_group.replace(lost.ranks))
                collectives.recover(phases)
        except NbdistError:  # one more may have died, or is stuck
            return False
        return True

    def _afresh(self, phases: StartView, *, shrinks: bool) -> None:
        """Fresh engines; those that cannot be started are waited for, or left out."""
        deadline = math.inf  # a scheduler's queue has a bound of its own
        places = self._worker_group.engines.places.numbers
        for tries in itertools.count(1):
            try:
                self._worker_group.restart(phases, places, in_haste=True, waits=not shrinks)
            except (StartError, WorkerError):
                dead = self._worker_group.engines.dead()
                deadline = min(deadline, time.monotonic() + self._wait_s)
                if not dead or time.monotonic() > deadline:
                    raise
            else:
                return
            if not shrinks:
                time.sleep(_AGAIN_S)
            elif tries >= _TRIES and len(dead) < len(places):
                places = tuple(p for rank, p in enumerate(places) if rank not in dead)
                phases.run("left out", functools.partial(_named, dead))

    def _replay(self, entries: Sequence[Entry]) -> str:
        self._worker_group.seed()  # ranks that stayed have drawn since
        for entry in entries:
            ranks = [rank for rank in entry.ranks if rank < self._worker_group.world_size]
            if entry.request is None:
                self._worker_group.engines.apply(transfer.put, entry.payload, ranks=ranks)
            elif ranks:
                self._run(entry.request, ranks)
        return " ".join(entry.place for entry in entries)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {formatting.ranks(ranks)}"


_HOUR_S = 3600.0


class RecoveryLog:
    """Counts the recoveries of one run, and tells of them.

    Args:
        recorder: keeps the run's result.
        live: keeps the run.
        view: shows it.
        handover: is told what is saved.
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
        view: View,
        handover: HandoverFile,
        most: int,
        pids: Callable[[], Mapping[int, int]],
    ) -> None:
        self.saved: tuple[str, ...] = ()
        self.has_opened = False
        self._began: float | None = None  # when the workers' clocks did, by `time.monotonic`
        self._recorder = recorder
        self._live = live
        self._view = view
        self._handover = handover
        self._most = most
        self._pids = pids
        self._workers = len(pids())
        self._resumed_s = 0.0
        self._at: list[float] = []
        self._lost: RanksLostError | None = None

    def take_over(self, cell: RunningCell, resumed: ResumedRun) -> None:
        """Go on with the account of another process."""
        self.saved, self.has_opened = cell.saved, bool(cell.saved)
        self._began = time.monotonic() - resumed.age_s
        self._at = [self._began + recover.time_s for recover in resumed.recoveries]

    def begin(self, lost: RanksLostError) -> None:
        """These ranks are about to be replaced."""
        self._live.recovering(lost.reason)
        self._view.recovering(lost.reason)

    def begin_steps(self) -> float:
        """Ranks are about to begin, or to begin again: from how many seconds on they count."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        self._resumed_s = now - self._began
        return self._resumed_s

    def may_begin(self, lost: RanksLostError) -> bool:
        """Whether this loss is recovered, which is counted."""
        now = time.monotonic()
        self._at = [*(at for at in self._at if now - at < _HOUR_S), now]
        if len(self._at) > self._most:
            if self._most:
                lost.add_note(f"It was recovered {self._most} times within an hour (--max-heals)")
            return False
        self._lost = lost
        return True

    def opened(self, opened: Opened) -> None:
        """A rank has its state; the first one that has it after a loss tells where it goes on."""
        self.has_opened = True
        if self.saved != opened.names:  # all ranks say the same
            self.saved = opened.names
            self._handover.opened(opened.names)
        if self._lost is not None:
            lost, self._lost = self._lost, None
            pids = self._pids()
            recover = RecoveryRecord(
                time_s=self._resumed_s,
                ranks=lost.ranks,
                reason=lost.reason,
                step=max(0, opened.step),
                lost_s=time.monotonic() - self._at[-1],
                workers=len(pids) if len(pids) < self._workers else 0,
            )
            self._workers = len(pids)
            self._recorder.recovered(recover)
            self._live.recovered(recover, pids)
            self._view.recovered(recover)
