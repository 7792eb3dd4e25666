"""Candidates timed in turn, and which of them is chosen."""

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
"""Of calls that are timed; `FEWEST_ROUNDS` may take longer."""

HOPELESS = 3.0
"""Times the fastest: what is slower than that in its first rounds is not timed any further."""

_LOOKED_AT = 2
_WARM_UPS = 3
"""Calls before the first that is timed; the first of them compiles."""

LEAST_GAIN = 0.02
"""Of the default's time: two layouts of one program differ by as much between two processes."""

_WIDTH = 160


class Contender(ABC):
    """A way of making the call.

    Attributes:
        name: of it.
        words: where it runs.
    """

    name: str
    words: str

    @abstractmethod
    def prepare(self) -> Any:
        """What one call needs; not timed."""

    @abstractmethod
    def call(self, prepared: Any) -> Any:
        """The call; its result may be under way still."""


@dataclass(frozen=True)
class Choice:
    """The name of a candidate, and why it."""

    name: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """What trials came to.

    Attributes:
        choice: of a candidate.
        timed: what was measured, in the order of the candidates.
        left_out: candidates that failed.
    """

    choice: Choice
    timed: tuple[Timed, ...]
    left_out: tuple[LeftOut, ...]


def alone(figures: np.ndarray) -> np.ndarray:
    """What several processes agree upon, where each decides for itself: its own figures."""
    return figures


def tried(contenders: Sequence[Contender], most: Most) -> Verdict:
    """Warm them up, time them in turn, and choose.

    Args:
        contenders: `default` first.
        most: of figures of shape (n,), each the greatest of all processes that do the same.
    """
    failures = [_warmed(contender) for contender in contenders]
    failed = most(np.array([bool(said) for said in failures], np.float32))
    there = [c for c, wrong in zip(contenders, failed, strict=True) if not wrong]
    left_out = tuple(
        LeftOut(name=contender.name, why=said or "it failed in another process")
        for contender, said, wrong in zip(contenders, failures, failed, strict=True)
        if wrong
    )
    timed = race(there, most)
    return Verdict(choose(timed), timed, left_out)


def _warmed(contender: Contender) -> str:
    """What went wrong, in a line; nothing, as a rule."""
    try:
        for _ in range(_WARM_UPS):
            _seconds(contender)
    except Exception as error:  # noqa: BLE001 - whatever a platform or a layout cannot do: it is left out, and said
        line = str(error).partition("\n")[0]
        said = f"{type(error).__name__}: {line}"
        return said if len(said) <= _WIDTH else f"{said[: _WIDTH - 1]}…"
    return ""


def _seconds(contender: Contender) -> float:
    prepared = contender.prepare()
    began = time.perf_counter()
    jax.block_until_ready(contender.call(prepared))
    return time.perf_counter() - began


@dataclass
class _Lane:
    """What a candidate took in the rounds that it was in."""

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
    """Rounds over all candidates, so that what else the machine does hits them alike.

    What is agreed upon decides how many, and which candidates go on: all processes do the same.
    """
    lanes = [_Lane(contender) for contender in contenders]
    going = list(lanes)
    spent = 0.0
    for number in range(1, MOST_ROUNDS + 1 if lanes else 1):
        for lane, seconds in zip(going, most(_round(going, number % 2 == 0)), strict=True):
            lane.seconds.append(float(seconds))
            spent += float(seconds)
        if number >= _LOOKED_AT:
            going = _hopeful(going)
        if number >= FEWEST_ROUNDS and (spent >= BUDGET_S or len(going) == 1):
            break
    return tuple(lane.timed() for lane in lanes)


def _round(lanes: Sequence[_Lane], is_backwards: bool) -> np.ndarray:
    """Each one's seconds, in the order of `lanes`."""
    order = reversed(lanes) if is_backwards else lanes
    taken = {lane.contender.name: _seconds(lane.contender) for lane in order}
    return np.array([taken[lane.contender.name] for lane in lanes], np.float32)


def _hopeful(lanes: list[_Lane]) -> list[_Lane]:
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
    """From the first quartile to the third."""
    first, third = np.percentile(seconds, (25, 75))
    return float(third - first)


def choose(timed: Sequence[Timed]) -> Choice:
    """The fastest that is faster than the default by more than the noise; else the default.

    The noise is the larger of half of either one's spread and `LEAST_GAIN` of the default.

    Args:
        timed: what was measured; where the default is not among it, it cannot run.
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
    return Choice(DEFAULT, "the only one" if alone_left else "nothing is faster beyond the noise")


def noise(default: Timed, other: Timed) -> float:
    """Seconds by which two medians may differ without meaning."""
    return max(default.spread_s / 2, other.spread_s / 2, LEAST_GAIN * default.median_s)


def _fastest(timed: Sequence[Timed]) -> Choice:
    if not timed:
        return Choice(DEFAULT, "no candidate ran")
    best = min(timed, key=lambda one: one.median_s)
    return Choice(best.name, "the fastest of those that run: the default does not")
