"""Result of `%%dist_trace`: time of a cell by operation, device and line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.records import HOST_COPIES, TIMELINE_MIME, OperationTime
from nbdist.views import formatting, html, timeline
from nbdist.views.result_table import ResultTable
from nbdist.views.surface import bundle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.records import DeviceTime, LineTime, MimeBundle, Trace

SHOWN_OPERATIONS = 12
SHOWN_DEVICES = 32
SHOWN_LINES = 24
_LINE_CHARACTERS = 80

_OPERATIONS = ("operation", "ms", "share", "calls")
_DEVICES = ("rank", "device", "compute", "collectives", "to device", "to host", "idle")
_LINES = ("line", "code", "compute", "collectives", "transfers")
_HOST_NOTE = "host: copies that are visible only on the host, not per device"


class TracePicture(ResultTable[OperationTime]):
    """Operations of a traced cell, one row each, as `%%dist_trace` shows them.

    Shows a timeline of the devices, and three tables that add up to the same milliseconds.

    Args:
        trace: trace of one or more ranks.
        viewer: sentence about the profiler's own files, may be empty.
    """

    def __init__(self, trace: Trace, viewer: str = "") -> None:
        self._trace = trace
        self._viewer = viewer

    @property
    def trace(self) -> Trace:
        """Trace with times by operation, device and line."""
        return self._trace

    def __eq__(self, other: object) -> bool:
        """Return True if the other picture shows an equal trace."""
        return self.trace == other.trace if isinstance(other, TracePicture) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._trace)

    @property
    def rows(self) -> tuple[OperationTime, ...]:
        return self._trace.by_operation

    def _columns(self) -> list[str]:
        return list(OperationTime.__struct_fields__)

    def html(self) -> str:
        parts = [timeline.picture(self._trace.timeline)]
        for title, header, rows, numbers in self._tables():
            parts += [html.line(title), html.table(header, rows, numbers)]
        rest = [html.faint(text) for text in self._rest()]
        return html.box(self._title(), *parts, *rest)

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        data = bundle(self)
        if self._trace.timeline.lanes:
            data[TIMELINE_MIME] = msgspec.to_builtins(self._trace.timeline)
        return data

    def lines(self) -> list[str]:
        lines = [self._title()]
        for title, header, rows, numbers in self._tables():
            lines += [title, *html.text_table(header, rows, numbers)]
        return [*lines, *self._rest()]

    def _title(self) -> str:
        if not self._trace.ranks:
            return "%%dist_trace: no trace: the workers were restarted, or one of them is gone"
        ranks = f"rank {formatting.ranks(self._trace.ranks)}"
        return f"%%dist_trace: {1000 * self._trace.seconds:,.1f} ms on {ranks}"

    def _tables(self) -> list[tuple[str, Sequence[str], list[list[str]], Sequence[int]]]:
        if not self._trace.by_operation:
            return []
        return [
            ("by operation, of all devices:", _OPERATIONS, self._operations(), (1, 2, 3)),
            ("by device, in ms of the cell:", _DEVICES, self._devices(), (0, 2, 3, 4, 5, 6)),
            ("by line, in ms of all devices:", _LINES, self._lines(), (0, 2, 3, 4)),
        ]

    def _operations(self) -> list[list[str]]:
        whole = sum(one.seconds for one in self._trace.by_operation) or 1.0
        return [
            [one.name, _ms(one.seconds), f"{one.seconds / whole:.0%}", str(one.count)]
            for one in self._trace.by_operation[:SHOWN_OPERATIONS]
        ]

    def _devices(self) -> list[list[str]]:
        return [
            [
                str(one.rank),
                "host" if one.device == HOST_COPIES else str(one.device),
                *map(_ms, (one.compute_s, one.collective_s, one.to_device_s, one.to_host_s)),
                "" if one.device == HOST_COPIES else _ms(one.idle_s),
            ]
            for one in self._trace.by_device[:SHOWN_DEVICES]
        ]

    def _lines(self) -> list[list[str]]:
        return [
            [*_place(one), *map(_ms, (one.compute_s, one.collective_s, one.transfer_s))]
            for one in self._shown_lines()
        ]

    def _shown_lines(self) -> list[LineTime]:
        """Return the lines with the longest times, in their order."""
        longest = sorted(self._trace.by_line, key=lambda one: one.seconds, reverse=True)
        shown = longest[:SHOWN_LINES]
        return [one for one in self._trace.by_line if one in shown]

    def _rest(self) -> list[str]:
        trace = self._trace
        hidden = (
            (len(trace.by_operation) - SHOWN_OPERATIONS, "operation"),
            (len(trace.by_device) - SHOWN_DEVICES, "device"),
            (len(trace.by_line) - SHOWN_LINES, "line"),
        )
        more = [f"not shown: {formatting.count(n, word)}" for n, word in hidden if n > 0]
        on_host = [_HOST_NOTE] if any(map(_is_host, trace.by_device)) else []
        return [*more, *on_host, *trace.notes, *filter(None, [self._viewer])]


def _is_host(device: DeviceTime) -> bool:
    return device.device == HOST_COPIES


def _place(one: LineTime) -> tuple[str, str]:
    """Return the number and the text of a line."""
    if not one.line:
        return "", "(no line)"
    text = one.text[:_LINE_CHARACTERS]
    return str(one.line), f"{one.cell}: {text}" if one.cell else text


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f}" if seconds else "-"
