"""Global batches and their division into shards: equal batches for any number of ranks.

A global batch is split into one shard of equal size for each rank. If a batch does not divide
evenly, for example the last one of an epoch, every replica gets all of it. All replicas then
compute the same, and the mean over replicas is the mean of the batch. Every sample counts once,
with its weight, and nothing is dropped or padded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from nbdist.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tree = Any
"""Arrays in tuples, lists and dicts."""


class Share(msgspec.Struct, frozen=True):
    """A rank's part of a global batch.

    Attributes:
        values: this rank's rows, or all rows if `whole`.
        rows: number of rows in the global batch.
        whole: True if every replica gets all rows.
    """

    values: Tree
    rows: int
    whole: bool


class Checksums(NamedTuple):
    """Checksums of a global batch, int32. Samples may have another form below the maps.

    Paths of folders that each rank has made, and protocol buffers of two processes, differ, and the
    samples that maps make of them are equal.

    Attributes:
        below: checksum of all elements below the maps, and of the maps.
        above: checksum of some samples above the maps.
    """

    below: int
    above: int

    @staticmethod
    def are_equal(gathered: np.ndarray) -> bool:
        """Return True if the ranks have the same batch.

        Args:
            gathered: checksums of each rank, shape `(ranks, 2)`.
        """
        return bool((gathered == gathered[0]).all(axis=0).any())


class Batch(Share, frozen=True):
    """Data of one step on one rank: `values` are the arguments of the step.

    Attributes:
        everything: returns the arguments with all rows. Reads them once.
        divided: number of arguments that contain rows; the others are equal on all replicas. None
            if all contain rows.
        checksums: checksums of the global batch if this rank does not have all rows, although all
            ranks read the same elements; else None.
    """

    everything: Callable[[], tuple[Tree, ...]]
    divided: int | None = None
    checksums: Checksums | None = None


class RankRows(msgspec.Struct, frozen=True):
    """Rows of a rank in global batches: one of `ranks` parts, for `replicas / ranks` replicas."""

    rank: int
    ranks: int
    replicas: int

    def share(self, rows: int, part: Callable[[slice], Tree]) -> Share:
        """Return this rank's share of a batch of `rows` rows; `part` returns some of the rows."""
        if rows % self.replicas:
            return Share(part(slice(0, rows)), rows, whole=True)
        each = rows // self.ranks
        own = slice(self.rank * each, (self.rank + 1) * each)
        return Share(part(own), rows, whole=False)

    def batch(self, rows: int, part: Callable[[slice], tuple[Tree, ...]]) -> Batch:
        """Return this rank's batch of a step; `part` returns some rows of the arguments."""
        share = self.share(rows, part)
        everything = functools.cache(functools.partial(part, slice(0, rows)))
        return Batch(share.values, rows, share.whole, everything)


def is_branch(tree: Tree) -> bool:
    """Return True if the tree contains arrays; a list of numbers is an array itself."""
    if isinstance(tree, list):
        return bool(tree) and not isinstance(tree[0], (int, float, str, list, np.generic))
    return isinstance(tree, (tuple, dict))


def map_trees(function: Callable[[list[Any]], Any], trees: Sequence[Tree]) -> Tree:
    """Return a tree with `function` of the leaves of all trees at each place."""
    first = trees[0]
    if not is_branch(first):
        return function(list(trees))
    if isinstance(first, dict):
        return {key: map_trees(function, [tree[key] for tree in trees]) for key in first}
    return tuple(map_trees(function, [tree[i] for tree in trees]) for i in range(len(first)))


def map_arrays(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return the tree with `function` of every array."""
    return map_trees(lambda leaves: function(leaves[0]), [tree])


def leaves(tree: Tree) -> list[Any]:
    """Return the arrays of a tree."""
    if not is_branch(tree):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree
    return [leaf for branch in branches for leaf in leaves(branch)]


def kind_of(tree: Tree) -> Any:
    """Return the structure, shapes and types, on which a compiled step depends. Hashable."""
    if isinstance(tree, dict):
        return tuple((key, kind_of(value)) for key, value in tree.items())
    if isinstance(tree, (tuple, list)):
        return tuple(map(kind_of, tree))
    return tree.shape, tree.dtype


def refuse_other_rows(first: Tree, own: Tree) -> None:
    """Raise StepError if rows have other shapes or types than the first sample of the data set.

    Args:
        first: batch of the first sample.
        own: batch of rows of this rank.
    """
    kinds = map_arrays(_row_kind, first), map_arrays(_row_kind, own)
    if kinds[0] != kinds[1]:
        one, other = (", ".join(map(_row_kind, leaves(tree))) for tree in (first, own))
        raise StepError(
            f"the samples have different shapes or types, such as {one} and {other}: pad them in a "
            "map, or choose lengths with --batch N --bucket L"
        )


def _row_kind(column: Any) -> str:
    kind = "text" if column.dtype.kind in "US" else column.dtype
    return f"{tuple(column.shape[1:])} {kind}"


def rows_of(tree: Tree, rows: Any) -> Tree:
    """Return some rows of every array."""
    return map_arrays(lambda array: array[rows], tree)


def slicer(values: tuple[Tree, ...]) -> Callable[[slice], tuple[Tree, ...]]:
    """Return a function for `RankRows.batch` that takes rows of a step's arguments."""
    return lambda part: rows_of(values, part)


def described(tree: Tree) -> str:
    """Format the shapes of a tree, for example `(32, 64), (32,)`."""
    return ", ".join(str(tuple(leaf.shape)) for leaf in leaves(tree))
