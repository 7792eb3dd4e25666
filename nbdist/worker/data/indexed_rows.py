"""Data sets whose samples are read by their numbers: each rank reads its own rows only.

They are map-style data sets of Hugging Face and PyTorch, and other objects with `__len__` and
`__getitem__` that are not iterable. A sample depends on its number only. If reading one
draws random numbers, each rank reads all samples in the order of one device, as it does for an
iterable.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from nbdist.worker.data.batches import leaves, refuse_other_rows
from nbdist.worker.data.map_pushdown import BY_ELEMENT
from nbdist.worker.data.padding import Ragged, column_of, stack
from nbdist.worker.data.stores import BY_ROW, is_of, reading

if TYPE_CHECKING:
    from nbdist.records import StepOptions
    from nbdist.worker.data.batches import Tree

IS_RANDOM = (
    "by element: each worker reads all samples, because reading a sample draws random numbers"
)


@runtime_checkable
class Indexed(Protocol):
    """Data set with samples `0` to `len(data set) - 1`."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: Any) -> Any: ...


def is_indexed(value: object) -> bool:
    """Return True for data sets whose samples have numbers, and that are not only iterables."""
    if isinstance(value, (Iterable, type)):
        return is_of(value, "datasets", "Dataset")
    return isinstance(value, Indexed)


class IndexedRows:
    """Samples that are read when a batch needs them. A leaf of a tree whose rows are trees.

    Args:
        samples: number of samples.
        read: returns a batch of the samples with some numbers, shape `(rows,)`.
        name: name of the data set in messages.
        alike: True if samples must have equal shapes and types. If False, a rank needs all rows of
            a batch, and pads them.
        sharding: description of the distribution of samples to ranks.
    """

    def __init__(
        self,
        samples: int,
        read: Callable[[np.ndarray], Tree],
        name: str,
        *,
        alike: bool,
        sharding: str = BY_ROW,
    ) -> None:
        self._samples = samples
        self._read = read
        self._name = name
        self._first: Tree | None = None
        self._one_reader = threading.Lock()  # prefetching reads on another thread
        self.alike = alike
        self.sharding = sharding if alike else BY_ELEMENT

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, rows: np.ndarray) -> Tree:
        """Return a batch of some samples.

        Raises:
            StepError: they cannot be read, or differ from the first sample. A rank does not see the
                samples of the others, and rows of one batch must be alike.
        """
        with self._one_reader, reading(self._name):
            if self.alike and self._first is None:
                self._first = self._read(np.arange(1))
            found = self._read(rows)
        if self.alike and not any(isinstance(leaf, Ragged) for leaf in leaves(found)):
            refuse_other_rows(self._first, found)
        return found


def open_rows(dataset: Indexed, options: StepOptions) -> IndexedRows | str:
    """Return the samples of a data set that is not empty, or the reason why ranks need all.

    Args:
        dataset: a map-style data set.
        options: options of the step, with a batch size.
    """
    read = _reader_of(dataset)
    if read is None:
        if len(dataset) and is_random(dataset):
            return IS_RANDOM

        def read(rows: np.ndarray) -> Tree:
            return stack([dataset[int(number)] for number in rows])

    return IndexedRows(len(dataset), read, options.data, alike=not options.bucket)


def _reader_of(dataset: Any) -> Callable[[np.ndarray], Tree] | None:
    """Return a function that reads rows of a data set of Hugging Face as arrays of NumPy.

    Formats of other frameworks have the same values. None if a transform of the user computes the
    samples, or the format has options that NumPy's has not.
    """
    if not is_of(dataset, "datasets", "Dataset"):
        return None
    chosen = dataset.format
    kind, arguments = chosen["type"], chosen["format_kwargs"] or {}
    if kind == "custom" or (arguments and kind != "numpy"):
        return None
    columns = None if chosen["output_all_columns"] else chosen["columns"]
    arrays = dataset.with_format("numpy", columns=columns, **arguments)

    def read(rows: np.ndarray) -> Tree:
        first, last = int(rows[0]), int(rows[-1])
        is_range = np.array_equal(rows, np.arange(first, last + 1))
        found = arrays[range(first, last + 1) if is_range else rows.tolist()]
        return {name: column_of(column) for name, column in found.items()}

    return read


def is_random(dataset: Indexed) -> bool:
    """Return True if the first sample differs when it is read again, or draws random numbers."""
    return draws(lambda: dataset[0])


def draws(read: Callable[[], Tree]) -> bool:
    """Return True if a sample differs when it is read again, or draws random numbers.

    The global generators keep their states.
    """
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    torchs = None if torch is None else torch.get_rng_state()
    try:
        before, first = generator_states(), _bytes(read())
        return before != generator_states() or first != _bytes(read())
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.set_rng_state(torchs)


def generator_states() -> bytes:
    """Return the states of the global generators."""
    torch = sys.modules.get("torch")
    torchs = b"" if torch is None else torch.get_rng_state().numpy().tobytes()
    return pickle.dumps((random.getstate(), np.random.get_state(), torchs))


def _bytes(sample: Tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in leaves(sample)]
