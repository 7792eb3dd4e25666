"""What was measured of a function under `@autoplace`, and what was chosen."""

from __future__ import annotations

from nbdist.records.base import Record

DEFAULT = "default"
"""The candidate that leaves the call as it is."""


class Timed(Record, frozen=True, kw_only=True):
    """A place that was measured.

    Attributes:
        name: `default`, `cpu`, `one device`, `batch 64`.
        words: where that is.
        median_s: of a call, the moves of its inputs with it.
        spread_s: from the first to the third quartile.
        rounds: how often it was measured.
        note: why it was not measured as often as the others; else empty.
    """

    name: str
    words: str
    median_s: float
    spread_s: float
    rounds: int
    note: str = ""


class LeftOut(Record, frozen=True, kw_only=True):
    """A place that was not measured, and why."""

    name: str
    why: str


class Decision(Record, frozen=True, kw_only=True):
    """Where a function runs for inputs of one kind.

    Attributes:
        function: its module and name.
        fingerprint: of the program, its inputs and the hardware: see
            `parallel.autoplace.fingerprint`.
        inputs: in words.
        chosen: the name of a place.
        why: in words.
        made: when, in seconds since 1970.
        timed: what was measured, `default` first; nothing where there was no choice.
        left_out: what was not.
    """

    function: str
    fingerprint: str
    inputs: str
    chosen: str
    why: str
    made: float
    timed: tuple[Timed, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
