"""How often a run was recovered, and what came of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbdist.records import RecoveryRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.cluster.handover import HandoverFile
    from nbdist.errors import RanksLostError
    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.recorder import Recorder
    from nbdist.execution.resume import ResumedRun
    from nbdist.records import Opened, RunningCell
    from nbdist.views.run.cell_output import View

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
        self._at = [self._began + recovery.time_s for recovery in resumed.recoveries]

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
        """Count this loss. Returns False if it is one too many for a recovery."""
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
            recovery = RecoveryRecord(
                time_s=self._resumed_s,
                ranks=lost.ranks,
                reason=lost.reason,
                step=max(0, opened.step),
                lost_s=time.monotonic() - self._at[-1],
                workers=len(pids) if len(pids) < self._workers else 0,
            )
            self._workers = len(pids)
            self._recorder.recovered(recovery)
            self._live.recovered(recovery, pids)
            self._view.recovered(recovery)
