"""A cell, and where what comes of it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.recorder import Recorder
    from nbdist.execution.recovery import RecoveryLog
    from nbdist.records import RunningCell
    from nbdist.views.run.cell_output import View


class RunContext(NamedTuple):
    """What there is of a cell that is run.

    Attributes:
        cell: which, and how it is followed.
        view: shows what the ranks say.
        live: keeps it.
        host_of: the host of each rank that runs it.
        recorder: keeps what the run's result has of it.
        recoveries: is told when the state of a rank is saved from here on.
    """

    cell: RunningCell
    view: View
    live: LiveRun
    host_of: Mapping[int, str]
    recorder: Recorder
    recoveries: RecoveryLog
