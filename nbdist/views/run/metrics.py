"""Reported scalars as lines during a cell, and as a table afterwards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from nbdist.views import formatting, html

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from nbdist.records import Metrics

STEP_INTERVAL_S = 0.5
WAIT_S = 5.0


class MetricsLines:
    """Lines of metrics: one per epoch, and a few per second for steps.

    A line appears once. It waits at most `WAIT_S` for the reports of all ranks, then it names the
    ranks without a report. Later lines do not wait for a rank that has never reported.

    Args:
        ranks: ranks that run the cell.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._open: dict[tuple[int, int], dict[int, Metrics]] = {}
        self._since: dict[tuple[int, int], float] = {}
        self._late: dict[tuple[int, int], frozenset[int]] = {}
        self._awaited = self._ranks
        self._reported: set[int] = set()
        self._skipped = 0
        self._step_shown_at = 0.0

    def add(self, metrics: Metrics) -> None:
        """Add a report. A second report of a rank for the same position extends its first."""
        key = (metrics.epoch, metrics.step)
        self._reported.add(metrics.rank)
        self._awaited |= {metrics.rank}
        if metrics.rank in self._late.get(key, ()):  # its line has been shown
            self._late[key] -= {metrics.rank}
            return
        self._since.setdefault(key, time.monotonic())
        group = self._open.setdefault(key, {})
        if metrics.rank in group:
            first = group[metrics.rank]
            metrics = msgspec.structs.replace(
                metrics, own=first.own | metrics.own, shared=first.shared | metrics.shared
            )
        group[metrics.rank] = metrics

    def take(self, *, everything: bool = False) -> Iterator[str]:
        """Yield the complete lines in order, and incomplete ones with `everything`."""
        for key in list(self._open):
            group = self._open[key]
            missing = self._awaited - group.keys()
            if everything:
                missing &= self._reported
            elif missing and time.monotonic() - self._since[key] < WAIT_S:
                break
            del self._open[key], self._since[key]
            if missing:
                self._late[key] = missing
                self._awaited &= self._reported
            if key[1] < 0 or self._may_show_step():
                yield describe(group, missing)
        if everything and self._skipped:
            yield f"({self._skipped} further steps are in the run's metrics)"

    def restart(self) -> None:
        """Show lines again, because a recovery repeats their steps."""
        self._late.clear()

    def _may_show_step(self) -> bool:
        now = time.monotonic()
        if now - self._step_shown_at < STEP_INTERVAL_S:
            self._skipped += 1
            return False
        self._step_shown_at = now
        return True


def describe(group: Mapping[int, Metrics], missing: Collection[int] = ()) -> str:
    """Format reports of ranks: `epoch 2  loss 0.412 [0.41 0.42]  accuracy 0.88  1.2 s`.

    A value reduced over ranks is shown alone. Different values of ranks follow in brackets in rank
    order, after the reduced value or their mean. Ranks whose values are missing come last.
    """
    first = next(iter(group.values()))
    every = dict.fromkeys(n for m in group.values() for n in (*m.shared, *m.own))
    names = sorted(every, key=lambda name: name != "loss")
    parts = [_where(first)]
    for name in names:
        own = [m.own[name] for _, m in sorted(group.items()) if name in m.own]
        whole = first.shared.get(name, sum(own) / len(own) if own else float("nan"))
        alike = len(own) < 2 or all(value == own[0] for value in own)
        each = "" if alike else f" [{' '.join(f'{value:.4g}' for value in own)}]"
        parts.append(f"{name} {whole:.4g}{each}")
    parts.append(formatting.duration(max(m.time_s for m in group.values())))
    if missing and any(m.own for m in group.values()):
        parts.append(f"(rank {formatting.ranks(missing)} has not reported)")
    return "  ".join(part for part in parts if part)


def _where(metrics: Metrics) -> str:
    epoch = f"epoch {metrics.epoch}" if metrics.epoch >= 0 else ""
    step = f"step {metrics.step}" if metrics.step >= 0 else ""
    return f"{epoch} {step}".strip()


class MetricTable:
    """One metric by rank and epoch, or by rank and step.

    Args:
        metrics: reports of the ranks.
        name: name of the metric.
        title: line above the table.
    """

    def __init__(self, metrics: Sequence[Metrics], name: str, title: str) -> None:
        self._title = title
        chosen = [m for m in metrics if name in m.own or name in m.shared]
        by_epoch = any(m.epoch >= 0 for m in chosen)
        if by_epoch:
            chosen = [m for m in chosen if m.epoch >= 0]
        self._columns = list(dict.fromkeys(m.epoch if by_epoch else m.step for m in chosen))
        self._values: dict[int, dict[int, float]] = {}
        for m in chosen:
            column = m.epoch if by_epoch else m.step
            value = m.own.get(name, m.shared.get(name))
            if value is not None:
                self._values.setdefault(m.rank, {})[column] = value
        self._header = ["rank", *(f"{'epoch' if by_epoch else 'step'} {c}" for c in self._columns)]

    def _rows(self) -> list[list[str]]:
        return [
            [str(rank), *(_figure(values.get(column)) for column in self._columns)]
            for rank, values in sorted(self._values.items())
        ]

    def lines(self) -> list[str]:
        return [self._title, *html.text_table(self._header, self._rows(), range(len(self._header)))]

    def html(self) -> str:
        table = html.table(self._header, self._rows(), range(len(self._header)))
        return html.box(self._title, table)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return self.html()


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:#.4g}"
