"""Batches of a training loop of which each rank reads its own rows only.

The loop receives the batches of one device. Their arrays contain this rank's rows and read the
other rows if anything but the step uses them. Data that a rank cannot read by row are returned as
they are: each rank then reads whole batches.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import StepError
from nbdist.records import StepOptions
from nbdist.worker.data import grain_rows, torch_rows
from nbdist.worker.data.batch_array import BatchArray, whole
from nbdist.worker.data.dataset_batches import (
    DatasetBatches,
    NumpyBatches,
    find_batches,
    is_dataset,
)
from nbdist.worker.data.indexed_rows import IndexedRows, draws, generator_states
from nbdist.worker.data.map_pushdown import BY_ELEMENT
from nbdist.worker.data.padding import Padding
from nbdist.worker.data.sources import Arrays
from nbdist.worker.data.stores import is_of
from nbdist.worker.data.torch_rows import LoaderRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nbdist.worker.data.batches import Batch, RankRows, Tree
    from nbdist.worker.data.sources import Source

_OF_BATCHES = (DatasetBatches, LoaderRows)
"""Sources whose batches have the form in which the user's loop receives them."""

_CHECKED = 8
"""Number of first batches, and distance of later ones, around which the states of the global
generators are compared. A comparison takes 0.1 ms.
"""


class LoopBatches:
    """Data of a training loop.

    Args:
        place: line of the loop, for messages.
        rank_rows: rows of this rank in a batch; None if each rank reads whole batches.
        names: names that the loop assigns batches and parts of them to.

    Attributes:
        sharding: description of the distribution of samples to ranks.
        has_read_all: True if a statement besides the step has read all rows of a batch.
    """

    def __init__(self, place: str, rank_rows: RankRows | None, names: tuple[str, ...]) -> None:
        self.sharding = BY_ELEMENT
        self.has_read_all = False
        self._place = place
        self._rank_rows = rank_rows
        self._names = names
        self._data: Any = None
        self._source: Source | DatasetBatches | None = None
        self._namespace: dict[str, Any] = {}

    def of(self, data: Any, namespace: dict[str, Any]) -> Iterable[Any]:
        """Return the batches of the loop for one pass.

        Args:
            data: iterable of the loop.
            namespace: global names of the loop.
        """
        if self._rank_rows is None:
            return data  # type: ignore[no-any-return]
        self._namespace = namespace
        known = data.dataset if isinstance(data, NumpyBatches) else data
        is_known, of_datasets = known is self._data, isinstance(self._source, DatasetBatches)
        if not is_known or (self._source is not None and not of_datasets):
            self._source = _source_of(data, is_known=is_known)
        self._data = known
        self.sharding = BY_ELEMENT if self._source is None else self._source.sharding
        return data if self._source is None else _Batches(data, self._elements)

    def stop(self) -> None:
        """Read whole batches from the next pass on: the step needs them."""
        self._rank_rows = None
        self.sharding = BY_ELEMENT

    def finish(self) -> None:
        """Let global names of batches contain all rows, for the cells that follow."""
        for name in self._names:
            if name in self._namespace:
                self._namespace[name] = whole(self._namespace[name])
        self._data = self._source = None

    def _elements(self) -> Iterator[Tree]:
        assert self._source is not None
        assert self._rank_rows is not None
        source, rank_rows = self._source, self._rank_rows
        batches = (
            source.batches(rank_rows)
            if isinstance(source, _OF_BATCHES)
            else source.epoch(1, rank_rows)
        )
        first = int(isinstance(source, LoaderRows))  # its sampler draws before the first batch
        for number in itertools.count():
            checks = first <= number < _CHECKED or (number > 0 and number % _CHECKED == 0)
            checks = checks and not isinstance(source, DatasetBatches)  # which has its own threads
            before = generator_states() if checks else b""
            batch = next(batches, None)
            if checks and generator_states() != before:
                raise StepError(
                    f"{self._place}: reading a batch drew random numbers from a global generator, "
                    "and each worker reads other rows. Draw them from a generator that is seeded "
                    "with the number of the sample, or run the cell with --no-lift"
                )
            if batch is None:
                return
            yield self._element(batch, rank_rows)

    def _element(self, batch: Batch, rank_rows: RankRows) -> Tree:
        """Return a batch as the user's loop receives it."""
        first = 0 if batch.whole else batch.rows // rank_rows.ranks * rank_rows.rank

        def read(path: tuple[Any, ...]) -> Any:
            self.has_read_all = True
            return functools.reduce(operator.getitem, path, batch.everything())

        def array(own: Any, path: tuple[Any, ...]) -> BatchArray:
            return BatchArray(own, first, batch.rows, functools.partial(read, path))

        if isinstance(self._source, _OF_BATCHES):
            return _mapped(array, batch.values, ())
        return _mapped(array, batch.values[0], (0,))


def _mapped(function: Callable[[Any, tuple[Any, ...]], Any], tree: Tree, path: Any) -> Tree:
    """Return a tree with `function` of each leaf and of its path. Lists remain lists."""
    if type(tree) is dict:
        return {key: _mapped(function, part, (*path, key)) for key, part in tree.items()}
    if type(tree) in (list, tuple):
        parts = (_mapped(function, part, (*path, i)) for i, part in enumerate(tree))
        return type(tree)(parts)
    return function(tree, path)


class _Batches:
    """Iterable of batches with the length of the user's data, for progress bars.

    Args:
        data: the user's data.
        start: begins a pass.
    """

    def __init__(self, data: Any, start: Callable[[], Iterator[Any]]) -> None:
        self._data = data
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()

    def __len__(self) -> int:
        return len(self._data)


def _source_of(data: Any, *, is_known: bool) -> Source | DatasetBatches | None:
    """Return the source of data that a rank can read by row; None for other data.

    Args:
        data: iterable of the loop.
        is_known: True if the last pass has read the same data by row.
    """
    if isinstance(data, NumpyBatches):
        return find_batches(data.dataset, of_numpy=True)
    if is_dataset(data):
        return find_batches(data, of_numpy=False)
    if torch_rows.is_loader(data):
        loader, _ = torch_rows.find(data, is_known=is_known)
        return loader if loader is not None and loader.steps and loader.is_plain() else None
    if not grain_rows.is_grain(data):
        return _of_table(data)
    source, _ = grain_rows.find(data, StepOptions(data="", steps=1))
    if source is None or not source.steps:
        return None
    if not is_known and (draws(lambda: source.sample(0)) or not _is_plain(source.sample(0))):
        return None
    return source


def _of_table(batches: Any) -> Arrays | None:
    """Return the source of `dataset.iter(batch_size)` of Hugging Face.

    The iterator has not begun, and the format is that of NumPy. Columns with missing values may
    have other types in other batches.
    """
    is_new = inspect.isgenerator(batches) and inspect.getgeneratorstate(batches) == "GEN_CREATED"
    if not is_new or not is_of(batches.gi_frame.f_locals.get("self"), "datasets", "Dataset"):
        return None
    if batches.gi_code is not sys.modules["datasets"].Dataset.iter.__code__:
        return None
    given = batches.gi_frame.f_locals
    dataset, size = given["self"], given["batch_size"]
    samples = len(dataset) - (len(dataset) % size if given["drop_last_batch"] else 0)
    lacks = any(column.null_count for column in dataset.data.columns)
    if dataset.format["type"] != "numpy" or not samples or lacks or not _is_plain(dataset[:1]):
        return None

    def read(rows: np.ndarray) -> Tree:
        return dataset[int(rows[0]) : int(rows[-1]) + 1]

    rows = IndexedRows(samples, read, "the data set", alike=True)
    return Arrays(rows, size, None, Padding(()))


def _is_plain(tree: Any) -> bool:
    """Return True for arrays and numbers in dicts and tuples, whose types nbdist keeps."""
    if type(tree) in (dict, tuple):
        return all(map(_is_plain, tree.values() if isinstance(tree, dict) else tree))
    is_number = isinstance(tree, (np.generic, int, float, complex))
    return (is_number or type(tree) is np.ndarray) and np.asarray(tree).dtype.kind in "biufcV"
