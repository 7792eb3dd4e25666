"""Timeline of devices as a static picture in SVG. JupyterLab replaces it by one that zooms."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

from nbdist.records import HOST_COPIES
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Lane, LaneKind, Timeline

SHOWN_LANES = 16
COLOURS: dict[LaneKind, str] = {
    "compute": "#1f77d0",
    "collective": "#d55e00",
    "copies": "#00906a",
    "input": "#a87b00",
}
"""Colours of the kinds, distinct under colour blindness (Okabe and Ito, 2008, darkened)."""

_WIDTH = 760
_LEFT = 170
_ROW = 17
_BAR = 12
_TOP = 6
_AXIS = 22
_TICKS = 5
_PART = 2
"""Pixels of the shortest bar. Longer ones have multiples of it, which limits the size."""

_PARTS = (_WIDTH - _LEFT) // _PART


def picture(timeline: Timeline) -> str:
    """Return the picture as an element of HTML; empty without lanes."""
    if not timeline.lanes:
        return ""
    data = b64encode(svg(timeline).encode()).decode()
    return (
        f'<img alt="{escape(description(timeline))}" src="data:image/svg+xml;base64,{data}" '
        f'style="width:{_WIDTH}px;max-width:100%;margin:6px 0;background:white">'
    )


def description(timeline: Timeline) -> str:
    """Return the alternative text."""
    lanes = formatting.count(len(timeline.lanes), "lane")
    ranks = formatting.ranks({lane.rank for lane in timeline.lanes})
    kinds = ", ".join(kind for kind in COLOURS if any(kind == lane.kind for lane in timeline.lanes))
    return f"Timeline of {timeline.end_us / 1000:,.1f} ms, rank {ranks}: {lanes} ({kinds})"


def svg(timeline: Timeline) -> str:
    """Return the picture with the first `SHOWN_LANES` lanes."""
    lanes = timeline.lanes[:SHOWN_LANES]
    left_out = len(timeline.lanes) - len(lanes)
    more = _text(0, _bottom(lanes) + 16, f"… and {formatting.count(left_out, 'more lane')}")
    height = _bottom(lanes) + _AXIS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11" fill="#333">'
        f"{''.join(_ticks(timeline, _bottom(lanes)))}"
        f"{''.join(_row(lane, row, timeline.end_us) for row, lane in enumerate(lanes))}"
        f"{more if left_out else ''}</svg>"
    )


def name(lane: Lane) -> str:
    """Return the name of a lane, such as `rank 0 · device 1 · compute`."""
    place = "host" if lane.device == HOST_COPIES else f"device {lane.device}"
    return f"rank {lane.rank} · {place} · {lane.kind}"


def _bottom(lanes: tuple[Lane, ...]) -> int:
    return _TOP + _ROW * len(lanes)


def _row(lane: Lane, row: int, end_us: int) -> str:
    y = _TOP + _ROW * row
    line = f"M0 {y + _BAR // 2}" + "".join(_moves(lane, end_us))
    place = f"translate({_LEFT}) scale({_PART} 1)"
    colour = COLOURS[lane.kind]
    bars = f'<path transform="{place}" d="{line}" stroke="{colour}" stroke-width="{_BAR}"/>'
    return _text(0, y + _BAR - 2, name(lane)) + bars


def _moves(lane: Lane, end_us: int) -> Iterator[str]:
    """Yield relative moves and lines. Spans at the same position are one line."""
    at = drawn = time_us = 0
    scale = _PARTS / max(1, end_us)
    for gap, length in zip(lane.gaps_us, lane.lengths_us, strict=True):
        time_us += gap
        begin = max(at, int(time_us * scale))
        time_us += length
        end = max(begin + 1, round(time_us * scale))
        if end <= at:
            continue
        if begin > at or not drawn:
            yield f"m{begin - at} 0"
        yield f"h{end - begin}"
        at, drawn = end, 1


def _ticks(timeline: Timeline, bottom: int) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        x = _LEFT + (_WIDTH - _LEFT - 1) * tick // _TICKS
        yield f'<path d="M{x} {_TOP}V{bottom}" stroke="#ddd"/>'
        anchor = "end" if tick == _TICKS else "middle" if tick else "start"
        label = f"{timeline.end_us * tick / _TICKS / 1000:,.4g} ms"
        yield _text(x, bottom + 14, label, anchor)


def _text(x: int, y: int, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
