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
from nbdist.records import Loss
from nbdist.views import formatting
from nbdist.views.cluster.start_progress import StartView
from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cells.dependencies import Entry
    from nbdist.cluster.handover import HandoverFile
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.errors import RanksLostError
    from nbdist.execution.replay_journal import Journal
    from nbdist.records import CellRequest


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
