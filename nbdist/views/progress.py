"""How far a step cell is, in one line that is kept up to date."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from nbdist.views.surface import new_surface

if TYPE_CHECKING:
    from nbdist.records import Metrics, StepBegun

INTERVAL_S = 0.25
RECENT_STEPS = 200


class Progress:
    """A line of the epoch, the step, the loss and the time of a step.

    Args:
        begun: what the run said when it began.
        ranks: how many report each step.
    """

    def __init__(self, begun: StepBegun, ranks: int) -> None:
        self._begun = begun
        self._ranks = ranks
        self._surface = new_surface()
        self._shown_at = time.monotonic()
        self._open: dict[int, list[Metrics]] = {}
        self._latest: list[Metrics] = []
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, metrics: Metrics) -> None:
        """Take in a step of a rank."""
        reports = self._open.setdefault(metrics.step, [])
        reports.append(metrics)
        if len(reports) == self._ranks:
            self._latest = self._open.pop(metrics.step)
            self._times.append(reports[0].time_s)

    def flush(self, *, everything: bool = False) -> None:
        """Show it, at most every `INTERVAL_S`; with `everything`, as the last word."""
        now = time.monotonic()
        if self._latest and (everything or now - self._shown_at >= INTERVAL_S):
            self._surface.show(self._picture())
            self._shown_at = now

    def _picture(self) -> ProgressPicture:
        latest, total = self._latest[0], self._begun.steps
        words = [
            f"epoch {latest.epoch} of {self._begun.epochs}",
            f"step {latest.step:,}" + (f" of {total:,}" if total > 0 else ""),
        ]
        losses = [{**m.shared, **m.own}.get("loss") for m in self._latest]
        known = [loss for loss in losses if loss is not None]
        if known:
            words.append(f"loss {sum(known) / len(known):.4g}")
        between = [b - a for a, b in pairwise(self._times)]
        if between:
            words.append(f"{1000 * median(between):.3g} ms a step")
        words.append(f"{latest.time_s:.1f} s")
        return ProgressPicture(tuple(words), latest.step / total if total > 0 else None)


@dataclass(frozen=True)
class ProgressPicture:
    """The line; `part` of the run is done, if that is known."""

    words: tuple[str, ...]
    part: float | None

    def html(self) -> str:
        bar = "" if self.part is None else _bar(min(1.0, self.part))
        text = escape(" · ".join(self.words))
        return (
            '<div style="display:flex;align-items:center;gap:10px;font-size:13px;'
            "font-family:var(--jp-ui-font-family,system-ui,sans-serif);"
            "font-variant-numeric:tabular-nums;color:var(--jp-ui-font-color1,#212121);"
            f'padding:2px 0">{bar}<span>{text}</span></div>'
        )

    def lines(self) -> list[str]:
        return [" · ".join(self.words)]


def _bar(part: float) -> str:
    return (
        '<span role="progressbar" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{100 * part:.0f}" style="flex:none;width:160px;height:8px;'
        'border-radius:4px;background:var(--jp-border-color2,#e0e0e0);overflow:hidden">'
        f'<span style="display:block;width:{100 * part:.1f}%;height:100%;'
        'background:var(--jp-brand-color1,#1976d2)"></span></span>'
    )
