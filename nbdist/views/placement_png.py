"""A placement as a picture, for where no HTML is shown."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from nbdist.views import labels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 900
"""In CSS pixels; the picture has more, for screens that have."""

SHOWN_BARS = 16
_INCHES = WIDTH / 96
_DPI = 144
_BAR = 0.2
_LINE = 0.14
"""Inches, of a bar and of a line of text."""


def picture(
    title: str, facts: Sequence[str], sizes: Mapping[str, int], lines: Sequence[str]
) -> bytes:
    """Bars and text.

    Args:
        title: the first line.
        facts: lines below it.
        sizes: bytes on each device.
        lines: the tree, as text in columns.

    Returns:
        A PNG.
    """
    from matplotlib import figure as figures  # without pyplot: no backend, no state

    bars = dict(list(sizes.items())[:SHOWN_BARS])
    hidden = len(sizes) - len(bars)
    head = [*facts, *([f"and {hidden:,} more devices"] if hidden > 0 else [])]
    heights = [_LINE * 2, _LINE * (len(head) + 1), _BAR * len(bars), _LINE * (len(lines) + 2)]
    tall = sum(heights)
    figure = figures.Figure(figsize=(_INCHES, tall), dpi=_DPI)
    tops = [1 - sum(heights[:i]) / tall for i in range(len(heights))]
    _write(figure, tops[0] - 0.5 * _LINE / tall, [title], fontsize=10, fontweight="bold")
    _write(figure, tops[1], head, fontsize=7.5)
    if bars:
        _draw(figure.add_axes((0.2, tops[3], 0.5, heights[2] / tall)), bars)
    _write(
        figure,
        tops[3] - _LINE / tall,
        lines,
        fontsize=_fitting(lines),
        family="monospace",
        linespacing=1.35,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _write(figure: Figure, top: float, lines: Sequence[str], **style: Any) -> None:
    text = "\n".join(lines)
    figure.text(0.012, top, text, va="top", parse_math=False, **style)


def _draw(axes: Axes, bars: Mapping[str, int]) -> None:
    places = range(len(bars))
    drawn = axes.barh(places, list(bars.values()), color="#4878a8", height=0.7)
    axes.bar_label(drawn, [labels.size(size) for size in bars.values()], fontsize=7, padding=3)
    axes.set_yticks(places, list(bars), fontsize=7, parse_math=False)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    axes.margins(y=0.02)
    axes.spines[:].set_visible(False)


def _fitting(lines: Sequence[str]) -> float:
    """Points, so that the longest line fits the width."""
    longest = max((len(line) for line in lines), default=1)
    return min(7.5, _INCHES * 72 / (longest * 0.62))
