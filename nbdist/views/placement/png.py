"""Placement as a picture, for front ends that show no HTML.

Pillow draws it with Matplotlib's fonts. Matplotlib would need 0.2 s for the text, more than
everything else in `%dist_show`.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

WIDTH = 900
"""Width in CSS pixels. The resolution is higher, for dense screens."""

SHOWN_BARS = 16
_PIXELS = WIDTH * 3 // 2
_MARGIN = 16
_BAR = 29
_LINE = 21
"""Pixels: height of a bar and of a line of text."""

_TITLE, _TEXT, _SMALL, _LEAST = 20, 15, 14, 4
"""Pixels per em."""

_PLACES = 0.2, 0.5
"""Fractions of the width: start of the bars, and length of the longest."""

_LETTER = 0.602
"""Width of a letter of the monospaced font, in ems."""

_SANS, _BOLD, _MONO = "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf"
_INK, _PAPER, _BLUE = "#000000", "#ffffff", "#4878a8"


def picture(
    title: str, facts: Sequence[str], sizes: Mapping[str, int], lines: Sequence[str]
) -> bytes:
    """Draw bars and text.

    Args:
        title: first line.
        facts: lines below the title.
        sizes: bytes on each device.
        lines: tree as text in columns.

    Returns:
        A PNG.
    """
    from PIL import Image, ImageDraw

    bars = dict(list(sizes.items())[:SHOWN_BARS])
    hidden = len(sizes) - len(bars)
    head = [*facts, *([f"and {hidden:,} more devices"] if hidden > 0 else [])]
    heights = (2 * _LINE, (len(head) + 1) * _LINE, len(bars) * _BAR, (len(lines) + 2) * _LINE)
    tops = [sum(heights[:i]) for i in range(len(heights))]
    image = Image.new("RGB", (_PIXELS, sum(heights)), _PAPER)
    draw = ImageDraw.Draw(image)
    _write(draw, tops[0] + _LINE // 2, [title], _font(_BOLD, _TITLE))
    _write(draw, tops[1], head, _font(_SANS, _TEXT))
    _bars(draw, tops[2], bars)
    _write(draw, tops[3] + _LINE, lines, _font(_MONO, _fitting(lines)))
    buffer = io.BytesIO()
    image.save(buffer, format="png", compress_level=3)
    return buffer.getvalue()


@functools.cache
def _font(name: str, size: float) -> FreeTypeFont:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def _write(draw: ImageDraw, top: int, lines: Sequence[str], font: FreeTypeFont) -> None:
    for number, line in enumerate(lines):
        draw.text((_MARGIN, top + number * _LINE), line, _INK, font)


def _bars(draw: ImageDraw, top: int, sizes: Mapping[str, int]) -> None:
    first, longest = (int(part * _PIXELS) for part in _PLACES)
    font, most = _font(_SANS, _SMALL), max(sizes.values(), default=0) or 1
    for number, (name, size) in enumerate(sizes.items()):
        above = top + number * _BAR
        middle, end = above + _BAR // 2, first + longest * size // most
        draw.rectangle((first, above + _BAR // 6, end, above + _BAR * 5 // 6), _BLUE)
        draw.text((first - _MARGIN // 2, middle), name, _INK, font, anchor="rm")
        draw.text((end + _MARGIN // 2, middle), formatting.size(size), _INK, font, anchor="lm")


def _fitting(lines: Sequence[str]) -> float:
    """Return the font size in pixels at which the longest line fits, at least `_LEAST`."""
    longest = max(map(len, filter(None, lines)), default=1)
    return max(_LEAST, min(_TEXT, (_PIXELS - 2 * _MARGIN) / (longest * _LETTER)))
