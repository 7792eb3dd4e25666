"""Recovery of a run that has lost ranks: replace the workers, and create the run's inputs again.

nbdist replaces every engine by a fresh one: forking all engines takes as long as forking one, and
no state of the failure remains. Under JAX, spares are faster: they replace the lost ranks, and the
other ranks stay. TensorFlow needs more time to reconnect in a process than to start in a new one.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.errors import NbdistError, ReplayError, StartError, WorkerError
from nbdist.execution import pushing
from nbdist.records import LostRanks, RecoveryRecord
from nbdist.views import formatting
from nbdist.views.cluster.workers import StartView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.cells.dependencies import Entry, Needed
    from nbdist.cluster.handover import HandoverFile
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.errors import RanksLostError
    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.module_sync import ModuleSync
    from nbdist.execution.recorder import Recorder
    from nbdist.execution.replay_journal import Journal
    from nbdist.execution.resume import ResumedRun
    from nbdist.records import CellRequest, Opened, RunningCell
    from nbdist.views.run.cell_output import View


_IN_PLACE_S = 10.0
"""Time limit of a replacement by spares. It takes 0.5 s; fresh engines take 2 s."""

_AGAIN_S = 2.0
"""Pause between two attempts to start workers."""

_TRIES = 2
"""Attempts to start workers before nbdist leaves out the ones that die.

A single death may be an accident.
"""


class Recovery:
    """Recovery of the worker group of a run.

    Args:
        worker_group: the workers.
        journal: the earlier cells and pushed objects.
        handover: stores the loss, for a process that has to continue the recovery.
        modules: the user's own modules, which the workers need first.
        run: runs an earlier cell again on some ranks, without output.
        wait_s: time in seconds to retry workers that cannot be started.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        journal: Journal,
        handover: HandoverFile,
        modules: ModuleSync,
        run: Callable[[CellRequest, Sequence[int]], None],
        wait_s: float,
    ) -> None:
        self._worker_group = worker_group
        self._journal = journal
        self._handover = handover
        self._modules = modules
        self._run = run
        self._wait_s = wait_s

    def can_recreate(
        self, names: Sequence[str], request: CellRequest, saved: Sequence[str]
    ) -> bool:
        """Return True if a recovery of the run would create these names again; see `recover`."""
        try:
            entries = self.needed(request, saved).entries
        except ReplayError:
            return False
        return {name for entry in entries for name in entry.names.binds}.issuperset(names)

    def recover(self, lost: RanksLostError, request: CellRequest, saved: Sequence[str]) -> None:
        """Replace the lost ranks, reconnect all, and create the inputs of the run again.

        With `--shrink`, fewer ranks may remain.

        Args:
            lost: the ranks to replace. No other rank runs a cell.
            request: the run.
            saved: the names whose values the checkpoint contains.

        Raises:
            ReplayError: an input of the run cannot be created again; nothing was changed.
            NbdistError: the recovery failed, even with fresh engines.
        """
        entries, left_out = self.needed(request, saved)
        # After an interrupted recovery, the state of the workers is unknown.
        is_interrupted = self._handover.handover.loss is not None
        self._handover.lose(LostRanks(ranks=lost.ranks, reason=lost.reason))
        with StartView(f"nbdist: {lost.reason}; recovering") as phases:
            if is_interrupted or not self._in_place(phases, lost, request):
                self._restart_all(
                    phases, shrinks=request.saving is not None and request.saving.shrink
                )
            changed = f"without repeating a cell that may have changed its inputs: {left_out}"
            lacking = (self._journal.describe_lost_names(entries), changed * bool(left_out))
            without = ", ".join(filter(None, lacking))
            self.recreate_inputs(phases, entries)
            phases.finish(f"nbdist: the run continues {without}".rstrip(), ())

    def needed(self, request: CellRequest, saved: Sequence[str]) -> Needed:
        """Return the entries to repeat for a run; see `Journal.needed`."""
        size, texts = self._worker_group.world_size, self._modules.texts()
        return self._journal.needed(request, saved, size, texts)

    def recreate_inputs(self, phases: StartView, entries: Sequence[Entry]) -> None:
        """Repeat cells and pushes on fresh workers; see `Journal.needed`."""
        phases.run("set-up run again", lambda: self._replay(phases, entries))
        self._journal.repeated(entries)

    def _in_place(self, phases: StartView, lost: RanksLostError, request: CellRequest) -> bool:
        """Replace the lost ranks by spares. Returns False if that is not possible or fails."""
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

    def _restart_all(self, phases: StartView, *, shrinks: bool) -> None:
        """Start fresh engines. Retry those that cannot be started; with `shrinks`, omit them."""
        deadline = math.inf  # a scheduler's queue has its own limit
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

    def _replay(self, phases: StartView, entries: Sequence[Entry]) -> str:
        self._worker_group.seed()  # ranks that stayed have drawn random numbers since
        self._modules.send(range(self._worker_group.world_size))
        for entry in entries:
            ranks = [rank for rank in entry.ranks if rank < self._worker_group.world_size]
            if entry.request is None:
                payload = Path(entry.file) if entry.file else entry.payload
                pushing.bind(self._worker_group.engines, payload, ranks, phases.show_message)
            elif ranks:
                # Cells before it that drew random numbers may not be repeated.
                generators = self._journal.generators(before=entry)
                self._run(structs.replace(entry.request, generators=generators), ranks)
        return " ".join(entry.place for entry in entries)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {formatting.ranks(ranks)}"


_HOUR_S = 3600.0


class RecoveryLog:
    """Recoveries of one run: it limits, stores and shows them.

    Args:
        recorder: collects the result of the run.
        live: stores the run.
        view: shows the run.
        handover: stores the names that the checkpoints contain.
        most: the largest number of recoveries within an hour.
        pids: returns the current process ids of all ranks.

    Attributes:
        saved: the names whose values the checkpoints contain.
        has_opened: True if the checkpoints in the folder belong to this run.
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
        self._began: float | None = None  # the start of the run, by `time.monotonic`
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
        """Continue the count of another process."""
        self.saved, self.has_opened = cell.saved, bool(cell.saved)
        self._began = time.monotonic() - resumed.age_s
        self._at = [self._began + recover.time_s for recover in resumed.recoveries]

    def begin(self, lost: RanksLostError) -> None:
        """Store and show that nbdist replaces ranks."""
        self._live.recovering(lost.reason)
        self._view.recovering(lost.reason)

    def begin_steps(self) -> float:
        """Return the time of the run in seconds, at which the ranks begin or resume."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        self._resumed_s = now - self._began
        return self._resumed_s

    def may_begin(self, lost: RanksLostError) -> bool:
        """Count a loss. Returns True if nbdist may recover it."""
        now = time.monotonic()
        self._at = [*(at for at in self._at if now - at < _HOUR_S), now]
        if len(self._at) > self._most:
            if self._most:
                lost.add_note(f"{self._most} recoveries within an hour, the limit of --max-heals")
            return False
        self._lost = lost
        return True

    def opened(self, opened: Opened) -> None:
        """Process a rank's message that it has restored or created its state.

        After a loss, the first one contains the step from which the run continues.
        """
        self.has_opened = True
        if self.saved != opened.names:  # all ranks report the same names
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
