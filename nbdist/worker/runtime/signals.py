"""Signals of training (`--watch`): gradient norm, parameter norm, update ratio, learning rate.

The norms are those of all parameters and of the gradients over the global batch. The parameters are
the arrays whose gradients the step takes. If it takes the gradient of one several times, the last
gradient counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import SIGNAL_STEPS, SIGNALS, Histogram
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.worker.runtime.rank_reporter import RankReporter

GRADIENTS, PARAMETERS, UPDATE, RATE = SIGNALS
BINS = 64
MOMENTS = ("low", "high", "sum", "square", "size", "bad")
"""Numbers before the counts in a row of `histogram_of`."""


class Signals(msgspec.Struct, frozen=True):
    """Signals of one step.

    Attributes:
        values: values by name.
        histograms: distributions by name.
    """

    values: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}

    def send_histograms(self, reporter: RankReporter, epoch: int, step: int) -> None:
        """Report the histograms. Those of all ranks are equal, so only rank 0 does."""
        if reporter.rank == 0:
            for name, histogram in self.histograms.items():
                reporter.report_media(name, epoch, step, histogram)


NO_SIGNALS = Signals()


def is_watched() -> bool:
    """Return True if the cell has the option `--watch`."""
    worker = context.if_any()
    return worker is not None and worker.request.options.watch is not None


def interval() -> int:
    """Return the number of steps between two histograms; 0 for none."""
    worker = context.if_any()
    return 0 if worker is None else worker.request.options.watch or 0


def is_due(steps: int = 1) -> bool:
    """Return True if the next steps of the cell include one with histograms.

    Args:
        steps: number of steps that run together.
    """
    return interval() > 0 and _includes(interval(), steps)


def is_recorded(steps: int = 1) -> bool:
    """Return True if the next steps of the cell have signals. The first step has them.

    Steps with signals have a program of their own, so other steps are unchanged.

    Args:
        steps: number of steps that run together.
    """
    if not is_watched():
        return False
    is_first = context.current().progress.step == 1
    return is_first or _includes(SIGNAL_STEPS, steps) or is_due(steps)


def _includes(every: int, steps: int) -> bool:
    last = context.current().progress.step + steps - 1
    return last // every > (last - steps) // every


def values_of(squares: Sequence[float], rates: dict[str, float]) -> dict[str, float]:
    """Return the signals of a step by name.

    Args:
        squares: sums of squares of gradients, parameters and updates; NaN for an unknown one.
        rates: learning rates.
    """
    gradients, parameters, updates = (math.sqrt(square) for square in squares)
    ratio = updates / parameters if parameters else math.nan
    found = {GRADIENTS: gradients, PARAMETERS: parameters, UPDATE: ratio}
    return {name: value for name, value in found.items() if value == value} | rates


def histogram_of(row: Sequence[float]) -> Histogram | None:
    """Return the histogram in a row: `MOMENTS`, then the counts. None without a finite value."""
    low, high, total, square, size, bad = map(float, row[: len(MOMENTS)])
    if not size:
        return None
    counts = row[len(MOMENTS) :]
    width = (high - low) / len(counts)
    mean = total / size
    return Histogram(
        edges=(*(low + i * width for i in range(len(counts))), high),
        counts=tuple(map(float, counts)),
        size=int(size),
        mean=mean,
        deviation=math.sqrt(max(0.0, square / size - mean * mean)),
        not_finite=int(bad),
    )


def note_missing(what: str, why: str) -> None:
    """Report once that a signal is not recorded, and why."""
    context.current().reporter.note_once("watch", f"--watch: no {what}: {why}")
