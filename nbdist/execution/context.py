"""A running cell and its output sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.execution.live_run import LiveRun
    from nbdist.execution.recorder import Recorder
    from nbdist.execution.recovery import RecoveryLog
    from nbdist.records import RunningCell
    from nbdist.telemetry.receiver import Repeats
    from nbdist.views.run.cell_output import View


class RunContext(NamedTuple):
    """A running cell and its output sinks.

    Attributes:
        cell: the cell.
        view: shows the records of the ranks.
        live: stores the records of the ranks.
        host_of: the host of each rank that runs the cell.
        recorder: collects the result of the run.
        recoveries: counts recoveries, and stores the names that the checkpoint contains.
        repeats: removes reports that ranks send again, in all attempts.
    """

    cell: RunningCell
    view: View
    live: LiveRun
    host_of: Mapping[int, str]
    recorder: Recorder
    recoveries: RecoveryLog
    repeats: Repeats
