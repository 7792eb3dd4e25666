"""Where the time of a traced cell went: what `%%dist_trace` shows.

A device does one thing at a time here: where several operations overlap on it, computing counts
before collectives, and those before copies. So the three tables add up to the same seconds.
"""

from __future__ import annotations

from typing import Literal

from nbdist.records.base import Record

SpentKind = Literal["compute", "collective", "to_device", "to_host"]
"""What a device does: copies `to_device` come from the host's memory, and `to_host` go there."""

HOST_COPIES = -1
"""In the place of a device's number: copies that are seen on the host only, as those of CPUs."""


class OperationTime(Record, frozen=True):
    """Operations of one name, of all devices.

    Attributes:
        name: XLA's, as in `dot`, `all-reduce`, `fusion of tanh`; or of a copy.
        kind: what it is.
        seconds: of all devices together.
        count: how often it ran.
    """

    name: str
    kind: SpentKind
    seconds: float
    count: int


class DeviceTime(Record, frozen=True):
    """One device from the begin of the cell to its end.

    Attributes:
        rank: whose it is.
        device: its number within the rank, or `HOST_COPIES`.
        compute_s: seconds in which it computed.
        collective_s: seconds in collectives, the waiting for others included.
        to_device_s: seconds of copies to it.
        to_host_s: seconds of copies from it.
        idle_s: what is left; none of `HOST_COPIES`.
    """

    rank: int
    device: int
    compute_s: float
    collective_s: float
    to_device_s: float
    to_host_s: float
    idle_s: float


class LineTime(Record, frozen=True):
    """What one line had devices do, all devices together.

    Attributes:
        cell: empty for the traced cell itself; an earlier one as in `In [3]`.
        line: counts from 1, the magic's own line; 0 where no line is known.
        text: the line.
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
        """Of all kinds."""
        return self.compute_s + self.collective_s + self.transfer_s


class Trace(Record, frozen=True):
    """A traced cell, on one rank or on several.

    Attributes:
        ranks: where it was traced.
        seconds: how long the slowest of them was at it.
        by_operation: the longest first.
        by_device: in order.
        by_line: the traced cell's in order, then those of earlier cells, then what has no line.
        notes: what the figures do not show, in words.
        folder: where the profiler's files are; empty where they are not kept.
    """

    ranks: tuple[int, ...]
    seconds: float
    by_operation: tuple[OperationTime, ...] = ()
    by_device: tuple[DeviceTime, ...] = ()
    by_line: tuple[LineTime, ...] = ()
    notes: tuple[str, ...] = ()
    folder: str = ""


class TracedRank(Record, frozen=True):
    """What one rank saw; its devices are of `OWN_RANK`, and lines of the cell have no text.

    Attributes:
        seconds: how long it was at the cell, its devices included.
        by_operation: as of `Trace`.
        by_device: as of `Trace`.
        by_line: as of `Trace`.
        notes: as of `Trace`.
        file: the profiler's, an `xplane.pb`; empty where it was not asked for.
    """

    seconds: float
    by_operation: tuple[OperationTime, ...]
    by_device: tuple[DeviceTime, ...]
    by_line: tuple[LineTime, ...]
    notes: tuple[str, ...] = ()
    file: bytes = b""
