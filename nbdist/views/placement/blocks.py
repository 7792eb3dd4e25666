"""Small pictures of how an array is cut: a cell for each block, in the colour of its device.

One dimension is drawn across, two are drawn down and across; of more, the first two that are cut.
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
"""Each dark enough for white figures. Seven, so that rows of two, four or eight devices differ."""

_GREY = "#666"

_ROWS, _COLUMNS = 8, 12
"""Cells of a picture; of more, the last says how many there are."""

_CHARACTERS = 15
"""Of the devices' numbers in a row; longer ones are left to the tool tips."""

_REPEATED_CELLS = 1500
"""Cells of a page; past these, each picture is drawn once for each layout and shape."""

_ALL_CELLS = 3000
"""Past these, none is: a cell is 120 bytes, with its tool tip."""


def chip(device: int) -> str:
    return _cell(_COLOURS[device % len(_COLOURS)], "", str(device))


def _cell(colour: str, tip: str, text: str) -> str:
    """Without a text a narrow one."""
    tip = f' title="{escape(tip)}"' if tip else ""
    kind = "" if text else ' class="nbd-o"'
    return f'<b{kind} style="background:{colour};color:#fff"{tip}>{text or "&nbsp;"}</b>'


@dataclass(frozen=True)
class _Grid:
    """How blocks are drawn: the dimensions down and across (-1: none), and the cells each way."""

    down: int
    across: int
    rows: int
    columns: int


class Blocks:
    """Pictures of arrays; those of one shape and layout are the same.

    Attributes:
        left_out: arrays whose picture is nowhere, as the page is full.
    """

    def __init__(self, placement: Placement) -> None:
        self.left_out = 0
        self._placement = placement
        self._drawn: dict[tuple[int, tuple[int, ...]], tuple[str, int]] = {}
        self._cells = 0

    def html(self, array: PlacedArray) -> str:
        """Empty where the page is full, or the same picture is above and the page half full."""
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
                cells.append(_cell(_GREY, f"{grid.columns} across in all", "…"))
            lines.append("".join(cells))
        if grid.rows > _ROWS:
            lines.append(_cell(_GREY, f"{grid.rows} down in all", "…"))
        label = escape(self._label(layout))
        count = min(grid.rows, _ROWS) * min(grid.columns, _COLUMNS)
        picture = f'<span class="nbd-p" role="img" aria-label="{label}">{"<br>".join(lines)}</span>'
        return picture, count

    def _one(
        self, array: PlacedArray, layout: Layout, held: list[tuple[int, int]], *, named: bool
    ) -> str:
        """A cell: several devices where they have the same, or differ in what is not drawn."""
        blocks = dict.fromkeys(block for _, block in held)
        devices = sorted(device for device, _ in held)
        if not devices:
            return _cell(_GREY, "on no device that is left", "-")
        slices = "; ".join(words.block(array, layout, block) for block in list(blocks)[:4])
        tip = f"{slices} on {words.devices(self._placement, devices)}"
        return _cell(
            _COLOURS[devices[0] % len(_COLOURS)], tip, formatting.ranks(devices) if named else ""
        )

    def _label(self, layout: Layout) -> str:
        count = formatting.count(len(layout.devices), "device")
        if layout.pieces == 1:
            return f"whole on {count}"
        return f"{words.over_axes(layout)}; on {count}"


def _grid(layout: Layout) -> _Grid:
    parts = layout.parts
    cut = [dimension for dimension, count in enumerate(parts) if count > 1]
    if len(parts) <= 1 or not cut:
        down, across = -1, cut[0] if cut else -1
    elif len(cut) > 1:
        down, across = cut[:2]
    else:
        down, across = (cut[0], -1) if cut[0] == 0 else (-1, cut[0])
    rows = parts[down] if down >= 0 else 1
    return _Grid(down, across, rows, parts[across] if across >= 0 else 1)


def _by_cell(layout: Layout, grid: _Grid) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Devices and their blocks, by row and column."""
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
