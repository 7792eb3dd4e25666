"""Table of stored runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.views import formatting, html

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.records import RunState

_HEADER = ("", "id", "started", "status", "cell", "workers", "steps", "loss", "duration")
_NUMBERS = (0, 5, 6, 7, 8)
_CELL_WIDTH = 44


@dataclass(frozen=True)
class RunLine:
    """One line about a run.

    Attributes:
        position: index in the runs.
        state: state of the run.
        steps: number of reported steps.
        loss: last loss, NaN if there is none.
    """

    position: int
    state: RunState
    steps: int
    loss: float

    @property
    def text(self) -> str:
        """Summary: `finished, 4 workers, 100 steps, 3.1 s, loss 0.2`."""
        state = self.state
        parts = [state.status, formatting.count(len(state.workers), "worker")]
        parts += [formatting.count(self.steps, "step")] if self.steps else []
        parts += [formatting.duration(state.ended - state.began)] if state.ended else []
        parts += [] if math.isnan(self.loss) else [f"loss {self.loss:.4g}"]
        return ", ".join(parts)


@dataclass(frozen=True)
class RunsPicture:
    """Table that `nbdist.runs()` shows.

    Attributes:
        title: line above the table.
        runs: runs in their order.
        more: number of further runs that are not shown.
        refused: reasons for runs that cannot be read, by id.
    """

    title: str
    runs: Sequence[RunLine]
    more: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    def html(self) -> str:
        parts = [html.table(_HEADER, self._rows(), _NUMBERS)] if self.runs else []
        return html.box(self.title, *parts, *map(html.line, self._rest()))

    def lines(self) -> list[str]:
        table = html.text_table(_HEADER, self._rows(), _NUMBERS) if self.runs else []
        return [self.title, *table, *self._rest()]

    def _rows(self) -> list[list[str]]:
        return [_row(run) for run in self.runs]

    def _rest(self) -> list[str]:
        older = [f"and {formatting.count(self.more, 'older run')}"] if self.more else []
        return older + [f"not listed: run {name}: {why}" for name, why in self.refused.items()]


def _row(run: RunLine) -> list[str]:
    state = run.state
    return [
        str(run.position),
        state.id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(state.began)),
        state.status,
        formatting.shortened(state.header, _CELL_WIDTH),
        str(len(state.workers)),
        f"{run.steps:,}" if run.steps else "",
        "" if math.isnan(run.loss) else f"{run.loss:.4g}",
        formatting.duration(state.ended - state.began) if state.ended else "",
    ]
