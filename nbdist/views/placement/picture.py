"""Array placement as `%dist_show` shows it: a table of devices and a tree of arrays."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.records import ArrayPlace
from nbdist.views import formatting, html
from nbdist.views.placement import html as placement_html
from nbdist.views.placement import text as words
from nbdist.views.placement.tree import Leaf, on_devices, rows, tree
from nbdist.views.result_table import ResultTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Layout, MimeBundle, PlacedArray, Placement
    from nbdist.views.placement.tree import Branch, Row

SHOWN_ROWS = 60
SHOWN_DEVICES = 16
SHOWN_LAYOUTS = 6
PICTURE_ROWS = 32

_NUMBERS = (5, 6)


class PlacementPicture(ResultTable[ArrayPlace]):
    """Arrays of a placement, one row each, as `%dist_show` shows them.

    The key of an array is the expression that leads to it, such as `params['w']`.

    Attributes:
        placement: placement to show.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def __eq__(self, other: object) -> bool:
        """Return True if the other picture shows an equal placement."""
        if not isinstance(other, PlacementPicture):
            return NotImplemented
        return self.placement == other.placement

    __hash__ = None  # type: ignore[assignment]  # a placement contains a dict

    @cached_property
    def rows(self) -> tuple[ArrayPlace, ...]:
        return tuple(map(self._row, self.placement.arrays))

    def _row(self, array: PlacedArray) -> ArrayPlace:
        layout = self.placement.layouts[array.layout]
        parts = layout.parts or (1,) * len(array.shape)
        return ArrayPlace(
            path=array.name,
            shape=array.shape,
            dtype=array.dtype,
            nbytes=array.nbytes,
            kind=layout.kind,
            spec=layout.spec,
            shard_shape=tuple(n // count for n, count in zip(array.shape, parts, strict=True)),
            devices=tuple(words.device(self.placement, device) for device in layout.devices),
            ranks=array.ranks,
        )

    def _key(self, index: int, row: ArrayPlace) -> str:
        return f"{row.path} (rank {formatting.ranks(row.ranks)})" if row.ranks else row.path

    def _columns(self) -> list[str]:
        return list(ArrayPlace.__struct_fields__)

    @cached_property
    def _tree(self) -> Branch:
        return tree(self.placement)

    @cached_property
    def _html(self) -> str:
        return placement_html.page(self.placement, self._tree)

    def html(self) -> str:
        return self._html

    def lines(self) -> list[str]:
        return [
            words.title(self.placement, self._tree.cost),
            *words.facts(self.placement, self._tree.cost),
            "",
            *self._device_lines(),
            "",
            *self._slice_lines(),
            *self._tree_lines(SHOWN_ROWS),
        ]

    def png(self) -> bytes:
        """Draw bytes per device as bars, and the tree below."""
        from nbdist.views.placement.png import picture

        return picture(
            title=words.title(self.placement, self._tree.cost),
            facts=list(words.facts(self.placement, self._tree.cost)),
            sizes={
                words.device(self.placement, d): n for d, n in on_devices(self.placement).items()
            },
            lines=self._tree_lines(PICTURE_ROWS),
        )

    def _repr_mimebundle_(self, **_: object) -> tuple[MimeBundle, dict[str, dict[str, object]]]:
        from nbdist.views.placement.png import WIDTH

        bundle: MimeBundle = {
            "text/html": self.html(),
            "image/png": self.png(),
            "text/plain": repr(self),
        }
        return bundle, {"image/png": {"width": WIDTH}}

    def _device_lines(self) -> list[str]:
        sizes = list(on_devices(self.placement).items())
        table = [
            [words.device(self.placement, device), formatting.size(size)]
            for device, size in sizes[:SHOWN_DEVICES]
        ]
        hidden = len(sizes) - SHOWN_DEVICES
        rest = [f"… and {hidden:,} more devices"] if hidden > 0 else []
        return [*html.text_table(("device", "bytes"), table, (1,)), *rest]

    def _slice_lines(self) -> Iterator[str]:
        """Yield the blocks of each sharded layout, for its first array."""
        examples: dict[int, PlacedArray] = {}
        for array in self.placement.arrays:
            if self.placement.layouts[array.layout].pieces > 1:
                examples.setdefault(array.layout, array)
        for index, array in list(examples.items())[:SHOWN_LAYOUTS]:
            layout = self.placement.layouts[index]
            name = f"{words.label(array.name, ())} ({words.shape(array)})"
            yield f"{words.how(layout)}: {words.over_axes(layout)}, of {name}:"
            yield from self._blocks(array, layout)
            yield ""
        if len(examples) > SHOWN_LAYOUTS:
            yield f"… and {len(examples) - SHOWN_LAYOUTS:,} more layouts"
            yield ""

    def _blocks(self, array: PlacedArray, layout: Layout) -> Iterator[str]:
        pairs = list(zip(layout.devices, layout.blocks, strict=True))
        places = [words.device(self.placement, device) for device, _ in pairs[:SHOWN_DEVICES]]
        width = max(map(len, places))
        for place, (_, number) in zip(places, pairs, strict=False):
            yield f"  {place.ljust(width)}  {words.block(array, layout, number)}"
        if len(pairs) > SHOWN_DEVICES:
            yield f"  … and {len(pairs) - SHOWN_DEVICES:,} more devices"

    def _tree_lines(self, limit: int) -> list[str]:
        table = [self._cells(row) for row in rows(self._tree, limit)]
        return html.text_table(placement_html.HEADER, table, _NUMBERS)

    def _cells(self, row: Row) -> list[str]:
        indent = "  " * row.depth
        if row.entry is None:
            more = formatting.count(row.hidden.arrays, "more array")
            return [f"{indent}… and {more}, {formatting.size(row.hidden.once)}", *[""] * 7]
        if isinstance(row.entry, Leaf):
            return self._array_cells(indent, row.entry)
        cost = row.entry.cost
        cells = [
            indent + words.label(row.entry.label, ()),
            formatting.count(cost.arrays, "array"),
            "",
            "",
            "",
        ]
        shardable = formatting.size(cost.shardable) if cost.shardable else ""
        return [*cells, formatting.size(cost.once), "", shardable]

    def _array_cells(self, indent: str, leaf: Leaf) -> list[str]:
        array, layout = leaf.array, self.placement.layouts[leaf.array.layout]
        return [
            indent + words.label(leaf.label, array.ranks),
            words.shape(array),
            array.dtype,
            words.how(layout),
            words.partitioned(layout),
            formatting.size(leaf.cost.once) if layout.devices else "",
            words.per_device(array, layout),
            words.advice(array, layout, leaf.cost),
        ]
