"""Selection of a rank's samples below the map functions of a `tf.data.Dataset`.

Every rank reads the elements of the source, in the order of one device. It selects its samples of
each global batch there, and the functions of `map` run for these samples only. The result equals
the rank's rows of the batches of the original data set, bit for bit.

A function moves above the selection if it has no effect and draws no random numbers, and if only
operations that keep, select or shuffle whole elements are between it and the batches. Operations
that depend on values (`filter`, `flat_map`), that keep values (`cache`) or that are unknown stay
below the selection. The selection reads the original data set below it, so an earlier pass through
this data set counts for its shuffles.
"""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from nbdist.private_api.tensorflow import OWN_ROWS
from nbdist.worker.data.batches import Checksums
from nbdist.worker.data.dataset_passes import one_pass
from nbdist.worker.data.reshuffle import can_move, reshuffled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.data.batches import RankRows

    Constants = Callable[[Any, Any, Any], tuple[Any, ...]]
    """Returns scalar tensors for a batch: for its number, the data set of its elements below the
    maps, and its rows.
    """

    Division = Callable[[Any], tuple[Any, Any]]
    """Returns the first row and the number of rows of this rank for the rows of a global batch."""

SELECTED = "by element: each worker maps its own samples only"
BY_ELEMENT = "by element"

_BATCHES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset")
_MAPS = ("_MapDataset", "_ParallelMapDataset")
_CALLS = {"StatefulPartitionedCall", "If", "While", "Case", "Assert", "StatelessRandomGetAlg"}
"""Operations that count as stateful in TensorFlow, but have no state of their own."""

_READS = {"ReadVariableOp", "ResourceGather", "LookupTableFindV2", "LookupTableSizeV2"}
"""Operations whose results depend on variables and tables that other functions may change."""

_HANDLES = ("resource", "variant")
"""Types of tensors that refer to variables, tables and data sets."""

_FACTOR = 1_000_003

_SAMPLES = 4
"""Samples of the first batch that every rank maps, to compare them with the other ranks."""


class Pushdown(msgspec.Struct, frozen=True):
    """Parts of a data set, each from top to bottom.

    Attributes:
        above: operations on batches.
        batch: operation that makes the batches.
        between: operations on samples. The last one is a map.
    """

    above: tuple[Any, ...]
    batch: Any
    between: tuple[Any, ...]

    @property
    def maps(self) -> tuple[Any, ...]:
        """Maps of the samples, from bottom to top."""
        return tuple(m for m in reversed(self.between) if type(m).__name__ in _MAPS)

    def dataset(self, division: Division, constants: Constants) -> Any:
        """Return the data set of this rank's rows.

        Args:
            division: division of the rows of a global batch, as scalar int64 tensors.
            constants: returns further values of a batch.

        Returns:
            Data set of `(rows, (totals, ...))`: this rank's rows of each global batch, and for each
            of them the number of rows of the global batch and its constants, shape `(rows,)`.
        """
        dataset = self.between[-1]._input_dataset
        for operation in reversed(self.between):
            if (again := _ON_SAMPLES.get(type(operation).__name__)) is not None:
                dataset = again(operation, dataset)
        dataset = self.mapped(self._own_samples(dataset, division, constants))
        dataset = _batched(dataset, self.batch, division)
        for operation in reversed(self.above):
            dataset = _ON_BATCHES[type(operation).__name__](operation, dataset)
        return dataset

    def checksums(self, number: Any, window: Any, total: Any) -> tuple[Any, Any]:
        """Return checksums of the first global batch, as `Constants`; 0 for the others.

        They are one of all elements below the maps, and one of `_SAMPLES` samples above the maps.
        """
        tf = sys.modules["tensorflow"]
        data, zero = tf.data.Dataset, tf.constant(0, tf.int64)

        def sums() -> tuple[Any, Any]:
            some = window.shard(tf.maximum(total // _SAMPLES, 1), 0).take(_SAMPLES)
            some = self.mapped(data.zip((some, data.from_tensors(zero).repeat())))
            return _checksum(window), _checksum(some)

        found: tuple[Any, Any] = tf.cond(number > 0, lambda: (zero, zero), sums)
        return found

    def _own_samples(self, dataset: Any, division: Division, constants: Constants) -> Any:
        """Return this rank's samples: a data set of `(sample, (total, *constants))`."""
        tf = sys.modules["tensorflow"]
        data = tf.data.Dataset

        def own(number: Any, windows: Any) -> Any:
            window = windows if isinstance(windows, data) else data.zip(windows)
            total = tf.nest.flatten(windows)[0].cardinality()
            first, rows = division(total)
            constant = data.from_tensors((total, *constants(number, window, total))).repeat()
            return data.zip((window.skip(first).take(rows), constant))

        batch = self.batch
        windows = dataset.window(batch._batch_size, drop_remainder=batch._drop_remainder)
        return windows.enumerate().flat_map(_as_is(own))

    def batch_of(self, window: Any, rows: Any) -> Any:
        """Return a data set of one batch: `rows` samples, from their elements below the maps."""
        data = sys.modules["tensorflow"].data.Dataset
        samples = self.mapped(data.zip((window, data.range(rows))))
        return _joined(samples.map(_as_is(lambda sample, _: sample)), self.batch, rows)

    def mapped(self, dataset: Any) -> Any:
        """Map the samples of a data set of `(sample, constant)`."""
        for operation in self.maps:
            dataset = _mapped(operation, dataset)
        return dataset


class OwnRows:
    """Passes through this rank's rows of the global batches of a data set.

    Args:
        pushdown: the data set.
        division: division of the rows of a global batch, as scalar int64 tensors.
    """

    def __init__(self, pushdown: Pushdown, division: Division) -> None:
        self._dataset = pushdown.dataset(division, pushdown.checksums)
        self._maps = sum(map(_digest, pushdown.maps))

    def __iter__(self) -> Iterator[tuple[Any, int, Checksums]]:
        """Start a pass immediately, because a data set that reshuffles counts its iterators.

        Each item has this rank's rows, the number of rows of the global batch, and the checksums of
        the first global batch.
        """
        return self._items(one_pass(iter(self._dataset)))

    def _items(self, elements: Iterator[Any]) -> Iterator[tuple[Any, int, Checksums]]:
        for rows, (totals, below, above) in elements:
            sums = int(below[0]) + self._maps, int(above[0])
            yield rows, int(totals[0]), Checksums(*(each % 0x7FFFFFFF for each in sums))


def find(dataset: Any) -> tuple[Pushdown | None, str]:
    """Return the parts of a data set whose maps can run for a rank's samples only.

    Args:
        dataset: a `tf.data.Dataset` of global batches.

    Returns:
        The parts, None if no map can, and a description of the sharding.
    """
    if reason := OWN_ROWS.fault():
        return None, f"{BY_ELEMENT}: each worker maps all samples, because {reason}"
    above = []
    while type(dataset).__name__ in _ON_BATCHES:
        if _is_file_cache(dataset):
            return None, f"{BY_ELEMENT}: each worker maps all samples, because cache() has a file"
        above.append(dataset)
        dataset = dataset._input_dataset
    if not _is_exact_batch(dataset):
        return None, BY_ELEMENT
    between, reason = _maps_below(dataset)
    if between:
        return Pushdown(tuple(above), dataset, between), SELECTED
    because = f"{BY_ELEMENT}: each worker maps all samples, because a map function {reason}"
    return None, because if reason else BY_ELEMENT


def _maps_below(batch: Any) -> tuple[tuple[Any, ...], str]:
    """Return the operations between the batches of a data set and a rank's selection.

    Args:
        batch: the operation that makes batches.

    Returns:
        The operations, the last one first, down to the lowest map above the selection; none if no
        map is above it. The reason why a map stays below it; empty if none does.
    """
    lowest, reason, is_shuffled = 0, "", False
    between: list[Any] = []
    dataset = batch._input_dataset
    while True:
        kind = type(dataset).__name__
        if kind in _MAPS:
            if reason := _obstacle(dataset, is_shuffled=is_shuffled):
                break
            lowest = len(between) + 1
        elif kind == "_ShuffleDataset" and can_move(dataset):
            is_shuffled = True
        elif kind not in _SAME_ELEMENTS and kind != "_PrefetchDataset":
            break
        between.append(dataset)
        dataset = dataset._input_dataset
    return tuple(between[:lowest]), reason


def rows_of_rank(rank_rows: RankRows) -> Division:
    """Return the division of `RankRows.share`, for tensors."""
    tf = sys.modules["tensorflow"]

    def division(total: Any) -> tuple[Any, Any]:
        whole, each = total % rank_rows.replicas > 0, total // rank_rows.ranks
        return tf.where(whole, 0 * total, rank_rows.rank * each), tf.where(whole, total, each)

    return division


def _checksum(window: Any) -> Any:
    """Return a checksum of all elements of a data set, as a scalar int64 tensor."""
    tf = sys.modules["tensorflow"]

    def mixed(found: Any, *element: Any) -> Any:
        for leaf in tf.nest.flatten(element, expand_composites=True):
            printed = tf.bitcast(tf.fingerprint(tf.reshape(leaf, [1, -1])), tf.int64)[0]
            found = found * _FACTOR + printed
        return found

    options = tf.data.Options()  # TensorFlow cannot optimize a window, and would log a warning
    options.experimental_optimization.apply_default_optimizations = False
    return window.with_options(options).reduce(tf.constant(1, tf.int64), _as_is(mixed))


def _mapped(operation: Any, dataset: Any) -> Any:
    """Map the samples of `(sample, constant)` by the traced function of a map."""
    from nbdist.private_api.tensorflow import structure

    function = operation._map_func

    def call(sample: Any, constant: Any) -> tuple[Any, Any]:
        flat = function.function(*structure.to_tensor_list(function._input_structure, sample))
        flat = list(flat) if isinstance(flat, (list, tuple)) else [flat]
        return structure.from_compatible_tensor_list(function.output_structure, flat), constant

    if type(operation).__name__ == "_MapDataset":
        return dataset.map(_as_is(call), synchronous=operation._force_synchronous or None)
    return dataset.map(
        _as_is(call),
        num_parallel_calls=operation._num_parallel_calls,
        deterministic=True if operation._deterministic == "true" else None,
        use_unbounded_threadpool=operation._use_unbounded_threadpool,
    )


def _joined(samples: Any, batch: Any, rows: Any) -> Any:
    """Batch samples as an operation does, `rows` in each batch."""
    if type(batch).__name__ != "_PaddedBatchDataset":
        return samples.batch(rows)
    return samples.padded_batch(rows, batch._padded_shapes, batch._padding_values)


def _batched(dataset: Any, batch: Any, division: Division) -> Any:
    """Join the samples of each global batch: consecutive samples with the same total."""

    def join(total: Any, samples: Any) -> Any:
        rows = division(total)[1]
        if type(batch).__name__ != "_PaddedBatchDataset":
            return samples.batch(rows)
        constants = samples.map(_as_is(lambda _, constant: constant)).batch(rows)
        padded = _joined(samples.map(_as_is(lambda sample, _: sample)), batch, rows)
        return sys.modules["tensorflow"].data.Dataset.zip((padded, constants))

    def total_of(_sample: Any, constant: Any) -> Any:
        return constant[0]

    def size(total: Any) -> Any:
        return division(total)[1]

    return dataset.group_by_window(_as_is(total_of), _as_is(join), window_size_func=_as_is(size))


def _as_is(function: Any) -> Any:
    """Return the function without AutoGraph, for which the code of nbdist is written."""
    return sys.modules["tensorflow"].autograph.experimental.do_not_convert(function)


_SAME_ELEMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "_TakeDataset": lambda operation, dataset: dataset.take(operation._count),
    "_SkipDataset": lambda operation, dataset: dataset.skip(operation._count),
    "_RepeatDataset": lambda operation, dataset: dataset.repeat(operation._count),
    "_OptionsDataset": lambda operation, dataset: dataset.with_options(operation._options_attr),
}
"""Operations that select or repeat elements by their position; each is applied to another input."""

_ON_SAMPLES = {**_SAME_ELEMENTS, "_ShuffleDataset": reshuffled}

_ON_BATCHES: dict[str, Callable[[Any, Any], Any]] = {
    **_SAME_ELEMENTS,
    "_PrefetchDataset": lambda operation, dataset: dataset.prefetch(int(operation._buffer_size)),
    "CacheDataset": lambda _, dataset: dataset.cache(),
}


def _is_file_cache(dataset: Any) -> bool:
    """Return True for a cache in a file, which the ranks of a host would share."""
    return type(dataset).__name__ == "CacheDataset" and bool(dataset._filename.numpy())


def _is_exact_batch(dataset: Any) -> bool:
    """Return True if a data set makes batches whose rows depend on the row's sample only."""
    kind = type(dataset).__name__
    if kind not in _BATCHES or getattr(dataset, "_deterministic", "") == "false":
        return False
    if kind != "_PaddedBatchDataset":
        return True
    shapes = sys.modules["tensorflow"].nest.flatten(dataset._padded_shapes)
    return all((shape.numpy() >= 0).all() for shape in shapes)


def _obstacle(operation: Any, *, is_shuffled: bool) -> str:
    """Return the reason why a map stays below the selection; empty if it does not.

    Args:
        operation: the map.
        is_shuffled: True if a shuffle follows. Its buffer would contain samples before the map.
    """
    if getattr(operation, "_deterministic", "") == "false":
        return "may change the order of the samples (deterministic=False)"
    stateful = _stateful(operation._map_func)
    if others := sorted(stateful - _READS):
        return f"has a state or an effect ({others[0]})"
    if stateful and is_shuffled:
        return f"reads a value that may change while samples are shuffled ({min(stateful)})"
    if stateful and _has_effects(operation._input_dataset):
        return f"reads a value that an operation below it may change ({min(stateful)})"
    return ""


def _has_effects(dataset: Any) -> bool:
    """Return True if a function of the data set or of its inputs may change variables or tables."""
    dataset = vars(dataset).get("_impl", dataset)
    return any(_stateful(function) - _READS for function in dataset._functions()) or any(
        map(_has_effects, dataset._inputs())
    )


def reads_values(pushdown: Pushdown) -> bool:
    """Return True if a map reads a variable or a table, which may change after the batch."""
    return any(_stateful(operation._map_func) for operation in pushdown.maps)


def _digest(operation: Any) -> int:
    """Return a checksum of a map: its operations, its constants and the arrays that it reads."""
    function = operation._map_func.function
    parts = [node.op.encode() for node in _nodes(function)]
    parts += [n.attr["value"].SerializeToString() for n in _nodes(function) if n.op == "Const"]
    tensors = [t for t in function.captured_inputs if t.dtype.name not in _HANDLES]
    parts += [_bytes_of(tensor.numpy()) for tensor in tensors]
    return sum(map(zlib.crc32, parts))  # in any order: names of functions contain counters


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of an array of numbers or texts, or of one text."""
    array = np.asarray(value)
    return repr(array.tolist()).encode() if array.dtype == object else array.tobytes()


def _nodes(function: Any) -> list[Any]:
    """Return the operations of a function and of all functions that it calls."""
    definition = function.graph.as_graph_def()
    bodies = [definition.node, *(inner.node_def for inner in definition.library.function)]
    return [node for body in bodies for node in body]


def _stateful(function: Any) -> set[str]:
    """Return the types of the stateful operations of a function and of all that it calls."""
    from nbdist.private_api.tensorflow import op_def_registry

    types = {node.op for node in _nodes(function.function)} - _CALLS
    found = {name: op_def_registry.get(name) for name in types}
    return {name for name, operation in found.items() if operation and operation.is_stateful}
