"""Workers of a cluster: progress of their start, and the state of each."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, Self

from nbdist.records import Phase, WorkerState
from nbdist.views import formatting, html
from nbdist.views.result_table import ResultTable
from nbdist.views.surface import new_surface

if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = ("rank", "host", "pid", "devices", "memory", "state")
_NUMBERS = (0, 2, 4)
_NAME_WIDTH = 30
_DONE = ("✓", "var(--jp-success-color1,#388e3c)")
_UNDER_WAY = ("…", "var(--jp-info-color1,#0288d1)")
_FAILED = ("✗", "var(--jp-error-color1,#d32f2f)")


@dataclass(frozen=True, repr=False)
class StatusPicture(ResultTable[WorkerState]):
    """Workers, one row each and ordered by rank, as `%dist_status` shows them."""

    title: str
    workers: tuple[WorkerState, ...]

    @property
    def rows(self) -> tuple[WorkerState, ...]:
        return self.workers

    def _fields(self, row: WorkerState) -> dict[str, object]:
        """Return the fields, with devices as text and one column per package version."""
        fields = dict(row) | {"devices": formatting.devices(row.devices)} | row.versions
        del fields["versions"]
        return fields

    def _columns(self) -> list[str]:
        fields = [name for name in WorkerState.__struct_fields__ if name != "versions"]
        return fields + list(dict.fromkeys(name for w in self.workers for name in w.versions))

    def html(self) -> str:
        table = html.table(_HEADER, [_row(worker) for worker in self.workers], _NUMBERS)
        return html.box(self.title, table, html.faint(_versions(self.workers)))

    def lines(self) -> list[str]:
        rows = [_row(worker) for worker in self.workers]
        return [self.title, *html.text_table(_HEADER, rows, _NUMBERS), _versions(self.workers)]


def status(workers: tuple[WorkerState, ...], seed: int) -> StatusPicture:
    """Return the current workers, with their counts by state and the seed of the cluster."""
    counts = {state: sum(w.state == state for w in workers) for state in ("idle", "busy", "dead")}
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    title = f"nbdist: {len(workers)} workers, {text}, seed {seed}"
    return StatusPicture(title=title, workers=workers)


@dataclass(frozen=True)
class StartPicture:
    """Phases of a start, and the workers at its end.

    Attributes:
        progress: progress of the current phase.
    """

    title: str
    done: tuple[Phase, ...] = ()
    under_way: str = ""
    progress: str = ""
    failed: bool = False
    workers: tuple[WorkerState, ...] = field(default=())

    def html(self) -> str:
        rows = [
            _row_of(_DONE, phase.name, formatting.duration(phase.seconds), phase.detail)
            for phase in self.done
        ]
        if self.under_way:
            sign = _FAILED if self.failed else _UNDER_WAY
            rows.append(_row_of(sign, self.under_way, "", self.progress))
        style = "display:grid;grid-template-columns:auto auto auto 1fr;column-gap:10px"
        parts = [f'<div style="{style}">{"".join(rows)}</div>']
        if self.workers:
            table = html.table(_HEADER[:4], [_row(w)[:4] for w in self.workers], _NUMBERS[:2])
            parts += [table, html.faint(_versions(self.workers))]
        return html.box(self.title, *parts)

    def lines(self) -> list[str]:
        times = [formatting.duration(phase.seconds) for phase in self.done]
        text = [
            f"  ✓ {phase.name.ljust(_NAME_WIDTH)} {time:>7}  {phase.detail}".rstrip()
            for phase, time in zip(self.done, times, strict=True)
        ]
        if self.failed:
            text.append(f"  ✗ {self.under_way}")
        elif self.progress:
            text.append(f"  … {self.under_way}: {self.progress}")
        if self.workers:
            rows = [_row(worker)[:4] for worker in self.workers]
            text += [*html.text_table(_HEADER[:4], rows, _NUMBERS[:2]), _versions(self.workers)]
        return [self.title, *text]


def _row(worker: WorkerState) -> tuple[str, ...]:
    return (
        str(worker.rank),
        worker.host,
        str(worker.pid),
        formatting.devices(worker.devices),
        formatting.size(worker.memory_bytes) if worker.memory_bytes else "",
        worker.state,
    )


def _versions(workers: tuple[WorkerState, ...]) -> str:
    """Return one line if all workers have equal versions, else the ranks of each version."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for worker in workers:
        groups.setdefault(tuple(worker.versions.items()), []).append(worker.rank)
    texts = [
        (", ".join(f"{name} {version}" for name, version in versions), formatting.ranks(ranks))
        for versions, ranks in groups.items()
    ]
    if len(texts) == 1:
        return texts[0][0]
    return "versions differ: " + "; ".join(f"rank {ranks}: {text}" for text, ranks in texts)


def _row_of(sign: tuple[str, str], name: str, seconds: str, detail: str) -> str:
    """Return the four grid cells of a row."""
    mark, colour = sign
    figures = "text-align:right;font-variant-numeric:tabular-nums"
    return (
        f'<span style="color:{colour}">{mark}</span><span>{escape(name)}</span>'
        f'<span style="{figures}">{seconds}</span>{html.faint(detail, "span")}'
    )


class StartView:
    """Live view of the phases of a start."""

    def __init__(self, title: str) -> None:
        self._surface = new_surface()
        self._picture = StartPicture(title)

    def run(self, name: str, work: Callable[[], str | None]) -> None:
        self._show(under_way=name, progress="")
        started = time.perf_counter()
        detail = work() or ""
        phase = Phase(name=name, seconds=time.perf_counter() - started, detail=detail)
        self._show(done=(*self._picture.done, phase), under_way="", progress="")

    def show_message(self, text: str) -> None:
        """Show the progress of the current phase."""
        if text != self._picture.progress:
            self._show(progress=text)

    def finish(self, title: str, workers: tuple[WorkerState, ...]) -> None:
        seconds = sum(phase.seconds for phase in self._picture.done)
        self._show(title=f"{title} ({formatting.duration(seconds)})", workers=workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._show(failed=True)

    def _show(self, **changes: Any) -> None:
        self._picture = replace(self._picture, **changes)
        self._surface.show(self._picture)
