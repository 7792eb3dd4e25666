"""Tables of the time in a trace: by operation, by device and by line."""

from __future__ import annotations

import heapq
import itertools
import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.records import HOST_COPIES, OWN_RANK, DeviceTime, LineTime, OperationTime
from nbdist.utils.timelines import Busy, timeline_of
from nbdist.worker.profiling.jax_profiler import holds_others, is_collective, is_host_copy
from nbdist.worker.profiling.trace import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.records import LaneKind, Timeline
    from nbdist.worker.profiling.cell_lines import CellLines
    from nbdist.worker.profiling.hlo_lines import Frame, Operation, Programs
    from nbdist.worker.profiling.jax_profiler import HostThread
    from nbdist.worker.profiling.trace import Kind, Span

MOST_SPANS = 4000
"""Limit for the spans in the timeline of a rank."""

_LANES: dict[Kind, LaneKind] = {"compute": "compute", "collective": "collective"}
_COPIES = {"to_device": "copy to device", "to_host": "copy to host"}
_NO_LETTER = re.compile(r"[\W_]+")
_COUNTED = re.compile(r"(\.\d+)+$")


@dataclass(frozen=True)
class Place:
    """Line of Python.

    Attributes:
        cell: Empty for the traced cell; `Cell In[3]` for an earlier one.
        line: Line number; 0 if unknown.
        file: File of an earlier cell.
    """

    cell: str
    line: int
    file: str


NOWHERE = Place("", 0, "")


@dataclass(frozen=True)
class Spent:
    """Self time of one operation on a device.

    Attributes:
        span: Traced span, with its kind corrected from the program.
        name: Display name of the operation.
        place: Line that the operation is attributed to.
        seconds: Self time from `own_seconds`.
    """

    span: Span
    name: str
    place: Place
    seconds: float


def spent_of(
    spans: Sequence[Span],
    programs: Programs,
    thread: HostThread,
    lines: CellLines,
) -> list[Spent]:
    """Return the name, line and self time of each operation.

    Args:
        spans: Spans of one rank.
        programs: Programs that ran.
        thread: Host thread that ran the cell.
        lines: Recorded lines of the cell.
    """
    known = [
        (programs.find(span.program, span.module, span.operation), span)
        for span in _on_devices(spans)
    ]
    corrected = [
        (operation, _corrected(span, operation))
        for operation, span in known
        if operation is None or not holds_others(operation.name)
    ]
    launched = launches_of([span for _, span in corrected], thread)
    places = _Places(lines, thread.started_ns)
    own = own_seconds([span for _, span in corrected])
    return [
        Spent(span, _named(span, operation), places.of(span, operation, at_s), seconds)
        for (operation, span), at_s, seconds in zip(corrected, launched, own, strict=True)
    ]


def _corrected(span: Span, operation: Operation | None) -> Span:
    """Correct the kind of a span from its opcode, since its name is arbitrary."""
    is_known = operation is not None and span.kind in ("compute", "collective")
    if operation is None or not is_known:
        return span
    return span._replace(kind="collective" if is_collective(operation.name) else "compute")


def _named(span: Span, operation: Operation | None) -> str:
    if operation is not None:
        return operation.name
    return _COPIES.get(span.kind) or _COUNTED.sub("", span.name)


def _on_devices(spans: Sequence[Span]) -> list[Span]:
    """Drop the host's copies if devices recorded theirs; otherwise assign them to no device.

    `np.asarray` also waits for the devices: its copy begins when their operations have ended.
    """
    if any(span.kind in _COPIES and not is_host_copy(span) for span in spans):
        return [span for span in spans if not is_host_copy(span)]
    ends = sorted(span.end_s for span in spans if not is_host_copy(span))
    return [_of_host(span, ends) if is_host_copy(span) else span for span in spans]


def _of_host(span: Span, ends: Sequence[float]) -> Span:
    """Assign a copy to no device, from the time it can begin; `ends` are the ends of operations."""
    before = bisect_right(ends, span.end_s) if span.kind == "to_host" else 0
    ready_s = ends[before - 1] if before else span.begin_s
    return span._replace(device=HOST_COPIES, begin_s=max(span.begin_s, ready_s))


def launches_of(spans: Sequence[Span], thread: HostThread) -> list[float | None]:
    """Return when each span's program was launched; None if the cell's thread did not launch it.

    The profiler records the function of a launch but not its run. Runs and launches of the same
    name are paired in order. If their numbers differ, a run belongs to the last launch before it.
    """
    begun: dict[str, list[float]] = defaultdict(list)
    for name, at_s in thread.launches:
        begun[_letters(f"jit{name}")].append(at_s)
    runs: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for span in spans:
        of_name, key = runs[_letters(span.module)], (span.program, span.run)
        of_name[key] = min(of_name.get(key, span.begin_s), span.begin_s)
    at = {name: _paired(of_name, begun.get(name, [])) for name, of_name in runs.items()}
    return [
        at[_letters(span.module)][span.program, span.run]
        if span.module
        else (span.begin_s if span.begin_s in thread.copies else None)
        for span in spans
    ]


def _letters(name: str) -> str:
    """Remove punctuation from a name: XLA writes `jit__lambda` for the profiler's `<lambda>`."""
    return _NO_LETTER.sub("", name)


def _paired(
    runs: Mapping[tuple[int, int], float], launches: Sequence[float]
) -> dict[tuple[int, int], float | None]:
    """Pair runs, ordered by start, with launches."""
    if len(runs) == len(launches):
        return dict(zip(sorted(runs, key=runs.__getitem__), launches, strict=True))
    before = {key: bisect_right(launches, first_s) for key, first_s in runs.items()}
    return {key: launches[count - 1] if count else None for key, count in before.items()}


class _Places:
    """Attribution of operations to lines."""

    def __init__(self, lines: CellLines, started_ns: int) -> None:
        self._lines = lines
        self._started_ns = started_ns

    def of(self, span: Span, operation: Operation | None, at_s: float | None) -> Place:
        """Return the line inside a compiled function, if the cell itself contains that line.

        Otherwise returns the line that launched the operation, such as for functions of earlier
        cells. If the launch is unknown, returns the line that the operation was compiled for.
        """
        frames = operation.frames if operation is not None else ()
        within = frames[_entry(frames, span.module) :]
        if own := self._inmost(within, self._lines.is_current):
            return own
        if at_s is not None and (line := self._lines.at(self._started_ns + round(1e9 * at_s))):
            return Place("", line, "")
        found = self._inmost(frames, self._lines.is_current)
        return found or self._inmost(frames, self._lines.is_cell) or NOWHERE

    def _inmost(self, frames: Sequence[Frame], wanted: Callable[[str], bool]) -> Place | None:
        for frame in reversed(frames):
            if wanted(frame.file):
                if self._lines.is_current(frame.file):
                    return Place("", frame.line, "")
                return Place(self._lines.cell(frame.file), frame.line, frame.file)
        return None


def _entry(frames: Sequence[Frame], program: str) -> int:
    """Return the index of the compiled function in a stack; earlier frames are its callers."""
    for index, frame in enumerate(frames):
        if _letters(f"jit{frame.function.rpartition('.')[2]}") == _letters(program):
            return index
    return len(frames)


def by_operation(spent: Sequence[Spent]) -> tuple[OperationTime, ...]:
    """Sum the time by operation, the longest first."""
    seconds: dict[tuple[str, Kind], float] = defaultdict(float)
    counts: dict[tuple[str, Kind], int] = defaultdict(int)
    for part in spent:
        seconds[part.name, part.span.kind] += part.seconds
        counts[part.name, part.span.kind] += 1
    return tuple(
        OperationTime(name=name, kind=kind, seconds=seconds[name, kind], count=counts[name, kind])
        for name, kind in sorted(seconds, key=seconds.__getitem__, reverse=True)
    )


def by_device(
    spent: Sequence[Spent], devices: Sequence[int], seconds: float
) -> tuple[DeviceTime, ...]:
    """Sum the time by device of a rank, including idle devices.

    Args:
        spent: Self times of the rank.
        devices: Numbers of its devices.
        seconds: Duration of the cell in seconds; the rest of it is idle time.
    """
    times: dict[int, dict[Kind, float]] = {number: dict.fromkeys(KINDS, 0.0) for number in devices}
    for part in spent:
        of_device = times.setdefault(part.span.device, dict.fromkeys(KINDS, 0.0))
        of_device[part.span.kind] += part.seconds
    return tuple(
        DeviceTime(
            rank=OWN_RANK,
            device=number,
            compute_s=of["compute"],
            collective_s=of["collective"],
            to_device_s=of["to_device"],
            to_host_s=of["to_host"],
            idle_s=0.0 if number == HOST_COPIES else max(0.0, seconds - sum(of.values())),
        )
        for number, of in sorted(times.items(), key=lambda item: (item[0] < 0, item[0]))
    )


def timeline(spent: Sequence[Spent], thread: HostThread) -> Timeline:
    """Return the busy times of the rank's devices, and its waits for batches.

    Args:
        spent: Self times of the rank.
        thread: Host thread that ran the cell.
    """
    started_s = thread.started_ns / 1e9
    operations = (
        Busy(
            OWN_RANK,
            part.span.device,
            _LANES.get(part.span.kind, "copies"),
            started_s + part.span.begin_s,
            started_s + part.span.end_s,
            part.name,
        )
        for part in spent
    )
    inputs = (
        Busy(OWN_RANK, HOST_COPIES, "input", started_s + begin_s, started_s + end_s, "wait")
        for begin_s, end_s in thread.inputs
    )
    return timeline_of((*operations, *inputs), MOST_SPANS)


def by_line(spent: Sequence[Spent], text_of: Callable[[Place], str]) -> tuple[LineTime, ...]:
    """Sum the time by line: lines of the cell, then of earlier cells, then unknown lines.

    Args:
        spent: Self times of the rank.
        text_of: Returns the text of a line.
    """
    times: dict[Place, dict[Kind, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    for part in spent:
        times[part.place][part.span.kind] += part.seconds
    order = sorted(times, key=lambda place: (place == NOWHERE, place.cell, place.line))
    return tuple(
        LineTime(
            cell=place.cell,
            line=place.line,
            text=text_of(place),
            compute_s=times[place]["compute"],
            collective_s=times[place]["collective"],
            transfer_s=times[place]["to_device"] + times[place]["to_host"],
        )
        for place in order
    )


def own_seconds(spans: Sequence[Span]) -> list[float]:
    """Return the self time of each span: those of a device add up to what the spans cover.

    If several spans overlap on a device, the time counts for the first kind in `KINDS`, as in
    `trace.attributed`. Within a kind it counts for the span that began last, the innermost.
    """
    by_device: dict[int, list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        by_device[span.device].append(index)
    own = [0.0] * len(spans)
    for indices in by_device.values():
        _share(spans, indices, own)
    return own


def _share(spans: Sequence[Span], indices: list[int], own: list[float]) -> None:
    """Visit the times at which a span of a device begins or ends."""
    begins = sorted(indices, key=lambda index: spans[index].begin_s)
    moments = sorted({t for i in indices for t in (spans[i].begin_s, spans[i].end_s)})
    active: list[tuple[int, float, int]] = []
    waiting = iter((*begins, -1))
    following = next(waiting)
    for now, then in itertools.pairwise(moments):
        while following >= 0 and spans[following].begin_s <= now:
            span = spans[following]
            heapq.heappush(active, (KINDS.index(span.kind), -span.begin_s, following))
            following = next(waiting)
        while active and spans[active[0][2]].end_s <= now:
            heapq.heappop(active)
        if active:
            own[active[0][2]] += then - now
