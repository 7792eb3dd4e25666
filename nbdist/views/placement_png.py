"""A placement as a picture, for where no HTML is shown."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from nbdist.views import labels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

WIDTH = 900
"""In CSS pixels; the picture has more, for screens that have."""

SHOWN_BARS = 16
_DPI = 144
_LINE = 0.165
"""Inches, of a line of text."""


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
    from matplotlib.figure import Figure  # without pyplot: no backend, no state

    bars = dict(list(sizes.items())[:SHOWN_BARS])
    hidden = len(sizes) - len(bars)
    head = [*facts, *([f"and {hidden:,} more devices"] if hidden > 0 else [])]
    heights = [_LINE * (len(head) + 2), 0.22 * len(bars) + 0.1, _LINE * (len(lines) + 2)]
    figure = Figure(figsize=(WIDTH / 96, sum(heights)), dpi=_DPI, layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, height_ratios=heights)
    _write(top, head, 7.5, "sans-serif")
    top.set_title(title, fontsize=10, fontweight="bold", loc="left")
    _draw(middle, bars)
    _write(bottom, lines, _fitting(lines), "monospace")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _write(axes: Axes, lines: Sequence[str], size: float, family: str) -> None:
    axes.set_axis_off()
    text = "\n".join(line.replace("$", r"\$") for line in lines)
    axes.text(0, 1, text, fontsize=size, family=family, va="top", transform=axes.transAxes)


def _draw(axes: Axes, bars: Mapping[str, int]) -> None:
    drawn = axes.barh(list(bars), list(bars.values()), color="#4878a8", height=0.7)
    axes.bar_label(drawn, [labels.size(size) for size in bars.values()], fontsize=7, padding=3)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.xaxis.set_visible(False)
    axes.margins(x=0.1, y=0.02)
    axes.spines[:].set_visible(False)


def _fitting(lines: Sequence[str]) -> float:
    """Points, so that the longest line fits the width."""
    longest = max((len(line) for line in lines), default=1)
    return min(7.0, WIDTH / 96 * 72 / (longest * 0.62))
