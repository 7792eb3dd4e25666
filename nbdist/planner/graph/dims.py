"""Which dimensions must agree: a union-find over the dimensions of all arrays of a step."""

from __future__ import annotations

import math

from nbdist.planner.graph.model import Group


class Dims:
    """Dimensions are numbers; what is tied is one group."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._divisors: list[int] = []
        self._blocks: list[str] = []
        self._names: list[str] = []

    def fresh(self, size: int, name: str = "") -> int:
        """A dimension that nothing ties yet; -1, which is never tied, if its size is 1."""
        if size == 1:
            return -1
        self._parents.append(len(self._parents))
        self._divisors.append(size)
        self._blocks.append("")
        self._names.append(name)
        return len(self._parents) - 1

    def find(self, dim: int) -> int:
        """The number that stands for its group."""
        while self._parents[dim] != dim:
            self._parents[dim] = self._parents[self._parents[dim]]
            dim = self._parents[dim]
        return dim

    def tie(self, a: int, b: int) -> None:
        """These two must be cut alike."""
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

    def block(self, dim: int, why: str) -> None:
        """This one cannot be cut."""
        if dim >= 0:
            root = self.find(dim)
            self._blocks[root] = self._blocks[root] or why

    def groups(self) -> tuple[dict[int, int], tuple[Group, ...]]:
        """The groups, and for each root which it is."""
        roots = [dim for dim, parent in enumerate(self._parents) if dim == parent]
        made = tuple(Group(self._divisors[r], self._names[r], self._blocks[r]) for r in roots)
        return {root: number for number, root in enumerate(roots)}, made
