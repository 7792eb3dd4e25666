"""Hosts of a cluster and their problems."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TYPE_CHECKING

from nbdist.records import ResultRow, Trouble, bandwidths
from nbdist.views import formatting, html
from nbdist.views.result_table import ResultTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Examination, HostFacts, TpuPlace

_HOSTS = ("rank", "host", "address", "devices", "Python", "folder", "environment", "connection")
_EXAMINATION_HEADER = ("rank", "host", "memory free", "disk free", "clock", "latency", "bandwidth")
_LINKS = "Bandwidth between hosts, measured with TCP:"
_MATRIX_HOSTS = 12
_SLOWEST = 10
_FATAL = ("✗", "var(--jp-error-color1,#d32f2f)")
_MINOR = ("!", "var(--jp-warn-color1,#f57c00)")
_WELL = ("✓", "var(--jp-success-color1,#388e3c)")
_UNKNOWN = "-"


class HostRow(ResultRow, frozen=True):
    """Host of one rank.

    Attributes:
        rank: rank of the worker.
        host: name that the host reports.
        address: address to which other ranks connect.
        devices: GPUs, or the number of cores if there are none.
        cpus: number of cores that the rank may use.
        python: path of the Python executable.
        version: version of Python.
        folder: working directory.
        environment: names of variables set for this host.
        connection: connection from this machine.
        tpu: slice of TPUs and the host's number in it; empty without TPUs.
    """

    rank: int
    host: str
    address: str
    devices: str
    cpus: int
    python: str
    version: str
    folder: str
    environment: tuple[str, ...]
    connection: str
    tpu: str = ""


@dataclass(frozen=True, repr=False)
class HostsPicture(ResultTable[HostRow]):
    """Hosts, one row per rank, as `%dist_hosts` shows them.

    Attributes:
        facts: facts about the host of each rank.
        addresses: address of each rank for the other ranks.
        environments: names of variables set for each host.
        connections: connection from this machine to each rank.
        tpus: place of each host in slices of TPUs; empty without TPUs.
        tpu: description of the slices; empty without TPUs.
    """

    facts: tuple[HostFacts, ...]
    addresses: tuple[str, ...]
    environments: tuple[tuple[str, ...], ...]
    connections: tuple[str, ...]
    tpus: tuple[TpuPlace | None, ...] = ()
    tpu: str = ""

    @property
    def rows(self) -> tuple[HostRow, ...]:
        tpus = self.tpus or (None,) * len(self.facts)
        own = zip(
            self.facts, self.addresses, self.environments, self.connections, tpus, strict=True
        )
        return tuple(
            HostRow(
                rank=one.rank,
                host=one.host,
                address=address,
                devices=_devices(one),
                cpus=one.cpus,
                python=one.python,
                version=one.versions["python"],
                folder=one.folder,
                environment=environment,
                connection=connection,
                tpu=f"slice {tpu.slice_index}, host {tpu.worker}" if tpu else "",
            )
            for one, address, environment, connection, tpu in own
        )

    def _columns(self) -> list[str]:
        return list(HostRow.__struct_fields__)

    def html(self) -> str:
        table = html.table(self._header, self._joined(), (0,))
        return html.box(self._title, table, *map(html.faint, self._choices()))

    def lines(self) -> list[str]:
        table = html.text_table(self._header, self._joined(), (0,))
        return [self._title, *table, *self._choices()]

    def _choices(self) -> list[str]:
        """Return what nbdist chose on the hosts, a line for each choice."""
        by_choice: dict[str, list[int]] = {}
        host_of = {one.rank: one.host for one in self.facts}
        for one in self.facts:
            for choice in one.choices:
                by_choice.setdefault(choice, []).append(one.rank)
        return [
            f"{formatting.places(ranks, host_of)} {choice}" for choice, ranks in by_choice.items()
        ]

    @property
    def _header(self) -> tuple[str, ...]:
        return (*_HOSTS, "TPU") if self.tpu else _HOSTS

    def _joined(self) -> list[list[str]]:
        return formatting.joined(self._cells())

    @property
    def _title(self) -> str:
        workers = formatting.count(len(self.facts), "worker")
        tpu = f", {self.tpu}" if self.tpu else ""
        return f"nbdist: {workers} on {_hosts(self.facts)}{tpu}"

    def _cells(self) -> list[list[str]]:
        return [
            [
                str(row.rank),
                row.host,
                row.address,
                row.devices,
                f"{row.python} ({row.version})",
                row.folder,
                " ".join(row.environment) or _UNKNOWN,
                row.connection,
                *([row.tpu] if self.tpu else []),
            ]
            for row in self.rows
        ]


@dataclass(frozen=True, repr=False)
class DoctorPicture(ResultTable[Trouble]):
    """Problems that `%dist_doctor` found, one row each. Empty if there are none.

    Attributes:
        examination: facts, network measurements and problems.
    """

    examination: Examination

    @property
    def rows(self) -> tuple[Trouble, ...]:
        return self.examination.troubles

    def _columns(self) -> list[str]:
        return list(Trouble.__struct_fields__)

    def html(self) -> str:
        table = html.table(_EXAMINATION_HEADER, list(self._rows()), (0, 2, 3, 4, 5, 6))
        links = self._links()
        beside = [html.faint(_LINKS), html.table(*links)] if links[1] else []
        return html.box(self._title, table, *beside, *map(_trouble, self._found()))

    def lines(self) -> list[str]:
        table = html.text_table(_EXAMINATION_HEADER, list(self._rows()), (0, 2, 3, 4, 5, 6))
        found = [
            f"{sign[0]} {text}" + (f"\n    {hint}" if hint else "")
            for sign, text, hint in self._found()
        ]
        links = self._links()
        beside = ["", _LINKS, *html.text_table(*links)] if links[1] else []
        return [self._title, *table, *beside, "", *found]

    @property
    def _title(self) -> str:
        examined = self.examination
        troubles = formatting.count(len(examined.troubles), "problem")
        took = formatting.duration(examined.seconds)
        return f"nbdist: {_hosts(examined.facts)} checked in {took}: {troubles}"

    def _rows(self) -> Iterator[list[str]]:
        examined = self.examination
        for one in examined.facts:
            reached = [r for r in examined.reaches.get(one.rank, ()) if not r.fault]
            latencies = [r.latency_s for r in reached]
            speeds = [r.bytes_per_s for r in reached if r.bytes_per_s]
            yield [
                str(one.rank),
                one.host,
                formatting.size(one.free_bytes),
                formatting.size(one.disk_bytes),
                self._clock(examined.skew_s.get(one.rank, 0.0)),
                formatting.duration(median(latencies)) if latencies else _UNKNOWN,
                formatting.rate(min(speeds)) if speeds else _UNKNOWN,
            ]

    def _links(self) -> tuple[Sequence[str], list[list[str]], Sequence[int]]:
        """Return a table of the bandwidth of each link. It has no rows if few were measured.

        It has a row for each sender and a column for each receiver, or only the slowest links of
        many hosts.
        """
        examined = self.examination
        names = [one.host for one in examined.facts]
        speeds = bandwidths(examined.reaches)
        ranks = sorted({rank for pair in speeds for rank in pair})
        if len(speeds) <= len(ranks):
            return (), [], ()
        if len(ranks) > _MATRIX_HOSTS:
            slowest = sorted(speeds, key=speeds.__getitem__)[:_SLOWEST]
            rows = [[names[a], names[b], formatting.rate(speeds[a, b])] for a, b in slowest]
            return ("slowest links from", "to", "bandwidth"), rows, (2,)
        rows = [
            [
                names[a],
                *(formatting.rate(speeds[a, b]) if (a, b) in speeds else _UNKNOWN for b in ranks),
            ]
            for a in ranks
        ]
        return ("from", *(f"to {names[b]}" for b in ranks)), rows, range(1, len(ranks) + 1)

    def _clock(self, skew_s: float) -> str:
        """Format a clock difference, or the error if the difference is smaller."""
        error_s = self.examination.skew_error_s
        if abs(skew_s) <= error_s:
            return f"± {formatting.duration(error_s)}"
        return f"{'+' if skew_s > 0 else '-'}{formatting.duration(abs(skew_s))}"

    def _found(self) -> Sequence[tuple[tuple[str, str], str, str]]:
        """Return a sign, a description and advice for each problem."""
        if not self.examination.troubles:
            return [(_WELL, "no problems", "")]
        return [
            (
                _FATAL if trouble.is_fatal else _MINOR,
                f"{trouble.where}: {trouble.what}",
                trouble.advice,
            )
            for trouble in self.examination.troubles
        ]


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
