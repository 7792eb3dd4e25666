"""Plan as `%%dist_plan` shows it."""

from __future__ import annotations

import textwrap
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.records import PlannedTensor
from nbdist.views import formatting, html
from nbdist.views.placement import text as placed
from nbdist.views.placement.tree import rows
from nbdist.views.plan import html as plan_html
from nbdist.views.plan import text as words
from nbdist.views.plan.flags import flags
from nbdist.views.plan.tensors import folded, largest, placement_of
from nbdist.views.result_table import ResultTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.records import Placement, Plan
    from nbdist.views.placement.tree import Branch
    from nbdist.views.plan.text import Part

WIDTH = 100
"""Width of the text in columns."""

SHOWN_ROWS = 48
SHOWN_LAYOUTS = 3
SHOWN_BLOCKS = 4

_BAR, _FIGURES = 44, 24
"""Columns: largest width of a bar, and width of the figures and gaps of its line."""

_LAST = 44
"""Maximum width of a last column. Longer texts continue in the lines below."""


class PlanPicture(ResultTable[PlannedTensor]):
    """Arrays of a plan, one row each, as `%dist_plan` shows them.

    The key of an array is the expression that leads to it, such as `params['w']`.

    Attributes:
        plan: plan to show.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        """Return True if the other picture shows an equal plan."""
        return self.plan == other.plan if isinstance(other, PlanPicture) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # a plan contains dicts

    @property
    def rows(self) -> tuple[PlannedTensor, ...]:
        return self.plan.tensors

    def _key(self, index: int, row: PlannedTensor) -> str:
        return row.path

    def _columns(self) -> list[str]:
        return list(PlannedTensor.__struct_fields__)

    @cached_property
    def _placement(self) -> Placement:
        return placement_of(self.plan)

    @cached_property
    def _tree(self) -> Branch:
        return folded(self.plan, self._placement)

    @cached_property
    def _html(self) -> str:
        return plan_html.page(self.plan, self._placement, self._tree)

    def html(self) -> str:
        return self._html

    def lines(self) -> list[str]:
        return [*self._lines()]

    def _lines(self) -> Iterator[str]:
        plan = self.plan
        yield from wrapped(words.headline(plan))
        for text in words.facts(plan):
            yield from wrapped(text, "  ")
        for text in words.warnings(plan):
            yield from wrapped(f"warning: {text}", "  ")
        for text in words.verified(plan):
            yield from wrapped(text, "  ")
        yield ""
        for axis, size, text in words.degrees(plan):
            yield from wrapped(f"{axis} {size}: {text}", "  ")
        yield from ("", words.memory_title(plan))
        yield from _bars(words.memory_parts(plan), formatting.size)
        yield from ("", words.time_title(plan))
        yield from _bars(words.time_parts(plan), formatting.duration)
        for text in words.notes(plan):
            yield f"  ({text})"
        yield from ("", *self._tree_lines(), "")
        yield from self._block_lines()
        yield from self._rest()

    def _tree_lines(self) -> list[str]:
        table = []
        for row in rows(self._tree, SHOWN_ROWS):
            name, *cells = words.cells(row, self._placement)
            table.append(["  " * row.depth + name, *cells])
        return _table(words.TENSORS, table, (4,))

    def _block_lines(self) -> Iterator[str]:
        """Yield the devices of each block, for the layouts with most bytes."""
        placement = self._placement
        for array, count in largest(self.plan, placement, SHOWN_LAYOUTS):
            layout = placement.layouts[array.layout]
            more = f" and {count - 1:,} more" if count > 1 else ""
            yield formatting.shortened(f"{layout.spec}: {words.label(array)}{more}", WIDTH)
            yield formatting.shortened(
                f"  {placed.over_axes(layout)}: {words.blocks(layout)}", WIDTH
            )
            held = words.holders(placement, layout, SHOWN_BLOCKS)
            slices = [placed.block(array, layout, number) for number in range(len(held))]
            width = max(map(len, slices))
            for block, devices in zip(slices, held, strict=True):
                yield formatting.shortened(f"    {block.ljust(width)}  {devices}", WIDTH)
            if layout.pieces > SHOWN_BLOCKS:
                yield f"    … and {layout.pieces - SHOWN_BLOCKS:,} more blocks"
            yield ""

    def _rest(self) -> Iterator[str]:
        if self.plan.runners_up:
            yield from _table(words.RUNNERS_UP, [*_unfolded(words.runners_up(self.plan))], (1, 2))
            yield ""
        for trainer, options in flags(self.plan).items():
            yield from wrapped(f"{trainer}: {options}")
        for note in self.plan.notes:
            yield from wrapped(f"note: {note}")


def wrapped(text: str, indent: str = "") -> list[str]:
    """Wrap text to the width of the view."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _bars(parts: Sequence[Part], written: Callable[[float], str]) -> Iterator[str]:
    """Yield one line per part. Each bar starts at the end of the one above."""
    whole = sum(part.amount for part in parts) or 1
    names = max(len(part.name) for part in parts)
    width = min(_BAR, WIDTH - _FIGURES - names - max(len(part.detail) for part in parts))
    before = 0.0
    for part in parts:
        start, end = (round(width * n / whole) for n in (before, before + part.amount))
        before += part.amount
        bar = " " * start + ("█" * (end - start) or "▏" * (part.amount > 0))
        figure = f"{written(part.amount):>10}  {formatting.share(part.amount / whole):>5}"
        yield f"  {part.name.ljust(names)}  {bar.ljust(width + 1)}{figure}  {part.detail}".rstrip()


def _table(
    header: Sequence[str], table: Sequence[Sequence[str]], numbers: Sequence[int]
) -> list[str]:
    """Return a table that fits the width. The longest columns are shortened."""
    widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    fitting = [list(map(formatting.shortened, row, widths)) for row in table]
    return html.text_table(header, fitting, numbers)


def _unfolded(table: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield rows whose last column continues in the lines below."""
    for *cells, last in table:
        first, *more = textwrap.wrap(last, _LAST) or [""]
        yield [*cells, first]
        yield from ([*[""] * len(cells), text] for text in more)
