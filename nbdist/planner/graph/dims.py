"""Dimensions that must agree: a union-find over the dimensions of all arrays of a step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nbdist.planner.graph.model import Group

if TYPE_CHECKING:
    from collections.abc import Sequence


class Dims:
    """A union-find of dimensions, which are numbers; tied dimensions form a group."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._divisors: list[int] = []
        self._blocks: list[str] = []
        self._names: list[str] = []

    def fresh(self, size: int, name: str = "") -> int:
        """Return a new dimension; -1, which is never tied, if its size is 1."""
        if size == 1:
            return -1
        self._parents.append(len(self._parents))
        self._divisors.append(size)
        self._blocks.append("")
        self._names.append(name)
        return len(self._parents) - 1

    def find(self, dim: int) -> int:
        """Return the number that stands for a dimension's group."""
        while self._parents[dim] != dim:
            self._parents[dim] = self._parents[self._parents[dim]]
            dim = self._parents[dim]
        return dim

    def tie(self, a: int, b: int) -> None:
        """Tie two dimensions: both are sharded, or none is."""
        if a < 0 or b < 0:
            return
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        a, b = min(a, b), max(a, b)
        self._parents[b] = a
        self._divisors[a] = math.gcd(self._divisors[a], self._divisors[b])
        self._blocks[a] = self._blocks[a] or self._blocks[b]
        self._names[a] = self._names[a] or self._names[b]

    def tie_all(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Tie the dimensions of two arrays one by one."""
        for x, y in zip(a, b, strict=True):
            self.tie(x, y)

    def block(self, dim: int, why: str) -> None:
        """Note why a dimension cannot be sharded."""
        if dim >= 0:
            root = self.find(dim)
            self._blocks[root] = self._blocks[root] or why

    def groups(self) -> tuple[dict[int, int], tuple[Group, ...]]:
        """Return the group number of each root, and the groups."""
        roots = [dim for dim, parent in enumerate(self._parents) if dim == parent]
        made = tuple(Group(self._divisors[r], self._names[r], self._blocks[r]) for r in roots)
        return {root: number for number, root in enumerate(roots)}, made
