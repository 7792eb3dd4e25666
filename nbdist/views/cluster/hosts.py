"""Hosts: what each is, and what was found when they were looked at."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TYPE_CHECKING

from nbdist.views import formatting, html

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Examination, HostFacts, Trouble

_HOSTS = ("rank", "host", "address", "devices", "Python", "folder", "environment", "connection")
_LOOKED_AT = ("rank", "host", "memory free", "disk free", "clock", "to the others", "to the next")
_FATAL = ("✗", "var(--jp-error-color1,#d32f2f)")
_MINOR = ("!", "var(--jp-warn-color1,#f57c00)")
_WELL = ("✓", "var(--jp-success-color1,#388e3c)")
_UNKNOWN = "-"


@dataclass(frozen=True)
class HostsPicture:
    """What `%dist_hosts` shows.

    Attributes:
        facts: of each rank.
        addresses: to which the others connect, likewise.
        environments: the names of its host's own variables, likewise.
        connections: how this machine reaches it, likewise.
    """

    facts: tuple[HostFacts, ...]
    addresses: tuple[str, ...]
    environments: tuple[tuple[str, ...], ...]
    connections: tuple[str, ...]

    def html(self) -> str:
        return html.box(self._title, html.table(_HOSTS, list(self._rows()), (0,)))

    def lines(self) -> list[str]:
        return [self._title, *html.text_table(_HOSTS, list(self._rows()), (0,))]

    @property
    def _title(self) -> str:
        workers = formatting.count(len(self.facts), "worker")
        return f"nbdist: {workers} on {_hosts(self.facts)}"

    def _rows(self) -> Iterator[list[str]]:
        own = zip(self.facts, self.addresses, self.environments, self.connections, strict=True)
        for one, address, environment, connection in own:
            python = f"{one.python} ({one.versions['python']})"
            yield [
                str(one.rank),
                one.host,
                address,
                _devices(one),
                python,
                one.folder,
                " ".join(environment) or _UNKNOWN,
                connection,
            ]


@dataclass(frozen=True)
class DoctorPicture:
    """What `%dist_doctor` shows."""

    examination: Examination

    def html(self) -> str:
        table = html.table(_LOOKED_AT, list(self._rows()), (0, 2, 3, 4, 5, 6))
        return html.box(self._title, table, *map(_trouble, self._found()))

    def lines(self) -> list[str]:
        table = html.text_table(_LOOKED_AT, list(self._rows()), (0, 2, 3, 4, 5, 6))
        found = [
            f"{sign[0]} {text}" + (f"\n    {hint}" if hint else "")
            for sign, text, hint in self._found()
        ]
        return [self._title, *table, "", *found]

    @property
    def _title(self) -> str:
        examined = self.examination
        troubles = formatting.count(len(examined.troubles), "trouble")
        took = formatting.duration(examined.seconds)
        return f"nbdist: {_hosts(examined.facts)} looked at in {took}: {troubles}"

    def _rows(self) -> Iterator[list[str]]:
        examined = self.examination
        for one in examined.facts:
            reached = [r for r in examined.reaches.get(one.rank, ()) if not r.fault]
            latencies = [r.latency_s for r in reached]
            speeds = [r.bytes_per_s for r in reached if r.bytes_per_s]
            yield [
                str(one.rank),
                one.host,
                formatting.memory(one.free_bytes),
                formatting.memory(one.disk_bytes),
                self._clock(examined.skew_s.get(one.rank, 0.0)),
                formatting.brief(median(latencies)) if latencies else _UNKNOWN,
                f"{formatting.size(max(speeds))}/s" if speeds else _UNKNOWN,
            ]

    def _clock(self, skew_s: float) -> str:
        """Within what can be told of it."""
        error_s = self.examination.skew_error_s
        if abs(skew_s) <= error_s:
            return f"± {formatting.brief(error_s)}"
        return f"{'+' if skew_s > 0 else '-'}{formatting.brief(abs(skew_s))}"

    def _found(self) -> Sequence[tuple[tuple[str, str], str, str]]:
        """A sign, what was found, and what to do."""
        if not self.examination.troubles:
            return [(_WELL, "all well", "")]
        return [
            (_FATAL if trouble.is_fatal else _MINOR, _said(trouble), trouble.advice)
            for trouble in self.examination.troubles
        ]


def _said(trouble: Trouble) -> str:
    return f"{trouble.where}: {trouble.what}"


def _trouble(found: tuple[tuple[str, str], str, str]) -> str:
    (sign, colour), text, hint = found
    mark = f'<span style="color:{colour};margin-right:6px">{sign}</span>'
    below = html.faint(hint) if hint else ""
    return f'<div style="margin-top:4px">{mark}{escape(text)}{below}</div>'


def _hosts(facts: Sequence[HostFacts]) -> str:
    return formatting.count(len({one.host for one in facts}), "host")


def _devices(one: HostFacts) -> str:
    kinds = [gpu.name for gpu in one.gpus]
    if not kinds:
        return formatting.count(one.cpus, "core")
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
