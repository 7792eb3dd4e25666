"""Table of stored runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.views import formatting, html

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.records import RunState
    from nbdist.views.run.summary import Reached

_HEADER = ("", "id", "name", "started", "status", "workers", "steps", "loss", "duration")
_NUMBERS = (0, 5, 6, 8)
_NAME_WIDTH = 44


@dataclass(frozen=True)
class RunLine:
    """One line about a run.

    Attributes:
        position: index in the runs.
        state: state of the run.
        reached: latest step, epoch and loss.
    """

    position: int
    state: RunState
    reached: Reached


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
    state, reached = run.state, run.reached
    return [
        str(run.position),
        state.short_id,
        formatting.shortened(state.title, _NAME_WIDTH),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(state.began)),
        state.status,
        str(len(state.workers)),
        f"{reached.step:,}" if reached.step else "",
        f"{reached.value:.4g} ({reached.definition})" if reached.metric == "loss" else "",
        formatting.duration(state.seconds) if state.ended else "",
    ]
