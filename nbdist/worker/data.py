"""Global batches, and how they are cut: the same batches for any number of ranks.

A global batch is cut into one part of equal size for each rank. A batch that cannot be cut evenly,
as the last of an epoch often is, is given whole to every replica: each computes the same, and the
mean over replicas is the batch's own. So every sample counts once, with its weight, and nothing is
dropped or padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

Tree = Any
"""Arrays in tuples, lists and dicts."""


class Share(msgspec.Struct, frozen=True):
    """What a rank gets of a global batch.

    Attributes:
        values: this rank's rows, or all rows if `whole`.
        rows: rows in the global batch.
        whole: every replica gets all rows.
    """

    values: Tree
    rows: int
    whole: bool


class Batch(Share, frozen=True):
    """What a rank's step gets: `values` are its arguments.

    Attributes:
        everything: makes the arguments with all rows.
    """

    everything: Callable[[], tuple[Tree, ...]]


class Cut(msgspec.Struct, frozen=True):
    """How global batches are cut: `ranks` parts, each for `replicas / ranks` replicas."""

    rank: int
    ranks: int
    replicas: int

    def share(self, rows: int, part: Callable[[slice], Tree]) -> Share:
        """This rank's share of a batch of `rows`, of which `part` gives some."""
        if rows % self.replicas:
            return Share(part(slice(0, rows)), rows, whole=True)
        each = rows // self.ranks
        own = slice(self.rank * each, (self.rank + 1) * each)
        return Share(part(own), rows, whole=False)

    def batch(self, rows: int, part: Callable[[slice], tuple[Tree, ...]]) -> Batch:
        """The same for a step, of whose arguments `part` gives some rows."""
        share = self.share(rows, part)
        return Batch(share.values, rows, share.whole, everything=lambda: part(slice(0, rows)))


def map_arrays(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `function` of every array."""
    if isinstance(tree, dict):
        return {key: map_arrays(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(map_arrays(function, value) for value in tree)
    return function(tree)


def leaves(tree: Tree) -> list[Any]:
    """The arrays of a tree."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (tuple, list)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def described(tree: Tree) -> str:
    """The shapes of a tree, as in `(32, 64), (32,)`."""
    return ", ".join(str(tuple(leaf.shape)) for leaf in leaves(tree))
