"""Pictures of sharded arrays: one cell per block, in the colour of its device.

One dimension is drawn horizontally, two vertically and horizontally. Of more dimensions, the first
two sharded ones are drawn.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbdist.views import formatting
from nbdist.views.placement import text as words

if TYPE_CHECKING:
    from nbdist.records import Layout, PlacedArray, Placement

_COLOURS = ("#36a", "#b50", "#284", "#a24", "#74a", "#067", "#853")
"""Colours dark enough for white figures. There are seven, so that rows of 2, 4 or 8 devices differ.
"""

_GREY = "#666"

_ROWS, _COLUMNS = 8, 12
"""Maximum number of cells. A last cell shows the total."""

_CHARACTERS = 15
"""Maximum characters of device numbers in a row. Beyond it, only tool tips show them."""

_REPEATED_CELLS = 1500
"""Number of cells on a page beyond which equal pictures are drawn only once."""

_ALL_CELLS = 3000
"""Number of cells on a page beyond which no picture is drawn. A cell takes 120 bytes."""


def chip(device: int) -> str:
    return cell(colour_of(device), "", str(device))


def colour_of(number: int) -> str:
    """Return the colour of a device or a host by its number."""
    return _COLOURS[number % len(_COLOURS)]


def cell(colour: str, tip: str, text: str) -> str:
    """Return one cell. It is narrow without a text."""
    tip = f' title="{escape(tip)}"' if tip else ""
    kind = "" if text else ' class="nbd-o"'
    return f'<b{kind} style="background:{colour};color:#fff"{tip}>{text or "&nbsp;"}</b>'


@dataclass(frozen=True)
class _Grid:
    """Grid of a picture: vertical and horizontal dimension (-1 if none), and number of cells."""

    down: int
    across: int
    rows: int
    columns: int


class Blocks:
    """Pictures of arrays. Arrays of equal shape and layout have equal pictures.

    Attributes:
        left_out: number of arrays without a picture because the page is full.
    """

    def __init__(self, placement: Placement) -> None:
        self.left_out = 0
        self._placement = placement
        self._drawn: dict[tuple[int, tuple[int, ...]], tuple[str, int]] = {}
        self._cells = 0

    def html(self, array: PlacedArray) -> str:
        """Return the picture. Empty if the page is full, or half full and has the same picture."""
        key = array.layout, array.shape
        is_above = key in self._drawn
        if self._cells >= (_REPEATED_CELLS if is_above else _ALL_CELLS):
            self.left_out += not is_above
            return ""
        if not is_above:
            self._drawn[key] = self._draw(array, self._placement.layouts[array.layout])
        picture, cells = self._drawn[key]
        self._cells += cells
        return picture

    def _draw(self, array: PlacedArray, layout: Layout) -> tuple[str, int]:
        grid = _grid(layout)
        held = _by_cell(layout, grid)
        widest = max(len(formatting.ranks(d for d, _ in pairs)) for pairs in held.values())
        named = widest * min(grid.columns, _COLUMNS) <= _CHARACTERS
        lines = []
        for row in range(min(grid.rows, _ROWS)):
            cells = [
                self._one(array, layout, held[row, column], named=named)
                for column in range(min(grid.columns, _COLUMNS))
            ]
            if grid.columns > _COLUMNS:
                cells.append(cell(_GREY, f"{grid.columns} columns in total", "…"))
            lines.append("".join(cells))
        if grid.rows > _ROWS:
            lines.append(cell(_GREY, f"{grid.rows} rows in total", "…"))
        label = escape(self._label(layout))
        count = min(grid.rows, _ROWS) * min(grid.columns, _COLUMNS)
        picture = f'<span class="nbd-p" role="img" aria-label="{label}">{"<br>".join(lines)}</span>'
        return picture, count

    def _one(
        self, array: PlacedArray, layout: Layout, held: list[tuple[int, int]], *, named: bool
    ) -> str:
        """Return a cell. Several devices share it if they differ only in other dimensions."""
        blocks = dict.fromkeys(block for _, block in held)
        devices = sorted(device for device, _ in held)
        if not devices:
            return cell(_GREY, "on no remaining device", "-")
        slices = "; ".join(words.block(array, layout, block) for block in list(blocks)[:4])
        tip = f"{slices} on {words.devices(self._placement, devices)}"
        return cell(
            _COLOURS[devices[0] % len(_COLOURS)], tip, formatting.ranks(devices) if named else ""
        )

    def _label(self, layout: Layout) -> str:
        count = formatting.count(len(layout.devices), "device")
        if layout.pieces == 1:
            return f"not sharded, on {count}"
        return f"{words.over_axes(layout)}; on {count}"


def _grid(layout: Layout) -> _Grid:
    parts = layout.parts
    sharded = [dimension for dimension, count in enumerate(parts) if count > 1]
    if len(parts) <= 1 or not sharded:
        down, across = -1, sharded[0] if sharded else -1
    elif len(sharded) > 1:
        down, across = sharded[:2]
    else:
        down, across = (sharded[0], -1) if sharded[0] == 0 else (-1, sharded[0])
    rows = parts[down] if down >= 0 else 1
    return _Grid(down, across, rows, parts[across] if across >= 0 else 1)


def _by_cell(layout: Layout, grid: _Grid) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return devices and their blocks by row and column."""
    held: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for device, block in zip(layout.devices, layout.blocks, strict=True):
        place = _place(block, layout.parts)
        row = place[grid.down] if grid.down >= 0 else 0
        column = place[grid.across] if grid.across >= 0 else 0
        held[row, column].append((device, block))
    return held


def _place(block: int, parts: tuple[int, ...]) -> list[int]:
    place: list[int] = []
    for count in reversed(parts):
        block, index = divmod(block, count)
        place.insert(0, index)
    return place
