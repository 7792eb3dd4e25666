"""Benchmark cases, their sizes, and alternate measurement of two sides under equal noise."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
STRATEGIES = "mirrored", "pjrt"


@dataclass(frozen=True)
class Scale:
    """Sizes and repetitions of a run of the benchmarks.

    Attributes:
        smoke: True to run each case once at a tiny size. The figures then mean nothing.
        strategies: strategies to measure, in this order.
    """

    smoke: bool = False
    strategies: tuple[str, ...] = STRATEGIES

    def of(self, full: T, smoke: T) -> T:
        """Return the size of this run."""
        return smoke if self.smoke else full

    def runs(self, full: int) -> int:
        """Return the number of repetitions of this run."""
        return self.of(full, 1)


@dataclass(frozen=True)
class Skipped:
    """A case that cannot run on this machine.

    Attributes:
        case: description of the case.
        reason: the lacking requirement.
    """

    case: str
    reason: str

    def met(self) -> bool:
        return True

    def line(self, benchmark: str) -> dict[str, object]:
        return {"benchmark": benchmark, "case": self.case, "skipped": self.reason}


@dataclass(frozen=True)
class Case:
    """Figure of nbdist and of a peer, both medians over `runs`. Smaller is better.

    Attributes:
        case: description of the case. It is the same in each run.
        ours: figure of nbdist.
        peer: figure of the peer.
        unit: unit of both.
        target: largest acceptable ratio of ours to the peer.
        runs: number of measurements of each side.
        detail: description of this run's result, such as a selected plan.
    """

    case: str
    ours: float
    peer: float
    unit: str
    target: float
    runs: int
    detail: str = ""

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
            **({"detail": self.detail} if self.detail else {}),
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
