"""Tree of arrays by path with the bytes of each branch, and the bytes on each device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.records import HOST_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Layout, PlacedArray, Placement


_LEAST = 4
"""Minimum number of rows for an open branch."""


@dataclass(frozen=True)
class Cost:
    """Number and bytes of arrays.

    Attributes:
        arrays: number of arrays.
        once: bytes without copies.
        stored: bytes with copies, over all devices.
        shardable: bytes of copies of arrays that could be sharded instead.
    """

    arrays: int = 0
    once: int = 0
    stored: int = 0
    shardable: int = 0

    @property
    def copies(self) -> int:
        """Bytes of copies beyond the first."""
        return self.stored - self.once


def on_each(array: PlacedArray, layout: Layout) -> int:
    """Return the bytes of the array on each of its devices."""
    return array.nbytes // layout.pieces if layout.devices else 0


def dimension_to_shard(array: PlacedArray, layout: Layout) -> int:
    """Return the first dimension that could be sharded instead of copied. -1 if there is none."""
    if layout.copies > 1:
        parts = layout.parts or (1,) * len(array.shape)
        for dimension, (length, n_parts) in enumerate(zip(array.shape, parts, strict=True)):
            if length > 0 and (length // n_parts) % layout.copies == 0:
                return dimension
    return -1


def cost(array: PlacedArray, layout: Layout) -> Cost:
    if not layout.devices:
        return Cost(arrays=1)
    stored = on_each(array, layout) * len(layout.devices)
    once = array.nbytes * layout.owners
    copies = max(0, stored - once)
    shardable = copies if dimension_to_shard(array, layout) >= 0 else 0
    return Cost(1, stored - copies, stored, shardable)


def on_devices(placement: Placement) -> dict[int, int]:
    """Return the bytes on each device, ordered by rank and name."""
    of_layout: Counter[int] = Counter()
    for array in placement.arrays:
        of_layout[array.layout] += on_each(array, placement.layouts[array.layout])
    total: Counter[int] = Counter()
    for index, size in of_layout.items():
        for device in placement.layouts[index].devices:
            total[device] += size
    return {device: total[device] for device in sorted(total, key=lambda d: _order(placement, d))}


def _order(placement: Placement, index: int) -> tuple[bool, int, str, int]:
    """Return a sort key: host memory last, `cpu:2` before `cpu:10`."""
    device = placement.devices[index]
    stem, number = _natural(device.name)
    return device.name == HOST_MEMORY, device.rank, stem, number


def _natural(name: str) -> tuple[str, int]:
    """Split a device name: `cpu:2` into `cpu` and 2."""
    stem, _, number = name.partition(":")
    return stem, int(number) if number.isdigit() else -1


@dataclass
class Leaf:
    """Array in the tree. `label` is the end of its path."""

    label: str
    array: PlacedArray
    cost: Cost


@dataclass
class Branch:
    """Branch of the tree. `label` leads to it from its parent."""

    label: str
    entries: list[Branch | Leaf] = field(default_factory=list)
    branches: dict[str, Branch] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)

    def branch(self, label: str) -> Branch:
        if label not in self.branches:
            self.branches[label] = Branch(label)
            self.entries.append(self.branches[label])
        return self.branches[label]


def tree(placement: Placement) -> Branch:
    """Return the tree of all arrays. A branch with a single branch is merged with it."""
    root = Branch("")
    for array in placement.arrays:
        node = root
        for label in array.path[:-1]:
            node = node.branch(label)
        array_cost = cost(array, placement.layouts[array.layout])
        node.entries.append(Leaf(array.path[-1], array, array_cost))
    return _settled(root)


def _settled(node: Branch) -> Branch:
    """Return the node with merged branches and their costs."""
    node.entries = [
        _settled(entry) if isinstance(entry, Branch) else entry for entry in node.entries
    ]
    node.cost = total(node.entries)
    only = node.entries[0] if len(node.entries) == 1 else None
    if node.label and isinstance(only, Branch):
        only.label = node.label + only.label
        return only
    return node


def total(entries: Sequence[Branch | Leaf]) -> Cost:
    """Return the sum of costs. Sums field by field, because a record per addition would be slow."""
    costs = [entry.cost for entry in entries]
    return Cost(
        sum(c.arrays for c in costs),
        sum(c.once for c in costs),
        sum(c.stored for c in costs),
        sum(c.shardable for c in costs),
    )


@dataclass(frozen=True)
class Row:
    """Line of the tree: an entry, or the remainder of a branch.

    Attributes:
        depth: depth from 0.
        entry: entry of the line, None for the remainder of a branch.
        hidden: cost of the hidden parts.
    """

    depth: int
    entry: Branch | Leaf | None
    hidden: Cost = field(default_factory=Cost)


def rows(root: Branch, limit: int) -> list[Row]:
    """Return at most `limit` rows. Small branches open first, and long ones are truncated."""
    return list(_rows(root, 0, limit))


def _rows(node: Branch, depth: int, limit: int) -> Iterator[Row]:
    """Yield the rows of a branch.

    Of a long branch, show about half of the limit, and open the first entry.
    """
    fits = len(node.entries) <= limit
    shown = node.entries if fits else node.entries[: max(limit // 2, 1)]
    spare = limit - len(shown) - (not fits)
    inner = _shares(shown if fits else shown[:1], spare)
    for index, entry in enumerate(shown):
        if isinstance(entry, Branch) and index in inner:
            yield Row(depth, entry)
            yield from _rows(entry, depth + 1, inner[index])
        else:
            yield Row(depth, entry, entry.cost if isinstance(entry, Branch) else Cost())
    if not fits:
        yield Row(depth, None, total(node.entries[len(shown) :]))


def _shares(entries: Sequence[Branch | Leaf], spare: int) -> dict[int, int]:
    """Return the rows for each open branch by index. Small branches are shown whole, first.

    Large branches share the rest, if it suffices for each.
    """
    branches = [(_size(e), i) for i, e in enumerate(entries) if isinstance(e, Branch)]
    shares: dict[int, int] = {}
    for left, (size, index) in zip(range(len(branches), 0, -1), sorted(branches), strict=True):
        share = min(size, spare // left)
        if share < min(size, _LEAST):
            share = size
        if share <= spare:
            shares[index] = share
            spare -= share
    return shares


def _size(node: Branch) -> int:
    """Return the number of rows of a branch."""
    return len(node.entries) + sum(_size(e) for e in node.entries if isinstance(e, Branch))
