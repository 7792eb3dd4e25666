"""Arrays on disk or in an object store that are read by rows: Zarr and HDF5."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Iterator

BY_ROW = "by row: each worker reads its own rows only"

_REMEDY = (
    "check the path, and set the credentials of the object store on every host, for example "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in a cell before the data set is created"
)


class StoredColumn:
    """Column whose rows are read when a batch needs them.

    Args:
        array: a Zarr array or an HDF5 data set, shape `(samples, ...)`.
    """

    sharding = BY_ROW

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return some rows, in the order of their numbers in `rows`; raise StepError if unread.

        Both libraries read increasing numbers, and a range faster than its numbers.
        """
        numbers, places = np.unique(rows, return_inverse=True)
        first, last = int(numbers[0]), int(numbers[-1])
        with reading(str(self._array)):
            if last - first + 1 == len(numbers):
                found = self._array[first : last + 1]
            elif is_zarr(self._array):
                found = self._array.oindex[numbers]
            else:
                found = self._array[numbers]
        return np.asarray(found)[places]


def stored_columns(value: Any) -> Any:
    """Return a dict of the arrays of a group of Zarr or HDF5; other values as they are."""
    if is_of(value, "zarr", "Group"):
        return dict(value.arrays())
    return dict(value.items()) if is_of(value, "h5py", "Group") else value


def is_stored(value: Any) -> bool:
    """Return True for an array of Zarr or HDF5 with rows."""
    return (is_zarr(value) or is_of(value, "h5py", "Dataset")) and np.ndim(value) > 0


def is_zarr(value: object) -> bool:
    """Return True for an array of Zarr."""
    return is_of(value, "zarr", "Array")


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise StepError, with the remedy, if a file or an object store cannot be read.

    Args:
        name: name of the data set or the array.
    """
    try:
        yield
    except OSError as error:
        raise StepError(f"cannot read {name}: {error}: {_REMEDY}") from error


def is_of(value: object, module: str, *path: str) -> bool:
    """Return True if the value is an instance of a class of a module that may not be imported."""
    found: Any = sys.modules.get(module)
    for name in path:
        found = getattr(found, name, None)
    return isinstance(found, type) and isinstance(value, found)
