"""Global batches, and how they are cut: the same batches for any number of ranks.

A global batch is cut into one part of equal size for each rank. A batch that cannot be cut evenly,
as the last of an epoch often is, is given whole to every replica: each computes the same, and the
mean over replicas is the batch's own. So every sample counts once, with its weight, and nothing is
dropped or padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def is_branch(tree: Tree) -> bool:
    """Whether it holds arrays; a list of numbers is one."""
    if isinstance(tree, list):
        return bool(tree) and not isinstance(tree[0], (int, float, str, list, np.generic))
    return isinstance(tree, (tuple, dict))


def map_trees(function: Callable[[list[Any]], Any], trees: Sequence[Tree]) -> Tree:
    """One tree with `function` of what all these have at each place."""
    first = trees[0]
    if not is_branch(first):
        return function(list(trees))
    if isinstance(first, dict):
        return {key: map_trees(function, [tree[key] for tree in trees]) for key in first}
    return tuple(map_trees(function, [tree[i] for tree in trees]) for i in range(len(first)))


def map_arrays(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `function` of every array."""
    return map_trees(lambda leaves: function(leaves[0]), [tree])


def leaves(tree: Tree) -> list[Any]:
    """The arrays of a tree."""
    if not is_branch(tree):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree
    return [leaf for branch in branches for leaf in leaves(branch)]


def kind_of(tree: Tree) -> Any:
    """What a compiled step depends on, to be compared and hashed: structure, shapes and types."""
    if isinstance(tree, dict):
        return tuple((key, kind_of(value)) for key, value in tree.items())
    if isinstance(tree, (tuple, list)):
        return tuple(map(kind_of, tree))
    return tree.shape, tree.dtype


def rows_of(tree: Tree, rows: Any) -> Tree:
    """Some rows of every array."""
    return map_arrays(lambda array: array[rows], tree)


def slicer(values: tuple[Tree, ...]) -> Callable[[slice], tuple[Tree, ...]]:
    """Gives a part of the rows of a step's arguments, as `Cut.batch` wants it."""
    return lambda part: rows_of(values, part)


def described(tree: Tree) -> str:
    """The shapes of a tree, as in `(32, 64), (32,)`."""
    return ", ".join(str(tuple(leaf.shape)) for leaf in leaves(tree))
