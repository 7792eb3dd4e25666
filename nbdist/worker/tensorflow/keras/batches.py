"""Global batches of Keras's `fit`, `evaluate` and `predict`, split over the ranks.

`tf.distribute` shards a data set before it is shuffled, and gives replicas the uneven rest of files
and partial batches. In nbdist every rank creates the same global batches in the same order, as one
device does, and takes its own rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import tensorflow as tf

from nbdist.private_api.keras import tree
from nbdist.worker.data.dataset_passes import one_pass
from nbdist.worker.data.map_pushdown import OwnRows
from nbdist.worker.tensorflow.replica.batch_share import Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.data.batches import Checksums
    from nbdist.worker.data.map_pushdown import Pushdown
    from nbdist.worker.tensorflow.replica.batch_share import Count


class Batch(msgspec.Struct, frozen=True):
    """Global batch.

    Attributes:
        data: tensors with all rows, in the nesting of Keras's data adapters.
        total: number of rows of the global batch.
        spec: type specs of `data`. Dimensions may be unknown.
        is_part: True if `data` contains this rank's rows only.
        number: number of earlier batches in this pass through the data.
        is_new: True in the first pass through the data.
    """

    data: Any
    total: int
    spec: Any
    is_part: bool = False
    number: int = 0
    is_new: bool = True


class Place(msgspec.Struct, frozen=True):
    """Position of a rank's replicas among all replicas."""

    first: int
    local: int
    replicas: int

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> Place:
        if strategy.num_replicas_in_sync == 1:
            return cls(0, 1, 1)
        local = len(strategy.extended.worker_devices)
        resolver = strategy.cluster_resolver
        rank = resolver.task_id if resolver is not None and resolver.task_id else 0
        return cls(rank * local, local, int(strategy.num_replicas_in_sync))

    def division(self, total: Any) -> tuple[Any, Any]:
        """Return the first row and the number of rows of this rank: scalar int64 tensors."""
        rows = tf.cast(total, tf.int32)
        share = Shares(rows, self.replicas, even=False).of(self.first, self.local)
        whole = rows < self.replicas
        first, own = tf.where(whole, 0, share.offset), tf.where(whole, rows, share.rows)
        return tf.cast(first, tf.int64), tf.cast(own, tf.int64)

    def rank_rows(self, data: Any, total: int) -> Any:
        """Return this rank's rows of a global batch."""
        share = Shares(total, self.replicas, even=False).of(self.first, self.local)
        return rows_of(data, share.offset, share.rows)


def rows_of(data: Any, first: Any, count: Any) -> Any:
    """Return rows `first` to `first + count` of each dense, ragged or sparse tensor."""

    def some(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            start = tf.concat([[tf.cast(first, tf.int64)], 0 * value.dense_shape[1:]], 0)
            size = tf.concat([[tf.cast(count, tf.int64)], value.dense_shape[1:]], 0)
            return tf.sparse.slice(value, start, size)
        if value is None or isinstance(value, tf.experimental.Optional):
            return value
        return value[first : first + count]

    return tree.map_structure(some, data, none_is_leaf=True)


def row_count(data: Any) -> int:
    """Return the number of rows of a global batch."""
    first = _first(data)
    shape = first.dense_shape if isinstance(first, tf.SparseTensor) else first.shape
    return int(shape[0])


def has_equal_rows(data: Any) -> bool:
    """Return True if all tensors of a batch have the same number of rows."""
    shapes = [leaf.shape for leaf in tree.flatten(data) if _has_rows(leaf)]
    return all(shape.rank and shape[0] == shapes[0][0] for shape in shapes)


def rows_in(data: Any) -> Count:
    """Return the rows of a part while a step is traced: an int if known, else a scalar int32."""
    first = _first(data)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    return tf.shape(first)[0] if first.shape[0] is None else first.shape[0]


def has_known_rows(spec: Any) -> bool:
    """Return True if the spec contains the number of rows, the same for each batch."""
    return _first(spec).shape[0] is not None


def _first(data: Any) -> Any:
    """Return the first leaf that has rows."""
    return next(leaf for leaf in tree.flatten(data) if _has_rows(leaf))


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and not isinstance(leaf, (tf.experimental.Optional, tf.OptionalSpec))


def given(data: Any) -> Batch:
    """Return the batch of `train_on_batch` or `test_on_batch`. It must be the same on all ranks."""
    data = tree.map_structure(
        lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), data, none_is_leaf=True
    )
    return Batch(data, row_count(data), None)


class Selection(msgspec.Struct, frozen=True):
    """Selection of this rank's rows of the batches, for models that need no others.

    Attributes:
        pushdown: the data set.
        place: position of the rank.
        check: compares the checksums of the first batch of a pass with the other ranks.
    """

    pushdown: Pushdown
    place: Place
    check: Callable[[Checksums], None]


class GlobalBatches:
    """Batches of a data set that every rank reads in full, or maps for its own rows only.

    Args:
        dataset: global batches, the same on all ranks.
        order: creates the next order of samples. Called before each pass.
        check: compares the first batch of a pass with the other ranks.
        total_of: takes this rank's rows and returns those of the global batch, if each rank reads
            its own data (`--own-data`).
        selection: selects this rank's rows; None if the maps must run for all samples.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        order: Callable[[], None] = lambda: None,
        check: Callable[[Any], None] = lambda _: None,
        total_of: Callable[[int], int] | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.spec = dataset.element_spec
        self._dataset = dataset
        self._order = order
        self._check = check
        self._total_of = total_of
        self._selection = selection
        self._own_rows: OwnRows | None = None
        self._passes = 0

    def select(self) -> bool:
        """Read this rank's rows only from now on. Return False if that is not possible."""
        selection = self._selection
        if selection is not None and self._own_rows is None:
            self._own_rows = OwnRows(selection.pushdown, selection.place.division)
        return self._own_rows is not None

    def symbols(self) -> Any:
        """Return specs of a batch, with None for missing values."""
        return tree.map_structure(
            lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, self.spec
        )

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass immediately, because a data set that reshuffles counts its iterators."""
        self._order()
        self._passes += 1
        if self._own_rows is not None:
            return self._parts(iter(self._own_rows))
        return self._batches(one_pass(iter(self._dataset)))

    def _parts(self, parts: Iterator[Any]) -> Iterator[Batch]:
        assert self._selection is not None
        for number, (data, total, checksums) in enumerate(parts):
            if number == 0:
                self._selection.check(checksums)
            is_part = row_count(data) < total
            yield Batch(data, total, self.spec, is_part, number, self._passes == 1)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Batch]:
        for number, data in enumerate(batches):
            if number == 0:
                self._check(data)
            rows = row_count(data)
            if self._total_of is None:
                yield Batch(data, rows, self.spec, number=number, is_new=self._passes == 1)
            else:
                yield Batch(data, self._total_of(rows), self.spec, is_part=True, number=number)
