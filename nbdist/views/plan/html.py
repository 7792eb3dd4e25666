"""Plan as HTML without scripts: bars, a collapsible tree, and pictures of blocks.

Styles are inline, so that an untrusted notebook keeps them. Only the pictures of blocks use a
`<style>` element, shared with `%dist_show`.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.views import formatting, html
from nbdist.views.placement import text as placed
from nbdist.views.placement.blocks import Blocks
from nbdist.views.placement.html import STYLE
from nbdist.views.placement.tree import Leaf, rows
from nbdist.views.plan import text as words
from nbdist.views.plan.flags import flags
from nbdist.views.plan.tensors import ROLES, largest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.records import Layout, PlacedArray, Placement, Plan
    from nbdist.views.placement.tree import Branch, Row
    from nbdist.views.plan.text import Part

SHOWN_ROWS = 400
SHOWN_LAYOUTS = 4

_DRAWN = 64
"""Maximum number of blocks drawn individually. Beyond it, only the lines between them are drawn."""

_LINES = 64
"""Maximum number of lines of a picture in each direction."""

_TREE, _CARD = 690, 208
"""Pixels: width of the tree, and of a picture with its text."""

_COLOURS = {
    ROLES["parameter"]: "#3f74b5",
    ROLES["state"]: "#7fa8d9",
    ROLES["read"]: "#5f9ea0",
    ROLES["batch"]: "#8d78bd",
    "gradients": "#d98b3a",
    "activations": "#4f9d69",
    "margin": "#9a9a9a",
    words.COMPUTE: "#4f9d69",
}
_LINKS = ("#d98b3a", "#c0504d", "#8d78bd", "#b8860b")
"""Colours of collectives, by level."""

_FIRST, _REST, _PAPER = "#d98b3a", "#5f8fc4", "var(--jp-layout-color0,#fff)"
"""Colours of a picture with many blocks: device 0, other devices, lines."""

_TRACK = "rgba(128,128,128,.22)"
_HEAD = "font-weight:600;margin:12px 0 3px"
_FIGURE = "text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
_MONO = "font-family:var(--jp-code-font-family,monospace);font-size:12px"
_NAME = f"{_MONO};overflow-wrap:anywhere"
_RULE = "border-bottom:1px solid var(--jp-border-color3,#ececec)"
_COLUMNS = "minmax(0,1fr) 148px 62px 222px 78px"
_GRID = (
    f"display:inline-grid;width:100%;grid-template-columns:{_COLUMNS};gap:0 10px;"
    f"align-items:center;vertical-align:middle;padding:1px 0;{_RULE}"
)
_FLAGS = "margin:0 0 4px 16px;white-space:pre-wrap;font-size:12px"
_INSET = "margin-left:16px"
_WARNING_SIGN = '<span style="color:var(--jp-warn-color1,#d26900);margin-right:6px">⚠</span>'
_SUMMARY = f"{_INSET};cursor:pointer;list-style-position:outside"
"""Style of a foldable row. Its marker is left of the row, so that all rows have equal width."""


def page(plan: Plan, placement: Placement, root: Branch) -> str:
    """Return the whole view.

    Args:
        plan: plan to show.
        placement: placement of its tensors.
        root: folded tree of its tensors.
    """
    return html.box(
        words.headline(plan),
        *(html.faint(text) for text in words.facts(plan)),
        *(
            f'<div style="margin-top:2px">{_WARNING_SIGN}{escape(text)}</div>'
            for text in words.warnings(plan)
        ),
        *(html.faint(text) for text in words.verified(plan)),
        _degrees(plan),
        _panels(plan),
        _tensors(placement, root),
        _cards(plan, placement),
        _runners_up(plan),
        _flags(plan),
        *(_note(text) for text in plan.notes),
    )


def part(title: str, plan: Plan, placement: Placement, root: Branch) -> str:
    """Return the view of some arrays, with a title of its own. See `page` for the arguments."""
    return html.box(title, _tensors(placement, root), _cards(plan, placement))


def _note(text: str) -> str:
    return f'<div style="{html.FAINT};font-size:12px;margin-top:2px">{escape(text)}</div>'


def _head(text: str) -> str:
    return f'<div style="{_HEAD}">{escape(text)}</div>'


def _degrees(plan: Plan) -> str:
    rows = "".join(
        f'<span style="{_MONO}">{escape(axis)}</span>'
        f'<span style="{_FIGURE};font-weight:600">{size}</span><span>{escape(text)}</span>'
        for axis, size, text in words.degrees(plan)
    )
    style = "display:grid;grid-template-columns:auto auto 1fr;gap:1px 10px;align-items:baseline"
    return f'<div style="{style};margin-top:8px">{rows}</div>'


def _panels(plan: Plan) -> str:
    """Return the bars of memory and time, side by side if there is room."""
    memory = _panel(words.memory_title(plan), words.memory_parts(plan), formatting.size)
    time = _panel(words.time_title(plan), words.time_parts(plan), formatting.duration)
    style = "display:flex;flex-wrap:wrap;gap:0 44px;max-width:900px"
    notes = "".join(map(_note, words.notes(plan)))
    return f'<div style="{style}">{memory}{time}</div>{notes}'


def _panel(title: str, parts: Sequence[Part], written: Callable[[float], str]) -> str:
    """Return a bar of all parts, and one line per part."""
    whole = sum(part.amount for part in parts) or 1
    colours = _colours(parts)
    bar = "".join(
        _slice(part, colour, part.amount / whole, written)
        for part, colour in zip(parts, colours, strict=True)
        if part.amount and colour
    )
    lines = "".join(
        _line(part, colour, part.amount / whole, written(part.amount))
        for part, colour in zip(parts, colours, strict=True)
    )
    panel = "flex:1 1 320px;min-width:260px;max-width:428px"
    track = f"display:flex;height:14px;border-radius:3px;overflow:hidden;background:{_TRACK}"
    grid = "display:grid;grid-template-columns:10px auto 1fr auto 44px;gap:1px 8px;margin-top:5px"
    return (
        f'<div style="{panel}">{_head(title)}<div style="{track}">{bar}</div>'
        f'<div style="{grid};align-items:center">{lines}</div></div>'
    )


def _colours(parts: Sequence[Part]) -> list[str]:
    """Return the colour of each part. Parts that are free or not in the bar have none."""
    links = iter(_LINKS * len(parts))
    return [
        _COLOURS.get(part.name) or next(links) if part.amount and part.name != words.FREE else ""
        for part in parts
    ]


def _slice(part: Part, colour: str, share: float, written: Callable[[float], str]) -> str:
    tip = escape(f"{part.name}: {written(part.amount)}")
    style = f"width:{100 * share:.2f}%;min-width:2px;background:{colour}"
    return f'<div style="{style};box-sizing:border-box" title="{tip}"></div>'


def _line(part: Part, colour: str, share: float, figure: str) -> str:
    swatch = f"height:10px;border-radius:2px;background:{colour or _TRACK}"
    return (
        f'<i style="{swatch}"></i><span>{escape(part.name)}</span>{html.faint(part.detail, "span")}'
        f'<span style="{_FIGURE}">{figure}</span>'
        f'<span style="{_FIGURE};{html.FAINT}">{formatting.share(share)}</span>'
    )


def _tensors(placement: Placement, root: Branch) -> str:
    """Return the tree of tensors, shortened to the maximum number of rows."""
    head = "".join(f"<span>{text}</span>" for text in words.TENSORS[:-1])
    last = f'<span style="{_FIGURE}">{words.TENSORS[-1]}</span>'
    body = "".join(_rows(placement, rows(root, SHOWN_ROWS)))
    return (
        '<div style="margin-top:12px;max-width:900px;overflow-x:auto">'
        f'<div style="min-width:{_TREE}px"><div style="{_INSET}">'
        f'<span style="{_GRID};{html.FAINT}">{head}{last}</span></div>'
        f"{body}</div></div>"
    )


def _rows(placement: Placement, shown: Sequence[Row]) -> Iterator[str]:
    """Yield nested rows. The first role is open."""
    roles = 0
    depths = [*(row.depth for row in shown[1:]), 0]
    for row, after in zip(shown, depths, strict=False):
        roles += row.depth == 0
        line = _row(placement, row)
        if after > row.depth:
            is_open = " open" if roles == 1 or row.depth else ""
            yield f'<details{is_open}><summary style="{_SUMMARY}">{line}</summary>'
            yield f'<div style="{_INSET}">'
        else:
            yield f'<div style="{_INSET}">{line}</div>'
        yield "</div></details>" * max(0, row.depth - after)


def _row(placement: Placement, row: Row) -> str:
    name, *cells = words.cells(row, placement)
    weight = ";font-weight:600" if row.entry and not isinstance(row.entry, Leaf) else ""
    shape, dtype, spec, each = map(escape, cells)
    return (
        f'<span style="{_GRID}"><span style="{_NAME}{weight}">{escape(name)}</span>'
        f'<span>{shape}</span><span>{dtype}</span><span style="{_NAME}">{spec}</span>'
        f'<span style="{_FIGURE}">{each}</span></span>'
    )


def _cards(plan: Plan, placement: Placement) -> str:
    """Return pictures of the layouts with most bytes."""
    pictures = Blocks(placement)
    cards = "".join(
        _card(placement, array, count, pictures)
        for array, count in largest(plan, placement, SHOWN_LAYOUTS)
    )
    if not cards:
        return ""
    style = "display:flex;flex-wrap:wrap;gap:10px 20px;align-items:flex-start"
    head = _head("blocks by device")
    return f'{head}{STYLE}<div class="nbd" style="{style}">{cards}</div>'


def _card(placement: Placement, array: PlacedArray, count: int, pictures: Blocks) -> str:
    layout = placement.layouts[array.layout]
    picture = pictures.html(array) if layout.pieces <= _DRAWN else _lattice(layout)
    texts = (
        placed.over_axes(layout),
        words.blocks(layout),
        f"device 0: {placed.block(array, layout, layout.blocks[0])}",
        f"and {formatting.count(count - 1, 'more tensor')}" if count > 1 else "",
    )
    small = f"{html.FAINT};font-size:12px;line-height:1.4;margin-top:5px"
    return (
        f'<div style="max-width:{_CARD}px"><div style="{_NAME}">{escape(words.label(array))}</div>'
        f'<div style="{_NAME};{html.FAINT};margin-bottom:5px">{escape(layout.spec)}</div>{picture}'
        f'<div style="{small}">{"<br>".join(escape(text) for text in texts if text)}</div></div>'
    )


def _lattice(layout: Layout) -> str:
    """Return a picture of many blocks: lines between them, and the block of device 0."""
    sharded = [parts for parts in layout.parts if parts > 1][:2]
    if len(sharded) == 1:
        sharded = [*sharded, 1] if layout.parts[0] > 1 else [1, *sharded]
    down, across = sharded
    rows, columns = min(down, _LINES), min(across, _LINES)
    height, width = _cell(rows), _cell(columns)
    lines = ",".join(
        f"repeating-linear-gradient({way},transparent 0 {cell - 1}px,{_PAPER} 0 {cell}px)"
        for way, cell in (("to bottom", height), ("to right", width))
    )
    label = escape(placed.over_axes(layout))
    size = f"width:{columns * width}px;height:{rows * height}px"
    first = f"width:{width - 1}px;height:{height - 1}px;background:{_FIRST}"
    return (
        f'<div role="img" aria-label="{label}" title="{label}" style="{size};'
        f'background:{lines},{_REST}"><div style="{first}"></div></div>'
    )


def _cell(parts: int) -> int:
    """Return the pixels of a block, including one for its line."""
    return 96 if parts == 1 else max(3, min(24, 144 // parts))


def _flags(plan: Plan) -> str:
    """Return the options of other trainers, folded, as text to copy."""
    lines = "".join(
        f'<div>{escape(trainer)}</div><pre style="{_FLAGS}">{escape(options)}</pre>'
        for trainer, options in flags(plan).items()
    )
    if not lines:
        return ""
    summary = f'<summary style="{_SUMMARY}">the same layout in other trainers</summary>'
    return f'<details style="{html.FAINT};font-size:12px;margin-top:6px">{summary}{lines}</details>'


def _runners_up(plan: Plan) -> str:
    if not plan.runners_up:
        return ""
    table = html.table(words.RUNNERS_UP, words.runners_up(plan), (1, 2))
    return _head("alternatives") + table
