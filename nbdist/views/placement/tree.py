"""Arrays as a tree of their paths, with what each branch takes; and what each device holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.records import HOST_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Layout, PlacedArray, Placement


_LEAST = 4
"""Rows that are worth opening a branch for."""


@dataclass(frozen=True)
class Cost:
    """What arrays take.

    Attributes:
        arrays: how many there are.
        once: bytes without copies.
        stored: bytes with copies, on all devices together.
        shardable: of the bytes of copies, those of arrays that could be cut instead.
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
    """Bytes of the array on each of its devices."""
    return array.nbytes // layout.pieces if layout.devices else 0


def dimension_to_cut(array: PlacedArray, layout: Layout) -> int:
    """The first dimension that the copies could be cut along, each keeping a part; -1: none."""
    if layout.copies > 1:
        parts = layout.parts or (1,) * len(array.shape)
        for dimension, (length, cut) in enumerate(zip(array.shape, parts, strict=True)):
            if length > 0 and (length // cut) % layout.copies == 0:
                return dimension
    return -1


def cost(array: PlacedArray, layout: Layout) -> Cost:
    if not layout.devices:
        return Cost(arrays=1)
    stored = on_each(array, layout) * len(layout.devices)
    once = array.nbytes * layout.owners
    copies = max(0, stored - once)
    shardable = copies if dimension_to_cut(array, layout) >= 0 else 0
    return Cost(1, stored - copies, stored, shardable)


def on_devices(placement: Placement) -> dict[int, int]:
    """Bytes on each device, by rank and name."""
    of_layout: Counter[int] = Counter()
    for array in placement.arrays:
        of_layout[array.layout] += on_each(array, placement.layouts[array.layout])
    total: Counter[int] = Counter()
    for index, size in of_layout.items():
        for device in placement.layouts[index].devices:
            total[device] += size
    return {device: total[device] for device in sorted(total, key=lambda d: _order(placement, d))}


def _order(placement: Placement, index: int) -> tuple[bool, int, str, int]:
    """Hosts' memories last; `cpu:2` before `cpu:10`."""
    device = placement.devices[index]
    stem, number = _natural(device.name)
    return device.name == HOST_MEMORY, device.rank, stem, number


def _natural(name: str) -> tuple[str, int]:
    """`cpu`, 2 for `cpu:2`."""
    stem, _, number = name.partition(":")
    return stem, int(number) if number.isdigit() else -1


@dataclass
class Leaf:
    """An array in the tree; `label` is the end of its path."""

    label: str
    array: PlacedArray
    cost: Cost


@dataclass
class Branch:
    """A part of the tree; `label` leads to it from the branch above."""

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
    """All arrays below one root; branches that lead to one branch alone are joined with it."""
    root = Branch("")
    for array in placement.arrays:
        node = root
        for label in array.path[:-1]:
            node = node.branch(label)
        array_cost = cost(array, placement.layouts[array.layout])
        node.entries.append(Leaf(array.path[-1], array, array_cost))
    return _settled(root)


def _settled(node: Branch) -> Branch:
    """With branches joined, and their costs."""
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
    """Summed field by field: a record for each of thousands of sums would take its time."""
    costs = [entry.cost for entry in entries]
    return Cost(
        sum(c.arrays for c in costs),
        sum(c.once for c in costs),
        sum(c.stored for c in costs),
        sum(c.shardable for c in costs),
    )


@dataclass(frozen=True)
class Row:
    """A line of the tree as it is cut: an entry, or what is left out after `depth` of them.

    Attributes:
        depth: how deep, from 0.
        entry: what stands there; None for the rest of a branch.
        hidden: what is not shown below the entry, or of the rest.
    """

    depth: int
    entry: Branch | Leaf | None
    hidden: Cost = field(default_factory=Cost)


def rows(root: Branch, limit: int) -> list[Row]:
    """`limit` rows at most: long branches end early, and small ones are open before large ones."""
    return list(_rows(root, 0, limit))


def _rows(node: Branch, depth: int, limit: int) -> Iterator[Row]:
    """Of a branch too long, the first half or so of what could be shown, and the first is open."""
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
    """Rows for what is in each branch, by its index: small ones are shown whole, first ones first.

    Large ones share what is left, if that is enough for each.
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
    """Rows of all that is in it."""
    return len(node.entries) + sum(_size(e) for e in node.entries if isinstance(e, Branch))
