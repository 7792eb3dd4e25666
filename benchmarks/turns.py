"""Alternate measurement of two sides that train in the same run.

Each side consists of processes in an endless loop of steps. SIGSTOP and SIGCONT alternate between
the sides every fraction of a second. Noise affects both equally, and the waiting side uses no
processor time.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.case import Case

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Event

    from benchmarks.case import Scale

FEWEST_STAMPS = 4
"""Minimum number of steps in a turn that counts."""


@dataclass(frozen=True)
class Turn:
    """Times of one turn of both sides, in seconds of `time.perf_counter`."""

    ours: float
    peer: float
    end: float


@dataclass(frozen=True)
class Side:
    """Steps of one side.

    Attributes:
        ends: end times of the steps of one of its processes.
        turns: begin and end of its turns.
    """

    ends: Sequence[float]
    turns: Sequence[tuple[float, float]]


def take_turns(
    ours: Sequence[int], peer: Sequence[int], turn_s: float, over: Event
) -> tuple[Turn, ...]:
    """Alternate between the processes of both sides until `over` is set, then continue all."""
    turns = []
    _send(signal.SIGSTOP, peer)
    try:
        while not over.is_set():
            _send(signal.SIGCONT, ours)
            first = time.perf_counter()
            over.wait(turn_s)
            _send(signal.SIGSTOP, ours)
            _send(signal.SIGCONT, peer)
            second = time.perf_counter()
            over.wait(turn_s)
            _send(signal.SIGSTOP, peer)
            turns.append(Turn(first, second, time.perf_counter()))
    finally:
        _send(signal.SIGCONT, [*ours, *peer])
    return tuple(turns)


def sides(turns: Sequence[Turn], ours: Sequence[float], peer: Sequence[float]) -> tuple[Side, Side]:
    """Return both sides of a measurement, from the end times of their steps."""
    return (
        Side(ours, [(turn.ours, turn.peer) for turn in turns]),
        Side(peer, [(turn.peer, turn.end) for turn in turns]),
    )


def in_turns(scale: Scale, case: str, parts: Sequence[tuple[Side, Side]], target: float) -> Case:
    """Return the seconds per step of both sides: medians over turns in which both made steps.

    Smoke runs make too few steps for that. Their figures are means over all steps.

    Args:
        scale: size of the run.
        case: description of the case.
        parts: our side and that of the peer, for each part of the measurement.
        target: largest acceptable ratio.

    Raises:
        ValueError: there is no such turn.
    """
    pairs = [
        tuple(_seconds_per_step(side.ends, *turn) for side, turn in zip(part, both, strict=True))
        for part in parts
        for both in zip(part[0].turns, part[1].turns, strict=True)
    ]
    if scale.smoke:
        pairs = [(_mean(ours.ends), _mean(peer.ends)) for ours, peer in parts]
    if not any(map(all, pairs)):
        raise ValueError(
            f"{case}: no turn of {len(pairs)} with {FEWEST_STAMPS} steps of both sides"
        )
    a, b = zip(*[pair for pair in pairs if all(pair)], strict=True)
    return Case(case, median(a), median(b), unit="s", target=target, runs=len(a))


def _seconds_per_step(stamps: Sequence[float], start: float, end: float) -> float:
    """Return seconds per step within one turn. 0 if there were too few steps.

    The clock of `stamps` may differ by less than half a turn, because a side makes steps only in
    its own turn.
    """
    margin = (end - start) / 2
    own = [stamp for stamp in stamps if start - margin < stamp < end + margin]
    return _mean(own) if len(own) >= FEWEST_STAMPS else 0.0


def _mean(stamps: Sequence[float]) -> float:
    """Return the mean seconds between two stamps."""
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def _send(what: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, what)
