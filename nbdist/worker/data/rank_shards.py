"""Data of which each rank has its own part: files, distributed data sets, and selected rows.

A step uses one part from each rank. Ranks exchange the numbers of rows of their next parts. If
these are equal, nothing else is exchanged. If they differ, for example because one rank's files are
longer, ranks exchange the rows and split them like any global batch. Every row is used once, no
rank waits, and none computes the mean of an empty batch.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.worker.data.batches import Batch, leaves, map_arrays, map_trees, rows_of, slicer
from nbdist.worker.data.dataset_passes import one_pass
from nbdist.worker.data.map_pushdown import BY_ELEMENT, OwnRows, rows_of_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nbdist.worker.data.batches import RankRows, Tree
    from nbdist.worker.data.map_pushdown import Pushdown

LOOK_AHEAD = 16
"""Number of parts that a rank reads before ranks exchange row counts."""

READERS = {
    f"{kind}Dataset{version}"
    for kind in ("TFRecord", "TextLine", "FixedLengthRecord")
    for version in ("", "V2")
}
"""TensorFlow's reader operations whose files TensorFlow can divide among ranks."""

TOO_FEW_FILES = "by element: there are fewer files than workers, so each worker reads all files"


class Parts:
    """Source of steps that use one part from each rank.

    Args:
        start: begins a pass through this rank's parts.
        batch: rows of a global batch made from uneven parts; 0 uses all rows of a step.
        sharding: description of the distribution of samples to ranks.
        gather: gathers int32 numbers, equally many on each rank, to shape `(ranks, numbers)`. All
            ranks must call it.
    """

    by_number = common = False
    samples = -1
    steps = -1

    def __init__(
        self,
        start: Callable[[], Iterable[Tree]],
        batch: int,
        sharding: str,
        gather: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._start = start
        self._batch = batch
        self._gather = gather
        self.sharding = sharding

    def epoch(self, number: int, rank_rows: RankRows, first: int = 0) -> Iterator[Batch]:
        del number, first
        pool: list[Tree] = []
        for own, rows in aligned(iter(self._start()), LOOK_AHEAD, self._gather):
            if not pool and self._is_even(rows, rank_rows):
                yield self._shared(own, int(rows.sum()))
                continue
            pool = [p for p in (*pool, *_exchanged(own, self._gather)) if p is not None]
            while pool and _rows(pool) >= (self._batch or 1):
                taken, pool = _take(pool, self._batch or _rows(pool))
                yield _batch_of(taken, rank_rows)
        if pool:
            yield _batch_of(_joined(pool), rank_rows)

    def _is_even(self, rows: np.ndarray, rank_rows: RankRows) -> bool:
        full = not self._batch or rows.sum() == self._batch - self._batch % rank_rows.replicas
        return bool(full and (rows == rows[0]).all() and rows.sum() % rank_rows.replicas == 0)

    def _shared(self, own: Tree, rows: int) -> Batch:
        return Batch((own,), rows, whole=False, everything=_all_rows(own, self._gather))


class SelectedRows:
    """Source of global batches of which each rank computes its own rows only.

    All ranks read the same elements, and map their own (`worker/data/map_pushdown.py`).

    Args:
        pushdown: the data set. Its elements are arrays.
        samples: number of samples in an epoch; -1 if unknown.
        steps: number of batches in an epoch; -1 if unknown.
        sharding: description of the distribution of samples to ranks.
        gather: gathers int32 numbers, see `Parts`. `everything` of a batch calls it.
    """

    by_number = False
    common = True

    def __init__(
        self,
        pushdown: Pushdown,
        samples: int,
        steps: int,
        sharding: str,
        gather: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._pushdown = pushdown
        self._own_rows: OwnRows | None = None
        self._gather = gather
        self.samples = samples
        self.steps = steps
        self.sharding = sharding

    def epoch(self, number: int, rank_rows: RankRows, first: int = 0) -> Iterator[Batch]:
        del number, first
        if self._own_rows is None:
            self._own_rows = OwnRows(self._pushdown, rows_of_rank(rank_rows))
        for rows, total, checksums in self._own_rows:
            own = map_arrays(np.asarray, rows)
            whole = total % rank_rows.replicas > 0
            everything = _all_rows(own, _alone if whole else self._gather)
            yield Batch((own,), total, whole, everything, checksums=checksums)


def _alone(numbers: np.ndarray) -> np.ndarray:
    """Gather the numbers of this rank only."""
    return numbers[None]


def _all_rows(
    own: Tree, gather: Callable[[np.ndarray], np.ndarray]
) -> Callable[[], tuple[Tree, ...]]:
    """Return a function that joins the rows of all ranks. All ranks must call it."""
    return functools.cache(lambda: (_joined(_exchanged(own, gather)),))


def _exchanged(own: Tree | None, gather: Callable[[np.ndarray], np.ndarray]) -> list[Tree]:
    """Return every rank's part."""
    packed = pickle.dumps(own)
    sizes = gather(np.array([len(packed)], np.int32))[:, 0]
    padded = packed.ljust(-(-int(sizes.max()) // 4) * 4, b"\0")
    gathered = gather(np.frombuffer(padded, np.int32))
    return [pickle.loads(row.tobytes()) for row in gathered]


def aligned(
    parts: Iterator[Tree],
    look_ahead: int,
    gather: Callable[[np.ndarray], np.ndarray],
    rows_of_part: Callable[[Tree], int] = lambda part: len(leaves(part)[0]),
) -> Iterator[tuple[Tree | None, np.ndarray]]:
    """Yield this rank's part of each step and every rank's rows, until no rank has a part.

    Args:
        parts: parts of this rank.
        look_ahead: number of parts to read before ranks exchange row counts.
        gather: gathers int32 numbers, see `Parts`.
        rows_of_part: counts the rows of a part.

    Yields:
        The part, None if this rank has no more, and the rows, shape `(ranks,)`.
    """
    while True:
        ahead: list[Tree | None] = list(itertools.islice(parts, look_ahead))
        ahead += [None] * (look_ahead - len(ahead))
        own = [0 if part is None else rows_of_part(part) for part in ahead]
        table = gather(np.array(own, np.int32))
        for part, rows in zip(ahead, table.T, strict=True):
            if rows.any():
                yield part, rows
        if not table[:, -1].any():
            return


def own_files(dataset: Any, ranks: int, rank: int) -> tuple[Any, str]:
    """Return the data set with this rank's files, and a description of the sharding.

    Follows TensorFlow's AutoShardPolicy.AUTO: by file if the data set reads enough files. Every
    rank decides the same.

    Args:
        dataset: a `tf.data.Dataset`.
        ranks: number of ranks that share the files.
        rank: this rank.

    Returns:
        The data set, None if files cannot be divided, and the description.
    """
    tf = sys.modules["tensorflow"]
    from nbdist.private_api.tensorflow import AutoShardDataset as _AutoShardDataset

    policies = tf.data.experimental.AutoShardPolicy
    asked = dataset.options().experimental_distribute.auto_shard_policy
    by_file = asked in (policies.AUTO, policies.FILE) and _is_plain(dataset)
    files = _files(dataset) if ranks > 1 and by_file else 0
    if not files:
        return None, BY_ELEMENT
    if files < ranks:
        return None, TOO_FEW_FILES
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policies.FILE
    try:
        next(iter(_AutoShardDataset(dataset.with_options(options), ranks, 0)), None)
    except tf.errors.NotFoundError:  # this way of reading files cannot be divided
        return None, BY_ELEMENT
    except tf.errors.InvalidArgumentError as error:
        if "FILE based sharding" not in error.message:
            raise
        return None, TOO_FEW_FILES
    own = _AutoShardDataset(dataset.with_options(options), ranks, rank)
    return own, "by file: each worker reads files of its own"


def rows_of_files(dataset: Any, batch: int, ranks: int) -> Callable[[], Iterator[Tree]]:
    """Return a function that reads a rank's files in parts of global batches of `batch` rows.

    If `batch` is 0, the elements of the data set are the rank's parts.
    """

    def parts() -> Iterator[Tree]:
        elements = one_pass(dataset.as_numpy_iterator())
        each = max(1, batch // ranks)
        while group := list(itertools.islice(elements, each)):
            yield map_trees(np.stack, group)

    def as_they_are() -> Iterator[Tree]:
        for element in one_pass(dataset.as_numpy_iterator()):
            yield map_arrays(np.asarray, element)

    return parts if batch else as_they_are


def _files(dataset: Any) -> float:
    """Return the number of files of a data set: 0 if a part reads none, infinite if unknown.

    TensorFlow reports this only as an error, with pages of native log. Its readers are flat maps
    (`_impl`) over a data set of names, with a function that opens one file.
    """
    dataset = vars(dataset).get("_impl", dataset)
    inputs = dataset._inputs()
    function = vars(dataset).get("_map_func")
    if function is not None and READERS & _operations(function.function.graph):
        count = int(inputs[0].cardinality())
        return count if count >= 0 else math.inf
    return min(map(_files, inputs), default=0)


def _operations(graph: Any) -> set[str]:
    """Return the types of the operations in a graph and in the functions that it calls."""
    definition = graph.as_graph_def()
    bodies = [definition.node, *(function.node_def for function in definition.library.function)]
    return {node.op for body in bodies for node in body}


def _is_plain(dataset: Any) -> bool:
    """Return True if all elements are numbers in dense tensors; others cannot be exchanged."""
    tf = sys.modules["tensorflow"]
    specs = tf.nest.flatten(dataset.element_spec)
    return all(isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string for spec in specs)


def _joined(parts: list[Tree]) -> Tree:
    return map_trees(np.concatenate, [part for part in parts if part is not None])


def _rows(parts: list[Tree]) -> int:
    return sum(len(leaves(part)[0]) for part in parts)


def _take(parts: list[Tree], rows: int) -> tuple[Tree, list[Tree]]:
    whole = _joined(parts)
    rest = rows_of(whole, slice(rows, None))
    return rows_of(whole, slice(rows)), [rest] if len(leaves(rest)[0]) else []


def _batch_of(tree: Tree, rank_rows: RankRows) -> Batch:
    return rank_rows.batch(len(leaves(tree)[0]), slicer((tree,)))
