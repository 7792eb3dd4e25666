"""Placement as HTML without scripts: a collapsible tree with a picture of every array.

Most styles are in one `<style>` element, because a page may have thousands of rows. An untrusted
notebook loses this element and the labels for screen readers. The tree, the numbers, the colours of
blocks and their tool tips have inline styles. The JupyterLab extension contains the same style file
for its tab.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.views import formatting, html
from nbdist.views.placement import mesh
from nbdist.views.placement import text as words
from nbdist.views.placement.blocks import Blocks, chip
from nbdist.views.placement.tree import Leaf, on_devices, total

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Placement
    from nbdist.views.placement.tree import Branch, Cost

SHOWN_ROWS = 4500
OPEN_ROWS = 40
"""Maximum number of arrays in a tree that starts fully open. Larger trees show only their names."""

_SHOWN_DEVICES = 12
_BAR_WIDTH = 220
HEADER = (
    "array",
    "shape",
    "type",
    "placed",
    "partitioned",
    "bytes",
    "per device",
    "could be sharded",
)
_APART = "display:flex;gap:10px"
_APART_INLINE = "display:inline-flex;gap:10px"
_INDENT = "margin-left:16px"
STYLE = f"<style>\n{Path(__file__).with_name('placement.css').read_text()}</style>"


def page(placement: Placement, root: Branch) -> str:
    """Return the whole view."""
    title = words.title(placement, root.cost)
    facts = "".join(html.line(text) for text in words.facts(placement, root.cost))
    meshes = "".join(mesh.picture(placement, shape) for shape in placement.meshes)
    tree = _Tree(placement, root.cost.arrays <= OPEN_ROWS).html(root)
    return html.box(
        title, f'{STYLE}<div class="nbd">{facts}{meshes}', _devices(placement), tree, "</div>"
    )


def _devices(placement: Placement) -> str:
    sizes = list(on_devices(placement).items())
    shown, rest = sizes[:_SHOWN_DEVICES], sizes[_SHOWN_DEVICES:]
    most = max((size for _, size in sizes), default=0)
    more = ""
    if rest:
        text = f"{len(rest):,} more devices"
        more = f"<details><summary>{text}</summary>{_bars(placement, rest, most)}</details>"
    return _bars(placement, shown, most) + more


def _bars(placement: Placement, sizes: Sequence[tuple[int, int]], most: int) -> str:
    """Return one row per device: its number in the pictures below, its name and its bytes."""
    rows = "".join(
        f"<tr>{_cell(chip(device))}{_cell(escape(words.device(placement, device)))}"
        f"{_cell(formatting.size(size), 'right')}{_cell(_bar(size, most))}</tr>"
        for device, size in sizes
    )
    return f'<table style="border-collapse:collapse;margin:6px 0;border:none">{rows}</table>'


def _cell(inner: str, align: str = "left") -> str:
    style = (
        f"font-size:13px;color:inherit;text-align:{align};padding:1px 10px 1px 0;background:none"
    )
    return f'<td style="{style}">{inner}</td>'


def _bar(size: int, most: int) -> str:
    width = _BAR_WIDTH * size / most if most else 0
    return f'<i class="nbd-b" style="display:block;height:10px;width:{width:.0f}px"></i>'


class _Tree:
    """Rows of the tree, up to a limit."""

    def __init__(self, placement: Placement, all_open: bool) -> None:
        self._layouts = placement.layouts
        self._blocks = Blocks(placement)
        self._all_open = all_open
        self._left = SHOWN_ROWS
        self._what = [
            (words.how(layout), words.partitioned(layout), words.over_axes(layout))
            for layout in placement.layouts
        ]

    def html(self, root: Branch) -> str:
        rows = "".join(self._entries(root, 0))
        head = f'<div class="nbd-r" style="{_APART}">{_cells(*HEADER)}</div>'
        return f'<div class="nbd-t">{head}{rows}</div>{self._not_drawn()}'

    def _not_drawn(self) -> str:
        if not self._blocks.left_out:
            return ""
        arrays = formatting.count(self._blocks.left_out, "array")
        text = f"No room for the pictures of {arrays}: name fewer arrays to show them"
        return f'<div class="nbd-f">{text}</div>'

    def _entries(self, node: Branch, depth: int) -> Iterator[str]:
        for index, entry in enumerate(node.entries):
            if self._left <= 0:
                yield self._rest(total(node.entries[index:]))
                return
            self._left -= 1
            yield self._leaf(entry) if isinstance(entry, Leaf) else self._branch(entry, depth)

    def _rest(self, hidden: Cost) -> str:
        text = (
            f"… and {formatting.count(hidden.arrays, 'more array')}, {formatting.size(hidden.once)}"
        )
        return f'<div class="nbd-f">{text}</div>'

    def _branch(self, branch: Branch, depth: int) -> str:
        cost = branch.cost
        shardable = formatting.size(cost.shardable) if cost.shardable else ""
        arrays = formatting.count(cost.arrays, "array")
        size = formatting.size(cost.once)
        row = _cells(escape(words.label(branch.label, ())), arrays, "", "", "", size, "", shardable)
        is_open = " open" if self._all_open or depth == 0 else ""
        inner = "".join(self._entries(branch, depth + 1))
        head = f'<summary><span class="nbd-r" style="{_APART_INLINE}">{row}</span></summary>'
        return f'<details{is_open}>{head}<div style="{_INDENT}">{inner}</div></details>'

    def _leaf(self, leaf: Leaf) -> str:
        array, layout = leaf.array, self._layouts[leaf.array.layout]
        how, parts, over = self._what[array.layout]
        where = self._blocks.html(array) if layout.devices else ""
        cells = _cells(
            escape(words.label(leaf.label, array.ranks)),
            words.shape(array),
            escape(array.dtype),
            f'<span title="{escape(over)}">{escape(how)}</span>' if over else escape(how),
            f"{where} <span>{parts}</span>",
            formatting.size(leaf.cost.once) if layout.devices else "",
            words.per_device(array, layout),
            words.advice(array, layout, leaf.cost),
        )
        return f'<div class="nbd-r" style="{_APART}">{cells}</div>'


def _cells(*texts: str) -> str:
    """Return cells separated by spaces, in case the styles are lost."""
    return " ".join(f"<span>{text}</span>" for text in texts)
