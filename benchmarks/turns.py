"""Two sides that train at the same time in the same run, of which only one is ever awake.

Each side is a few processes in an endless loop of steps. They are stopped and continued (SIGSTOP,
SIGCONT) in turns of a fraction of a second: noise hits both alike, and the side that waits takes no
processor time, whatever its threads do.
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

FEWEST_STAMPS = 4
"""In a turn that counts."""


@dataclass(frozen=True)
class Turn:
    """When both sides have been awake once, in seconds of `time.perf_counter`."""

    ours: float
    peer: float
    end: float


def take_turns(
    ours: Sequence[int], peer: Sequence[int], turn_s: float, over: Event
) -> tuple[Turn, ...]:
    """Wake the processes of both sides in turn until `over` is set, then all of them."""
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


def in_turns(
    case: str, turns: Sequence[Turn], ours: Sequence[float], peer: Sequence[float], target: float
) -> Case:
    """The seconds per step of both sides, medians over the turns in which both made steps.

    Args:
        case: what was measured.
        turns: when either side was awake.
        ours: when our steps ended, of one process.
        peer: the same of the peer's.
        target: the largest ratio that is good enough.
    """
    pairs = [
        (
            _seconds_per_step(ours, turn.ours, turn.peer),
            _seconds_per_step(peer, turn.peer, turn.end),
        )
        for turn in turns
    ]
    a, b = zip(*[pair for pair in pairs if all(pair)], strict=True)
    return Case(case, median(a), median(b), unit="s", target=target, runs=len(a))


def _seconds_per_step(stamps: Sequence[float], start: float, end: float) -> float:
    """Within one turn; 0 where there were too few.

    The clock of `stamps` may differ by less than half a turn: a side makes steps in its own only.
    """
    margin = (end - start) / 2
    own = [stamp for stamp in stamps if start - margin < stamp < end + margin]
    return (own[-1] - own[0]) / (len(own) - 1) if len(own) >= FEWEST_STAMPS else 0.0


def _send(what: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, what)
