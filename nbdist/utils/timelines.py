"""Timelines of devices: spans by lane, with a limited number of spans."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from nbdist.records import Lane, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.records import LaneKind

SEVERAL = "several operations"
"""Name of a span that several operations share."""

_MICRO = 1e6


class Busy(NamedTuple):
    """Span of one lane.

    Attributes:
        rank: rank of the device.
        device: number of the device in the rank, or `HOST_COPIES` for the host.
        kind: kind of the lane.
        begin_s: start in seconds since 1970.
        end_s: end in seconds since 1970.
        name: name of the operation.
    """

    rank: int
    device: int
    kind: LaneKind
    begin_s: float
    end_s: float
    name: str


def timeline_of(busy: Iterable[Busy], most: int) -> Timeline:
    """Return the lanes, ordered by rank, device and kind, hosts before devices.

    Spans that touch or overlap in a lane are one span. If there are more than `most`, spans with
    short gaps are joined too.

    Args:
        busy: spans in any order.
        most: limit for the number of spans.
    """
    lanes: dict[tuple[int, int, LaneKind], list[Busy]] = defaultdict(list)
    for span in busy:
        lanes[span.rank, span.device, span.kind].append(span)
    joined = {key: _joined(sorted(spans, key=_begin), 0.0) for key, spans in lanes.items()}
    gap_s = 1 / _MICRO
    while sum(map(len, joined.values())) > max(most, len(joined)):
        gap_s *= 2
        joined = {key: _joined(spans, gap_s) for key, spans in joined.items()}
    began_s = min((spans[0].begin_s for spans in joined.values()), default=0.0)
    names: dict[str, int] = {}
    return Timeline(
        began_s=began_s,
        lanes=tuple(_lane(joined[key], began_s, names) for key in sorted(joined)),
        names=tuple(names),
    )


def spans_of(timeline: Timeline, rank: int) -> Iterator[Busy]:
    """Yield the spans of a timeline of one rank."""
    for lane in timeline.lanes:
        at = 0
        for gap, length, name in zip(lane.gaps_us, lane.lengths_us, lane.names, strict=True):
            begin = timeline.began_s + (at + gap) / _MICRO
            at += gap + length
            end = timeline.began_s + at / _MICRO
            yield Busy(rank, lane.device, lane.kind, begin, end, timeline.names[name])


def _begin(span: Busy) -> float:
    return span.begin_s


def _joined(spans: Sequence[Busy], gap_s: float) -> list[Busy]:
    """Join spans, in order of their begin, whose gap is at most `gap_s`."""
    joined: list[Busy] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is None or span.begin_s > last.end_s + gap_s:
            joined.append(span)
        else:
            name = last.name if last.name == span.name else SEVERAL
            joined[-1] = last._replace(end_s=max(last.end_s, span.end_s), name=name)
    return joined


def _lane(spans: Sequence[Busy], began_s: float, names: dict[str, int]) -> Lane:
    """Return a lane. Rounded times of a lane never overlap."""
    gaps, lengths, numbers, at = [], [], [], 0
    for span in spans:
        begin = max(at, round((span.begin_s - began_s) * _MICRO))
        end = max(begin, round((span.end_s - began_s) * _MICRO))
        gaps.append(begin - at)
        lengths.append(end - begin)
        numbers.append(names.setdefault(span.name, len(names)))
        at = end
    first = spans[0]
    return Lane(
        rank=first.rank,
        device=first.device,
        kind=first.kind,
        gaps_us=tuple(gaps),
        lengths_us=tuple(lengths),
        names=tuple(numbers),
    )
