"""Summary of a run in one line: its end, its workers, its last step and its loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import Metrics, RunKind, RunState

_OUTCOMES = {
    "running": "running",
    "stopping": "stopping",
    "finished": "finished in",
    "stopped": "stopped after",
    "failed": "failed after",
    "interrupted": "interrupted after",
    "lost": "lost after",
}
_ERROR_LETTERS = 200
_LARGE_FACTOR = 2.0


@dataclass(frozen=True)
class Reached:
    """Latest reports of a run.

    Attributes:
        epoch: last epoch; 0 if there is none.
        step: last step; 0 if there is none.
        metric: `loss`, or the first reported metric; empty if there is none.
        value: value in the latest report: reduced over ranks, or the mean of the ranks.
        definition: definition of the value: `last step`, `epoch mean` of a `fit`, `last epoch` or
            `last report`.
    """

    epoch: int = 0
    step: int = 0
    metric: str = ""
    value: float = math.nan
    definition: str = ""

    @classmethod
    def of(cls, reports: Iterable[Metrics], kind: RunKind) -> Reached:
        """Find the latest reports.

        Args:
            reports: reports of the ranks, at least the last ones of each.
            kind: kind of the run's steps.
        """
        found = sorted(reports, key=lambda one: one.time_s)
        epoch = max((one.epoch for one in found), default=0)
        step = max((one.step for one in found), default=0)
        names = [name for one in found for name in (*one.shared, *one.own)]
        if not names:
            return cls(max(epoch, 0), max(step, 0))
        name = "loss" if "loss" in names else names[0]
        found = [one for one in found if name in one.shared or name in one.own]
        if kind != "fit":  # its epochs contain other means than its steps
            found = [one for one in found if one.step >= 0] or found
        found = [one for one in found if one.step >= 0 or one.epoch >= 0] or found
        position = _position(found[-1])
        own = {
            one.rank: one.own[name]
            for one in found
            if name in one.own and _position(one) == position
        }
        value = found[-1].shared.get(name, sum(own.values()) / max(1, len(own)))
        definition = "epoch mean" if kind == "fit" else f"last {position}"
        return cls(max(epoch, 0), max(step, 0), name, value, definition)

    def __str__(self) -> str:
        """Format the metric with its definition: `loss 0.41 (last step)`."""
        return f"{self.metric} {self.value:.4g} ({self.definition})" if self.metric else ""


def described(state: RunState, reached: Reached) -> str:
    """Describe a run: `stopped after 6.6 s, 4 workers, step 12 of 100, loss 0.41 (last step)`."""
    outcome = _OUTCOMES[state.status]
    parts = [
        f"{outcome} {formatting.duration(state.seconds)}" if state.is_over else outcome,
        formatting.count(len(state.workers), "worker"),
    ]
    if reached.epoch > 0:
        parts.append(_of("epoch", reached.epoch, state.epochs))
    if reached.step > 0:
        parts.append(_of("step", reached.step, state.steps))
    if reached.metric:
        parts.append(str(reached))
    if (factor := _beyond_plan(state)) is not None:
        parts.append(f"step time {float(f'{factor:.2g}'):,g} times the planned one")
    if state.recoveries:
        parts.append(f"recovered {formatting.times(len(state.recoveries))}")
    if state.error:
        first, _, _ = state.error.partition("\n")
        parts.append(formatting.shortened(first, _ERROR_LETTERS))
    return ", ".join(parts)


def titled(state: RunState) -> str:
    """Return name and short id of a run: `Cell 30, fit, 20:27 (3fa9c1)`."""
    return f"{state.title} ({state.short_id})" if state.id else state.title


def _beyond_plan(state: RunState) -> float | None:
    """Return measured step time / planned step time if they differ a lot.

    The run view explains it (`labextension/src/run/planned.ts`).
    """
    if state.plan is None or not (state.plan.planned.step_s and state.plan.measured.step_s):
        return None
    factor = state.plan.measured.step_s / state.plan.planned.step_s
    return factor if not 1 / _LARGE_FACTOR <= factor <= _LARGE_FACTOR else None


def _position(report: Metrics) -> str:
    return "step" if report.step >= 0 else "epoch" if report.epoch >= 0 else "report"


def _of(noun: str, number: int, total: int) -> str:
    return f"{noun} {number:,} of {total:,}" if total > 0 else f"{noun} {number:,}"
