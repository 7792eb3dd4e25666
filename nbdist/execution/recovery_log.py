"""How often a run was healed, and what came of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbdist.records import Heal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.cluster.handover import EstateFile
    from nbdist.errors import RanksLostError
    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.recorder import Recorder
    from nbdist.execution.resume import Former
    from nbdist.records import CellUnderWay, Opened
    from nbdist.views.run.cell_output import View

_HOUR_S = 3600.0


class Heals:
    """Counts the heals of one run, and tells of them.

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
    """

    def __init__(
        self,
        recorder: Recorder,
        live: LiveRun,
        view: View,
        estate: EstateFile,
        most: int,
        pids: Callable[[], Mapping[int, int]],
    ) -> None:
        self.saved: tuple[str, ...] = ()
        self.has_opened = False
        self._began: float | None = None  # when the workers' clocks did, by `time.monotonic`
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

    def take_over(self, cell: CellUnderWay, former: Former) -> None:
        """Go on with the account of another process."""
        self.saved, self.has_opened = cell.saved, bool(cell.saved)
        self._began = time.monotonic() - former.age_s
        self._at = [self._began + heal.time_s for heal in former.heals]

    def begin(self, lost: RanksLostError) -> None:
        """These ranks are about to be replaced."""
        self._live.healing(lost.reason)
        self._view.healing(lost.reason)

    def begin_steps(self) -> float:
        """Ranks are about to begin, or to begin again: from how many seconds on they count."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        self._resumed_s = now - self._began
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
