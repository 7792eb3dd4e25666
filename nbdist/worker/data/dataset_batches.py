"""Batches of a `tf.data.Dataset` in a training loop, of which each rank maps its own samples only.

Every rank reads the elements below the maps (`map_pushdown.py`) and keeps those of each batch until
the loop has used it. A rank can thus compute the other rows of a batch without the other ranks, if
anything but the step uses them.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from nbdist.worker.data.batches import Batch
from nbdist.worker.data.dataset_passes import one_pass
from nbdist.worker.data.map_pushdown import SELECTED, find, reads_values, rows_of_rank
from nbdist.worker.data.stores import is_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.data.batches import RankRows, Tree
    from nbdist.worker.data.map_pushdown import Pushdown


class NumpyBatches:
    """Elements of a data set as arrays of NumPy, for `for batch in dataset.as_numpy_iterator()`.

    The rewritten loop creates it in place of the iterator. A data set that reshuffles counts its
    iterators, so an iterator of the whole data set would change the order of this rank's.

    Args:
        dataset: the data set.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.dataset.as_numpy_iterator())


def numpy_batches(dataset: Any) -> Any:
    """Return `dataset.as_numpy_iterator()`, `NumpyBatches` for a data set of TensorFlow."""
    return NumpyBatches(dataset) if is_dataset(dataset) else dataset.as_numpy_iterator()


def is_dataset(value: object) -> bool:
    """Return True for a `tf.data.Dataset`."""
    return is_of(value, "tensorflow", "data", "Dataset")


class DatasetBatches:
    """Source of global batches of which each rank maps its own samples only.

    Args:
        pushdown: the data set.
        of_numpy: True for arrays of NumPy, False for tensors.
    """

    sharding = SELECTED

    def __init__(self, pushdown: Pushdown, *, of_numpy: bool) -> None:
        self._pushdown = pushdown
        self._of_numpy = of_numpy
        self._dataset: Any = None
        self._window: Any = None

    def batches(self, rank_rows: RankRows) -> Iterator[Batch]:
        """Start a pass immediately, because a data set that reshuffles counts its iterators."""
        if self._dataset is None:
            self._dataset = self._pushdown.dataset(rows_of_rank(rank_rows), self._variant)
        batch = functools.partial(self._batch, rank_rows.replicas)
        return map(batch, one_pass(iter(self._dataset)))

    def _variant(self, _number: Any, window: Any, _total: Any) -> tuple[Any]:
        """Return the elements of a batch below the maps, as `Constants`."""
        self._window = window.element_spec
        return (sys.modules["tensorflow"].data.experimental.to_variant(window),)

    def _batch(self, replicas: int, element: Any) -> Batch:
        own, (totals, windows) = element
        read = functools.cache(lambda: self._converted(self._mapped(windows[0], totals[0])))
        total = int(totals[0])
        return Batch(self._converted(own), total, total % replicas > 0, read)

    @functools.cached_property
    def _mapped(self) -> Callable[[Any, Any], Tree]:
        """Function that maps all samples of a batch, compiled once."""
        tf = sys.modules["tensorflow"]

        def mapped(variant: Any, total: Any) -> Any:
            window = tf.data.experimental.from_variant(variant, self._window)
            return self._pushdown.batch_of(window, total).get_single_element()

        function = tf.function(mapped, autograph=False)
        function._omit_frequent_tracing_warning = True  # each loop has its own function
        return function  # type: ignore[no-any-return]

    def _converted(self, element: Tree) -> Tree:
        if not self._of_numpy:
            return element
        return sys.modules["tensorflow"].nest.map_structure(_read_only, element)


def find_batches(dataset: Any, *, of_numpy: bool) -> DatasetBatches | None:
    """Return the source of a data set's batches; None if each rank must read whole batches.

    A `cache()` of batches keeps the order of its first pass. Another data set would not know it.
    A map that reads a variable would compute other rows later, with another value.

    Args:
        dataset: a `tf.data.Dataset`.
        of_numpy: True for arrays of NumPy, False for tensors.
    """
    if not _is_plain(dataset.element_spec):
        return None
    pushdown, _ = find(dataset)
    if pushdown is None or reads_values(pushdown):
        return None
    if any(type(operation).__name__ == "CacheDataset" for operation in pushdown.above):
        return None
    return DatasetBatches(pushdown, of_numpy=of_numpy)


def _is_plain(spec: Any) -> bool:
    """Return True for numbers in dicts and tuples whose rows have one shape on all ranks."""
    if type(spec) in (dict, tuple):
        return all(map(_is_plain, spec.values() if isinstance(spec, dict) else spec))
    tf = sys.modules["tensorflow"]
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return False
    is_number = spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool
    return bool(is_number and spec.shape[1:].is_fully_defined())


def _read_only(tensor: Any) -> Any:
    """Return the array that `as_numpy_iterator` returns for a tensor."""
    array = tensor.numpy()
    array.setflags(write=False)
    return array
