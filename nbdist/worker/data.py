"""The batches of a step cell: the same global batches for any number of ranks.

A global batch is cut into one part of equal size for each rank. A batch that cannot be cut evenly,
as the last of an epoch often is, is given whole to every replica: each computes the same, and the
mean over replicas is the batch's own. So every sample counts once, with its weight, and nothing is
dropped or padded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from nbdist.errors import StepError

Tree = Any
"""Arrays in tuples, lists and dicts."""


@runtime_checkable
class ArrayLike(Protocol):
    """NumPy's, TensorFlow's, JAX's and pandas' arrays."""

    def __array__(self) -> np.ndarray: ...


class Batch(msgspec.Struct, frozen=True):
    """What a rank gets of a global batch.

    Attributes:
        values: this rank's rows, or all rows if `whole`.
        rows: rows in the global batch.
        whole: every replica gets all rows.
    """

    values: Tree
    rows: int
    whole: bool


class Cut(msgspec.Struct, frozen=True):
    """How global batches are cut: `ranks` parts, each for `replicas / ranks` replicas."""

    rank: int
    ranks: int
    replicas: int

    def of(self, rows: int, part: Callable[[slice], Tree]) -> Batch:
        """This rank's share of a batch of `rows`, of which `part` gives a slice."""
        if rows % self.replicas:
            return Batch(part(slice(0, rows)), rows, whole=True)
        each = rows // self.ranks
        own = slice(self.rank * each, (self.rank + 1) * each)
        return Batch(part(own), rows, whole=False)


class Source(Protocol):
    """A data set that can be gone through."""

    def epoch(self, number: int, cut: Cut) -> Iterator[Batch]:
        """The batches of an epoch, counting from 1."""
        ...


class Arrays:
    """Arrays whose first axis is the samples'.

    Args:
        tree: the arrays.
        batch: samples in a global batch.
        shuffle: seed of the order; None leaves the samples in theirs.
    """

    def __init__(self, tree: Tree, batch: int, shuffle: int | None) -> None:
        self._tree = map_arrays(np.asarray, tree)
        self._batch = batch
        self._shuffle = shuffle
        lengths = {len(array) for array in leaves(self._tree)}
        if len(lengths) != 1:
            raise StepError(f"the arrays have different numbers of samples: {sorted(lengths)}")
        self._length = lengths.pop()
        if not self._length:
            raise StepError("the data are empty")

    def epoch(self, number: int, cut: Cut) -> Iterator[Batch]:
        order = np.arange(self._length)
        if self._shuffle is not None:
            order = np.random.default_rng([self._shuffle, number]).permutation(self._length)
        for start in range(0, self._length, self._batch):
            rows = order[start : start + self._batch]
            yield cut.of(len(rows), lambda part, rows=rows: self._take(rows[part]))  # type: ignore[misc]

    def _take(self, rows: np.ndarray) -> Tree:
        return map_arrays(lambda array: array[rows], self._tree)


class Elements:
    """An iterable that can be gone through again for every epoch.

    Args:
        start: begins a new pass.
        batch: elements in a global batch; 0 when the elements are global batches themselves.
    """

    def __init__(self, start: Callable[[], Iterable[Tree]], batch: int) -> None:
        self._start = start
        self._batch = batch

    def epoch(self, number: int, cut: Cut) -> Iterator[Batch]:
        del number
        for tree in self._batches():
            rows = len(leaves(tree)[0])
            yield cut.of(rows, lambda part, tree=tree: map_arrays(lambda a: a[part], tree))  # type: ignore[misc]

    def _batches(self) -> Iterator[Tree]:
        if not self._batch:
            for element in self._start():
                yield map_arrays(np.asarray, element)
            return
        waiting: list[Tree] = []
        for element in self._start():
            waiting.append(element)
            if len(waiting) == self._batch:
                yield _stack(waiting)
                waiting = []
        if waiting:
            yield _stack(waiting)


def open_source(name: str, value: object, batch: int, shuffle: int | None, epochs: int) -> Source:
    """The source for what `--data` names.

    Raises:
        StepError: it is no data set, is empty, or cannot be gone through as often as asked.
    """
    if _is_arrays(value):
        if batch < 1:
            raise StepError(f"--data {name} names arrays: say how many samples with --batch")
        return Arrays(value, batch, shuffle)
    if shuffle is not None:
        raise StepError(f"--shuffle is for arrays; shuffle {name} itself, with a seed")
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(value, tensorflow.data.Dataset):
        return Elements(value.as_numpy_iterator, batch)
    if isinstance(value, Iterator):
        if epochs > 1:
            raise StepError(
                f"{name} is an iterator, which can be gone through once, and --epochs is {epochs}: "
                "name the function that makes it"
            )
        return Elements(lambda: value, batch)
    if isinstance(value, Iterable):
        return Elements(lambda: value, batch)
    if callable(value):
        return Elements(value, batch)
    raise StepError(
        f"--data {name} is a {type(value).__name__}: name arrays, a tf.data.Dataset, an iterable "
        "or a function that makes one"
    )


def _is_arrays(value: object) -> bool:
    """Arrays by themselves, in a tuple or in a dict; a list is an iterable of elements."""
    columns = leaves(value) if isinstance(value, (tuple, dict)) else [value]
    return bool(columns) and all(
        isinstance(column, ArrayLike) and np.ndim(column) > 0 for column in columns
    )


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


def _stack(elements: list[Tree]) -> Tree:
    first = elements[0]
    if isinstance(first, dict):
        return {key: _stack([element[key] for element in elements]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(_stack([element[i] for element in elements]) for i in range(len(first)))
    return np.stack([np.asarray(element) for element in elements])
