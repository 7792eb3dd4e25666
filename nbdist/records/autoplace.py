"""Measurements and decisions of `@autoplace`."""

from __future__ import annotations

from nbdist.records.base import Record

DEFAULT = "default"
"""Candidate that does not change the call."""


class Timed(Record, frozen=True, kw_only=True):
    """A measured placement.

    Attributes:
        name: `default`, `cpu`, `one device` or `batch 64`.
        words: description of the placement.
        median_s: median duration of a call, including transfers of its inputs.
        spread_s: interquartile range of the duration.
        rounds: number of measurements.
        note: reason for fewer measurements than others; else empty.
    """

    name: str
    words: str
    median_s: float
    spread_s: float
    rounds: int
    note: str = ""


class LeftOut(Record, frozen=True, kw_only=True):
    """A placement that was not measured, and the reason."""

    name: str
    why: str


class Decision(Record, frozen=True, kw_only=True):
    """Placement of a function for inputs of one kind.

    Attributes:
        function: module and name.
        fingerprint: digest of the program, its inputs and the hardware, see
            `parallel.autoplace.fingerprint`.
        inputs: description of the inputs.
        chosen: name of the chosen placement.
        why: reason.
        made: time of the decision, in seconds since 1970.
        timed: measured placements, `default` first; empty without alternatives.
        left_out: placements that were not measured.
    """

    function: str
    fingerprint: str
    inputs: str
    chosen: str
    why: str
    made: float
    timed: tuple[Timed, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
