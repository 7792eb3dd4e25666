"""Union of all events that a rank sends to the kernel."""

from __future__ import annotations

from nbdist.records.events import (
    Beat,
    CellEnded,
    Checked,
    Compiled,
    Display,
    FitBegun,
    Metrics,
    Note,
    Opened,
    Output,
    Planned,
    Preempted,
    Profiled,
    Rows,
    StepBegun,
    Stopping,
    Where,
)

AnyEvent = (
    Output
    | Display
    | Metrics
    | Rows
    | StepBegun
    | FitBegun
    | Planned
    | Compiled
    | Opened
    | Note
    | Checked
    | Profiled
    | Stopping
    | Preempted
    | CellEnded
    | Beat
    | Where
)
