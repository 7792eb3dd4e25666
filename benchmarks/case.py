"""Benchmark cases, and alternate measurement of two sides under equal noise."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Case:
    """Figure of nbdist and of a peer, both medians over `runs`. Smaller is better.

    Attributes:
        case: description of the case.
        ours: figure of nbdist.
        peer: figure of the peer.
        unit: unit of both.
        target: largest acceptable ratio of ours to the peer.
        runs: number of measurements of each side.
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
    """Measure both sides alternately. Ours is first in even rounds and last in odd ones."""
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
    """Measure both sides alternately and return a case with their medians."""
    a, b = interleave(ours, peer, runs)
    return Case(case, median(a), median(b), unit, target, runs)
