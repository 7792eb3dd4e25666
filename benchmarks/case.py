"""One measured case, and how two sides are measured so that noise hits both alike."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Case:
    """A figure of ours beside a peer's, both medians over `runs`; smaller is better.

    Attributes:
        case: what was measured.
        ours: our figure.
        peer: the peer's.
        unit: of both.
        target: the largest ratio (ours over the peer's) that is good enough.
        runs: how often each side was measured.
    """

    case: str
    ours: float
    peer: float
    unit: str
    target: float
    runs: int

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    def met(self) -> bool:
        return self.ratio <= self.target

    def line(self, benchmark: str) -> dict[str, object]:
        return {
            "benchmark": benchmark,
            "case": self.case,
            "ours": round(self.ours, 6),
            "peer": round(self.peer, 6),
            "unit": self.unit,
            "ratio": round(self.ratio, 3),
            "target": self.target,
            "runs": self.runs,
        }


def interleave(
    ours: Callable[[], float], peer: Callable[[], float], runs: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Measure both sides in turn, ours first in even rounds and last in odd ones."""
    a: list[float] = []
    b: list[float] = []
    for number in range(runs):
        if number % 2:
            b.append(peer())
            a.append(ours())
        else:
            a.append(ours())
            b.append(peer())
    return a, b


def compare(
    case: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    *,
    unit: str,
    target: float,
    runs: int,
) -> Case:
    """Both sides measured in turn, as a `Case` of their medians."""
    a, b = interleave(ours, peer, runs)
    return Case(case, median(a), median(b), unit, target, runs)
