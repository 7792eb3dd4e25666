"""The workers of a cluster: how it starts, and what each is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from nbdist.views import html, labels

if TYPE_CHECKING:
    from nbdist.records import Phase, WorkerState

_HEADER = ("rank", "host", "pid", "devices", "memory", "state")
_NUMBERS = (0, 2, 4)
_NAME_WIDTH = 30


@dataclass(frozen=True)
class StatusPicture:
    """What `%dist_status` shows."""

    title: str
    workers: tuple[WorkerState, ...]

    def html(self) -> str:
        table = html.table(_HEADER, [_row(worker) for worker in self.workers], _NUMBERS)
        return html.box(self.title, table, _faint(_versions(self.workers)))

    def lines(self) -> list[str]:
        rows = [_row(worker) for worker in self.workers]
        return [self.title, *html.text_table(_HEADER, rows, _NUMBERS), _versions(self.workers)]


@dataclass(frozen=True)
class StartPicture:
    """The phases of a start, done and under way, and at its end the workers."""

    title: str
    done: tuple[Phase, ...] = ()
    under_way: str = ""
    failed: bool = False
    workers: tuple[WorkerState, ...] = field(default=())

    def html(self) -> str:
        rows = [
            f"<div>{_mark('✓', '--jp-success-color1', '#388e3c')} {escape(phase.name)} "
            f'<span style="font-variant-numeric:tabular-nums">{phase.seconds:.1f} s</span> '
            f"{_faint(phase.detail, 'span')}</div>"
            for phase in self.done
        ]
        if self.under_way:
            sign = (
                ("✗", "--jp-error-color1", "#d32f2f")
                if self.failed
                else ("…", "--jp-info-color1", "#0288d1")
            )
            rows.append(f"<div>{_mark(*sign)} {escape(self.under_way)}</div>")
        if self.workers:
            table = html.table(_HEADER[:4], [_row(w)[:4] for w in self.workers], _NUMBERS[:2])
            rows += [table, _faint(_versions(self.workers))]
        return html.box(self.title, *rows)

    def lines(self) -> list[str]:
        text = [
            f"  ✓ {phase.name.ljust(_NAME_WIDTH)} {phase.seconds:5.1f} s  {phase.detail}".rstrip()
            for phase in self.done
        ]
        if self.failed:
            text.append(f"  ✗ {self.under_way}")
        if self.workers:
            rows = [_row(worker)[:4] for worker in self.workers]
            text += [*html.text_table(_HEADER[:4], rows, _NUMBERS[:2]), _versions(self.workers)]
        return [self.title, *text]


def _row(worker: WorkerState) -> tuple[str, ...]:
    kinds = Counter((device.platform, device.kind) for device in worker.devices)
    devices = ", ".join(
        f"{count} x {platform}" + ("" if kind == platform else f" ({kind})")
        for (platform, kind), count in kinds.items()
    )
    return (
        str(worker.rank),
        worker.host,
        str(worker.pid),
        devices,
        labels.memory(worker.memory_bytes) if worker.memory_bytes else "",
        worker.state,
    )


def _versions(workers: tuple[WorkerState, ...]) -> str:
    """One line when all workers have the same, else who has what."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for worker in workers:
        groups.setdefault(tuple(worker.versions.items()), []).append(worker.rank)
    texts = [
        (", ".join(f"{name} {version}" for name, version in versions), labels.ranks(ranks))
        for versions, ranks in groups.items()
    ]
    if len(texts) == 1:
        return texts[0][0]
    return "versions differ: " + "; ".join(f"rank {ranks}: {text}" for text, ranks in texts)


def _mark(sign: str, variable: str, colour: str) -> str:
    style = f"color:var({variable},{colour});display:inline-block;width:1.2em"
    return f'<span style="{style}">{sign}</span>'


def _faint(text: str, tag: str = "div") -> str:
    return f'<{tag} style="color:var(--jp-ui-font-color2,#616161)">{escape(text)}</{tag}>'
