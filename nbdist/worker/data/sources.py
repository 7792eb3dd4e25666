"""Sources: the values that `--data` may name, and the global batches that they provide."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from nbdist.errors import StepError
from nbdist.worker.data import grain_rows, torch_rows
from nbdist.worker.data.batches import leaves, map_arrays, rows_of, slicer
from nbdist.worker.data.dataset_passes import one_pass
from nbdist.worker.data.indexed_rows import Indexed, IndexedRows, is_indexed, open_rows
from nbdist.worker.data.map_pushdown import BY_ELEMENT, find
from nbdist.worker.data.padding import Padding, Ragged, column_of, stack
from nbdist.worker.data.rank_shards import Parts, SelectedRows, own_files, rows_of_files
from nbdist.worker.data.source_shards import Parquet, is_parquet, split_source
from nbdist.worker.data.stores import (
    StoredColumn,
    is_of,
    is_stored,
    read_all,
    stored_columns,
)

if TYPE_CHECKING:
    from nbdist.records import StepOptions
    from nbdist.worker.data.batches import Batch, RankRows, Tree


DISTRIBUTED = "as in the distributed data set"


@runtime_checkable
class ArrayLike(Protocol):
    """Array of NumPy, TensorFlow, JAX or pandas."""

    def __array__(self) -> np.ndarray: ...


class Extent(Protocol):
    """Size of data, and their distribution to ranks.

    Attributes:
        samples: number of samples in an epoch; -1 if unknown in advance.
        steps: number of batches in an epoch; -1 if unknown.
        sharding: description of the distribution of samples to ranks.
        common: True if every rank has all data.
    """

    common: bool
    samples: int
    steps: int
    sharding: str


class Source(Extent, Protocol):
    """A data set for one or more epochs.

    Attributes:
        by_number: True if an epoch does not depend on the epochs read before.
    """

    by_number: bool

    def epoch(self, number: int, rank_rows: RankRows, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch.

        Args:
            number: number of the epoch, from 1.
            rank_rows: rows of this rank in a batch.
            first: number of batches to leave out at the beginning. Only a source with `by_number`
                can: the others must read them.
        """
        ...


class Arrays:
    """Arrays whose first axis is the sample.

    Args:
        tree: the arrays.
        batch: number of samples in a global batch.
        shuffle: seed of the order; None keeps the order of the arrays.
        padding: pads columns of sequences.

    Raises:
        StepError: the arrays differ in their number of samples, or are empty.
    """

    by_number = common = True

    def __init__(self, tree: Tree, batch: int, shuffle: int | None, padding: Padding) -> None:
        self._tree = tree
        self._batch = batch
        self._shuffle = shuffle
        self._padding = padding
        lengths = {len(column) for column in leaves(tree)}
        if len(lengths) != 1:
            raise StepError(f"the arrays have different numbers of samples: {sorted(lengths)}")
        self.samples = lengths.pop()
        if not self.samples:
            raise StepError("the data are empty")
        self.steps = -(-self.samples // batch)
        read = [c for c in leaves(tree) if isinstance(c, (StoredColumn, IndexedRows))]
        self.sharding = read[0].sharding if read else BY_ELEMENT

    def epoch(self, number: int, rank_rows: RankRows, first: int = 0) -> Iterator[Batch]:
        order = np.arange(self.samples)
        if self._shuffle is not None:
            order = np.random.default_rng([self._shuffle, number]).permutation(self.samples)
        for start in range(first * self._batch, self.samples, self._batch):
            rows = order[start : start + self._batch]
            yield rank_rows.batch(len(rows), self._taker(rows))

    def _taker(self, rows: np.ndarray) -> Callable[[slice], tuple[Tree, ...]]:
        """Return a function that takes some of the rows; all rows determine the padded length."""
        if any(map(_needs_whole_batch, leaves(self._tree))):
            return slicer(self._padding.of(rows_of(self._tree, rows)))
        return lambda part: self._padding.of(rows_of(self._tree, rows[part]))


def _needs_whole_batch(column: Any) -> bool:
    return isinstance(column, Ragged) or (isinstance(column, IndexedRows) and not column.alike)


class Elements:
    """An iterable that can be read again for every epoch.

    Args:
        start: begins a new pass.
        options: options of the step; if `batch` is 0, the elements are global batches.
        length: number of elements; -1 if unknown.
        sharding: description of the distribution of samples to ranks.
        reuses: True if the iterable may change the arrays of an element for the next one.
    """

    by_number = False
    common = True

    def __init__(
        self,
        start: Callable[[], Iterable[Tree]],
        options: StepOptions,
        length: int = -1,
        sharding: str = BY_ELEMENT,
        *,
        reuses: bool = False,
    ) -> None:
        self._start = start
        self._reuses = reuses
        self._name = options.data
        self._batch = batch = options.batch
        self._padding = Padding(options.bucket)
        self.sharding = sharding
        self.samples = length if batch else -1
        self.steps = -(-length // batch) if batch and length >= 0 else length

    def epoch(self, number: int, rank_rows: RankRows, first: int = 0) -> Iterator[Batch]:
        del number, first
        for tree in self._batches():
            part = slicer(self._padding.of(tree))
            rows = len(leaves(tree)[0])
            yield rank_rows.batch(rows, _copied(part) if self._reuses else part)

    def _batches(self) -> Iterator[Tree]:
        if not self._batch:
            for number, element in enumerate(self._start()):
                tree = map_arrays(_column, element)
                if not number:
                    _refuse_samples([np.shape(column)[:1] for column in leaves(tree)], self._name)
                yield tree
            return
        waiting: list[Tree] = []
        for element in self._start():
            waiting.append(map_arrays(_copy, element) if self._reuses else element)
            if len(waiting) == self._batch:
                yield stack(waiting)
                waiting = []
        if waiting:
            yield stack(waiting)


def _copied(part: Callable[[slice], tuple[Tree, ...]]) -> Callable[[slice], tuple[Tree, ...]]:
    """Copy the rows that a function takes: JAX and a prefetching thread use them later."""
    return lambda rows: map_arrays(_copy, part(rows))


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def open_source(
    value: Any,
    options: StepOptions,
    *,
    rank: int,
    ranks: int,
    gather: Callable[[np.ndarray], np.ndarray],
) -> Source:
    """Return the source for the value that `--data` names.

    Args:
        value: the named value.
        options: options of the step.
        rank: this rank.
        ranks: number of ranks.
        gather: gathers int32 numbers, see `Parts`.

    Raises:
        StepError: the value is no data set, is empty, or cannot be read as often as requested.
    """
    padding, name = Padding(options.bucket), options.data
    if (
        options.order == "source"
        and ranks > 1
        and not is_of(value, "tensorflow", "data", "Dataset")
    ):
        return split_source(value, options, rank, ranks, gather)
    columns = _columns(value)
    if columns is not None:
        if options.batch < 1:
            raise StepError(f"--data {name} names arrays: set the batch size with --batch N")
        return Arrays(columns, options.batch, options.shuffle, padding)
    if is_indexed(value):
        return _of_indexed(value, options)
    _refuse_shuffle(options)
    if grain_rows.is_grain(value) or torch_rows.is_loader(value):
        return _of_loader(value, options)
    if is_parquet(value):
        return _of_parquet(Parquet(value, name), options, ranks)
    if is_of(value, "tensorflow", "data", "Dataset"):
        return _of_tensorflow(value, options, rank, ranks, gather)
    if is_of(value, "tensorflow", "distribute", "DistributedDataset"):
        return Parts(lambda: _local_parts(value), 0, DISTRIBUTED, gather)
    if is_of(value, "nbdist.worker.jax.arrays.distributed_dataset", "DistributedDataset"):
        return Parts(value.own_parts, 0, DISTRIBUTED, gather)
    return _of_python(value, options)


def _reads_files(value: object) -> bool:
    """Return True for a stream of Hugging Face and a pipeline of webdataset."""
    return is_of(value, "datasets", "IterableDataset") or is_of(value, "webdataset", "DataPipeline")


def _refuse_shuffle(options: StepOptions) -> None:
    if options.shuffle is not None:
        name = options.data
        raise StepError(f"--shuffle is only for arrays: shuffle {name} itself, with a seed")


def _of_indexed(value: Indexed, options: StepOptions) -> Source:
    """Return the source of a data set whose samples have numbers."""
    if not options.batch and is_of(value, "datasets", "Dataset"):
        raise StepError(f"--data {options.data} names samples: set the batch size with --batch N")
    found = open_rows(value, options) if options.batch else BY_ELEMENT
    if isinstance(found, IndexedRows):
        return Arrays(found, options.batch, options.shuffle, Padding(options.bucket))
    _refuse_shuffle(options)
    samples = range(len(value))
    return Elements(
        lambda: map(value.__getitem__, samples), options, len(samples), found, reuses=True
    )


def _of_loader(value: Any, options: StepOptions) -> Source:
    """Return the source of a loader of PyTorch, or of a loader or data set of grain."""
    if grain_rows.is_grain(value):
        rows, sharding = grain_rows.find(value, options)
        return rows or Elements(lambda: value, options, sharding=sharding, reuses=True)
    if options.batch or options.bucket:
        return _of_python(value, options)
    batches, sharding = torch_rows.find(value)
    return batches or Elements(lambda: value, options, _length(value), sharding, reuses=True)


def _of_parquet(files: Parquet, options: StepOptions, ranks: int) -> Arrays:
    """Return the source of the rows in the order of the files."""
    batch = options.batch
    if not batch:
        raise StepError(f"--data {options.data} names files: set the batch size with --batch N")
    return Arrays(files.rows(options, ranks), batch, None, Padding(options.bucket))


def _of_python(value: Any, options: StepOptions) -> Source:
    name = options.data
    if isinstance(value, list) and _are_columns(value):
        raise StepError(f"{name} is a list of arrays: for columns use a tuple, {name} = (a, b)")
    if isinstance(value, dict) and value:
        key, part = next(iter(value.items()))
        raise StepError(
            f"{name} is a dict of {type(part).__name__}, not of arrays: name one of its values, "
            f"for example part = {name}[{key!r}]"
        )
    if isinstance(value, Iterator):
        if options.planning.only:
            raise StepError(
                f"{name} is an iterator, which can be read only once, and a plan would take its "
                "first batch from the training: name a function that creates the iterator"
            )
        if options.epochs > 1:
            raise StepError(
                f"{name} is an iterator, which can be read only once, but --epochs is "
                f"{options.epochs}: name a function that creates the iterator"
            )
        return Elements(lambda: value, options, reuses=True)
    if isinstance(value, Iterable):
        reuses, files = not isinstance(value, list), _reads_files(value)
        start = (lambda: read_all(value, name)) if files else lambda: value
        return Elements(start, options, _length(value), reuses=reuses)
    if callable(value):
        return Elements(value, options, reuses=True)
    raise StepError(
        f"--data {name} has type {type(value).__name__}: name arrays, a tf.data.Dataset, an "
        "iterable or a function that creates one"
    )


def _length(value: Iterable[Any]) -> int:
    """Return the number of elements; -1 if unknown, as for a loader of a stream in PyTorch."""
    try:
        return len(value) if isinstance(value, Sized) else -1
    except TypeError:
        return -1


def _of_tensorflow(
    dataset: Any,
    options: StepOptions,
    rank: int,
    ranks: int,
    gather: Callable[[np.ndarray], np.ndarray],
) -> Source:
    tf = sys.modules["tensorflow"]
    batch, name = options.batch, options.data
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY and not options.steps:
        raise StepError(f"{name} never ends: set the number of steps with --steps N")
    specs = tf.nest.flatten(dataset.element_spec)
    is_ragged = any(isinstance(s, tf.RaggedTensorSpec) and s.ragged_rank for s in specs)
    if is_ragged and batch:
        raise StepError(
            f"the elements of {name} are batches, as ragged tensors: omit --batch {batch}, "
            f"or use {name}.unbatch()"
        )
    if not batch:
        shapes = [s.shape for s in specs if isinstance(s, tf.TensorSpec)]
        known = [tuple(s[:1]) for s in shapes if s.rank is not None]
        _refuse_samples([first for first in known if first != (None,)], name)
    in_order = options.bucket or options.order == "exact"
    files, sharding = (None, BY_ELEMENT) if in_order else own_files(dataset, ranks, rank)
    if files is not None:
        return Parts(rows_of_files(files, batch, ranks), batch, sharding, gather)
    length = max(-1, int(dataset.cardinality()))
    start = dataset.__iter__ if is_ragged else dataset.as_numpy_iterator
    elements = Elements(lambda: one_pass(start()), options, length, sharding)
    if ranks == 1 or options.bucket or not _has_arrays(specs, batch):
        return elements
    pushdown, found = find(dataset.batch(batch) if batch else dataset)
    if pushdown is not None:
        found = found if sharding == BY_ELEMENT else f"{sharding} and maps its own samples only"
        return SelectedRows(pushdown, elements.samples, elements.steps, found, gather)
    if sharding == BY_ELEMENT:
        elements.sharding = found
    return elements


def _has_arrays(specs: Sequence[Any], batch: int) -> bool:
    """Return True if all elements are arrays; samples must be numbers of the same shapes."""
    tf = sys.modules["tensorflow"]
    arrays = all(isinstance(spec, tf.TensorSpec) for spec in specs)
    return arrays and not (
        batch and any(s.dtype == tf.string or not s.shape.is_fully_defined() for s in specs)
    )


def _refuse_samples(firsts: Sequence[tuple[int, ...]], name: str) -> None:
    """Raise StepError if elements are not batches: first axes are missing or differ."""
    if () in firsts or len(set(firsts)) > 1:
        raise StepError(
            f"the elements of {name} are single samples: set the batch size with --batch N"
        )


def _are_columns(items: list[Any]) -> bool:
    """Return True if these arrays are columns, not elements: equal row counts, unequal ranks."""
    if not all(isinstance(item, ArrayLike) for item in items):
        return False
    shapes = [np.shape(item) for item in items]
    alike = len({shape[:1] for shape in shapes}) == 1
    return alike and len({len(shape) for shape in shapes}) > 1


def _local_parts(dataset: Any) -> Iterator[Tree]:
    """Yield this rank's rows of each batch of a distributed data set of TensorFlow."""
    tf = sys.modules["tensorflow"]
    for element in dataset:
        yield tf.nest.map_structure(_local_rows, element)


def _local_rows(value: Any) -> np.ndarray:
    values = getattr(value, "values", (value,))
    return np.concatenate([np.asarray(part) for part in values])


def _columns(value: object) -> Tree | None:
    """Return the arrays of a value: one array, or a tuple or dict of arrays; None for others.

    A pandas DataFrame and a group of arrays count as dicts of their columns. A list counts as a
    column in a tuple or dict, and otherwise as an iterable of elements.
    """
    value = stored_columns(value)
    if is_of(value, "pandas", "DataFrame"):
        value = dict(value.items())  # type: ignore[attr-defined]
    if not isinstance(value, (tuple, dict)):
        return _listed(value) if _is_column(value) else None
    parts = value.values() if isinstance(value, dict) else value
    made = [_columns(part) if isinstance(part, (tuple, dict)) else _listed(part) for part in parts]
    if not made or any(part is None for part in made):
        return None
    return dict(zip(value, made, strict=True)) if isinstance(value, dict) else tuple(made)


def _listed(part: object) -> Any:
    if is_stored(part):
        return StoredColumn(part)
    is_list = isinstance(part, list) or is_of(part, "datasets", "arrow_dataset", "Column")
    return _column(part) if is_list or _is_column(part) else None


def _is_column(value: object) -> bool:
    if is_of(value, "tensorflow", "RaggedTensor"):
        return True
    return isinstance(value, ArrayLike) and np.ndim(value) > 0


def _column(value: Any) -> np.ndarray | Ragged:
    if is_of(value, "tensorflow", "RaggedTensor"):
        return _of_ragged_tensor(value)
    if is_of(value, "datasets", "arrow_dataset", "Column"):
        value = value[:]
    return column_of(value)


def _of_ragged_tensor(value: Any) -> Ragged:
    if value.ragged_rank > 1:
        raise StepError(
            f"a ragged tensor has {value.ragged_rank} axes of different lengths: make all but one "
            "even, with its to_tensor()"
        )
    return Ragged(np.split(value.values.numpy(), value.row_splits.numpy()[1:-1]))
