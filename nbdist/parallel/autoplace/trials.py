"""Trials of candidates in turn, and the choice of one."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.records.autoplace import DEFAULT, LeftOut, Timed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Most = Callable[[np.ndarray], np.ndarray]

FEWEST_ROUNDS = 5
MOST_ROUNDS = 100
BUDGET_S = 1.0
"""Time limit for timed calls; `FEWEST_ROUNDS` may take longer."""

HOPELESS = 3.0
"""Ratio to the fastest candidate from which on a candidate is dropped after its first rounds."""

_LOOKED_AT = 2
_WARM_UPS = 3
"""Calls before the first timed one; the first of them compiles."""

LEAST_GAIN = 0.02
"""Smallest gain as a share of the default's time: two layouts of one program differ by as much
between two processes."""

_WIDTH = 160


class Contender(ABC):
    """A candidate that can be timed.

    Attributes:
        name: short name.
        words: description of its place.
    """

    name: str
    words: str

    @abstractmethod
    def prepare(self) -> Any:
        """Prepare the inputs of one call; this is not timed."""

    @abstractmethod
    def call(self, prepared: Any) -> Any:
        """Make the call; its result may still be in progress."""


@dataclass(frozen=True)
class Choice:
    """The name of a candidate, and the reason."""

    name: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """Results of trials.

    Attributes:
        choice: the chosen candidate.
        timed: measurements, in the order of the candidates.
        left_out: candidates that failed.
    """

    choice: Choice
    timed: tuple[Timed, ...]
    left_out: tuple[LeftOut, ...]


def alone(figures: np.ndarray) -> np.ndarray:
    """Return a process's own figures, if it decides alone."""
    return figures


def tried(contenders: Sequence[Contender], most: Most) -> Verdict:
    """Warm up the candidates, time them in turn, and choose one.

    Args:
        contenders: the candidates, `default` first.
        most: returns the maximum over all processes for each figure, of shape (n,).
    """
    failures = [_warmed(contender) for contender in contenders]
    failed = most(np.array([bool(reason) for reason in failures], np.float32))
    there = [c for c, wrong in zip(contenders, failed, strict=True) if not wrong]
    left_out = tuple(
        LeftOut(name=contender.name, why=reason or "it failed in another process")
        for contender, reason, wrong in zip(contenders, failures, failed, strict=True)
        if wrong
    )
    timed = race(there, most)
    return Verdict(choose(timed), timed, left_out)


def _warmed(contender: Contender) -> str:
    """Return the error of a candidate in one line; empty if it runs."""
    try:
        for _ in range(_WARM_UPS):
            _seconds(contender)
    except Exception as error:  # noqa: BLE001 - the verdict contains the error of each candidate that fails
        line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {line}"
        return reason if len(reason) <= _WIDTH else f"{reason[: _WIDTH - 1]}…"
    return ""


def _seconds(contender: Contender) -> float:
    prepared = contender.prepare()
    began = time.perf_counter()
    jax.block_until_ready(contender.call(prepared))
    return time.perf_counter() - began


@dataclass
class _Series:
    """Times of a candidate in its rounds."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    note: str = ""

    def timed(self) -> Timed:
        return Timed(
            name=self.contender.name,
            words=self.contender.words,
            median_s=statistics.median(self.seconds),
            spread_s=spread(self.seconds),
            rounds=len(self.seconds),
            note=self.note,
        )


def race(contenders: Sequence[Contender], most: Most) -> tuple[Timed, ...]:
    """Time all candidates in rounds, so that other load affects them equally.

    The number of rounds and the remaining candidates depend on agreed figures, so that all
    processes do the same.
    """
    lanes = [_Series(contender) for contender in contenders]
    going = list(lanes)
    spent = 0.0
    for number in range(1, MOST_ROUNDS + 1 if lanes else 1):
        for lane, seconds in zip(going, most(_round(going, number % 2 == 0)), strict=True):
            lane.seconds.append(float(seconds))
            spent += float(seconds)
        if number >= _LOOKED_AT:
            going = _remaining(going)
        if number >= FEWEST_ROUNDS and (spent >= BUDGET_S or len(going) == 1):
            break
    return tuple(lane.timed() for lane in lanes)


def _round(lanes: Sequence[_Series], is_backwards: bool) -> np.ndarray:
    """Return the seconds of each candidate, in the order of `lanes`."""
    order = reversed(lanes) if is_backwards else lanes
    taken = {lane.contender.name: _seconds(lane.contender) for lane in order}
    return np.array([taken[lane.contender.name] for lane in lanes], np.float32)


def _remaining(lanes: list[_Series]) -> list[_Series]:
    best = min(statistics.median(lane.seconds) for lane in lanes)
    kept = []
    for lane in lanes:
        ratio = min(lane.seconds) / best
        if ratio > HOPELESS and lane.contender.name != DEFAULT:
            lane.note = f"dropped after {len(lane.seconds)} rounds, {ratio:.2g} times slower"
        else:
            kept.append(lane)
    return kept


def spread(seconds: Sequence[float]) -> float:
    """Return the distance from the first quartile to the third."""
    first, third = np.percentile(seconds, (25, 75))
    return float(third - first)


def choose(timed: Sequence[Timed]) -> Choice:
    """Choose the fastest candidate that beats the default beyond the noise; else the default.

    The noise is the larger of half of either spread and `LEAST_GAIN` of the default.

    Args:
        timed: measurements; if the default is missing, it cannot run.
    """
    default = next((one for one in timed if one.name == DEFAULT), None)
    if default is None:
        return _fastest(timed)
    gains = [one for one in timed if default.median_s - one.median_s > noise(default, one)]
    if gains:
        best = min(gains, key=lambda one: one.median_s)
        ratio = default.median_s / best.median_s
        return Choice(best.name, f"{ratio:.3g} times as fast as the default")
    alone_left = len(timed) == 1
    return Choice(
        DEFAULT, "the only candidate" if alone_left else "nothing is faster beyond the noise"
    )


def noise(default: Timed, other: Timed) -> float:
    """Return the difference in seconds of two medians that is not significant."""
    return max(default.spread_s / 2, other.spread_s / 2, LEAST_GAIN * default.median_s)


def _fastest(timed: Sequence[Timed]) -> Choice:
    if not timed:
        return Choice(DEFAULT, "no candidate ran")
    best = min(timed, key=lambda one: one.median_s)
    return Choice(best.name, "the fastest one that runs; the default does not run")
