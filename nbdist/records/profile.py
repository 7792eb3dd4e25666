"""Time of a traced cell by operation, device and line: data of `%%dist_trace`.

Each moment of a device counts once. If operations overlap, computing has precedence over
collectives, and collectives over copies. So the three tables add up to the same seconds.
"""

from __future__ import annotations

from typing import Literal

from nbdist.records.base import Record, ResultRow

SpentKind = Literal["compute", "collective", "to_device", "to_host"]
"""Activity of a device. Copies `to_device` read the host's memory, copies `to_host` write it."""

LaneKind = Literal["compute", "collective", "copies", "input"]
"""Kind of a lane. `copies` are between host and devices. `input` is a step that waits for data."""

INPUT_WAIT = "nbdist: wait for a batch"
"""Name of the profiler's annotation of a wait for a batch."""

TIMELINE_MIME = "application/vnd.nbdist.timeline.v1+json"
"""MIME type of an output that contains a `Timeline`."""

HOST_COPIES = -1
"""Device number of copies that only the host observes, such as those of CPUs."""


class OperationTime(ResultRow, frozen=True):
    """Operations of one name on all devices.

    Attributes:
        name: XLA's name, such as `dot`, `all-reduce` or `fusion of tanh`, or that of a copy.
        kind: activity.
        seconds: sum over devices.
        count: number of executions.
    """

    name: str
    kind: SpentKind
    seconds: float
    count: int


class DeviceTime(Record, frozen=True):
    """Time of one device from the start of the cell to its end.

    Attributes:
        rank: rank of the device.
        device: number of the device in the rank, or `HOST_COPIES`.
        compute_s: seconds of computing.
        collective_s: seconds in collectives, including waits for other ranks.
        to_device_s: seconds of copies to the device.
        to_host_s: seconds of copies from the device.
        idle_s: remaining seconds; 0 for `HOST_COPIES`.
    """

    rank: int
    device: int
    compute_s: float
    collective_s: float
    to_device_s: float
    to_host_s: float
    idle_s: float


class LineTime(Record, frozen=True):
    """Time of the operations of one source line, summed over devices.

    Attributes:
        cell: `In [3]` for an earlier cell; empty for the traced cell.
        line: line number from 1, the magic's line; 0 if unknown.
        text: source of the line.
        compute_s: seconds of computing.
        collective_s: seconds in collectives.
        transfer_s: seconds of copies between host and devices.
    """

    cell: str
    line: int
    text: str
    compute_s: float
    collective_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        """Seconds of all kinds."""
        return self.compute_s + self.collective_s + self.transfer_s


class Lane(Record, frozen=True):
    """Busy times of a device or a host, in order, without overlap.

    Attributes:
        rank: rank of the device.
        device: number of the device in the rank; `HOST_COPIES` for its host.
        kind: kind of the lane.
        gaps_us: microseconds from the end of the span before, or from the begin of the timeline.
        lengths_us: microseconds of each span.
        names: index of each span's operation in the names of the timeline.
    """

    rank: int
    device: int
    kind: LaneKind
    gaps_us: tuple[int, ...]
    lengths_us: tuple[int, ...]
    names: tuple[int, ...]

    @property
    def end_us(self) -> int:
        """End of the last span."""
        return sum(self.gaps_us) + sum(self.lengths_us)


class Timeline(Record, frozen=True):
    """Lanes of a trace. Clocks of several hosts may differ by milliseconds.

    Attributes:
        began_s: begin of the first span, in seconds since 1970, by the clock of its host.
        lanes: lanes by rank, device and kind.
        names: names of operations.
    """

    began_s: float = 0.0
    lanes: tuple[Lane, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def end_us(self) -> int:
        """End of the last span, in microseconds after the begin."""
        return max((lane.end_us for lane in self.lanes), default=0)


class Trace(Record, frozen=True):
    """A traced cell on one or several ranks.

    Attributes:
        ranks: traced ranks.
        seconds: duration on the slowest rank.
        by_operation: operations, longest first.
        by_device: devices, in order.
        by_line: lines of the traced cell in order, then of earlier cells, then time without a line.
        notes: limits of the figures.
        folder: folder of the profiler's files; empty if they were discarded.
        timeline: busy times of the devices. Spans with short gaps are joined.
    """

    ranks: tuple[int, ...]
    seconds: float
    by_operation: tuple[OperationTime, ...] = ()
    by_device: tuple[DeviceTime, ...] = ()
    by_line: tuple[LineTime, ...] = ()
    notes: tuple[str, ...] = ()
    folder: str = ""
    timeline: Timeline = Timeline()


class TracedRank(Record, frozen=True):
    """Trace of one rank. Its devices have the rank `OWN_RANK`, and its lines no text.

    Attributes:
        seconds: duration of the cell, including its devices.
        by_operation: see `Trace`.
        by_device: see `Trace`.
        by_line: see `Trace`.
        notes: see `Trace`.
        file: `xplane.pb` of the profiler; empty if not requested.
        timeline: see `Trace`.
    """

    seconds: float
    by_operation: tuple[OperationTime, ...]
    by_device: tuple[DeviceTime, ...]
    by_line: tuple[LineTime, ...]
    notes: tuple[str, ...] = ()
    file: bytes = b""
    timeline: Timeline = Timeline()
