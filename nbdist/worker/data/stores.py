"""Arrays on disk or in an object store that are read by rows: Zarr and HDF5."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BY_ROW = "by row: each worker reads its own rows only"

_REMEDY = (
    "check the path, and set the credentials of the object store on every host in a cell before "
    "the data set is created: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://, "
    "GOOGLE_APPLICATION_CREDENTIALS for gs://, HF_TOKEN for hf://"
)
_CLIENT_ERRORS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
)
"""Errors of clients of object stores that are no OSError: module and class."""


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
    """Return a dict of the arrays of a group of Zarr or HDF5; other values as they are.

    Raises:
        StepError: the store of the group cannot be read.
    """
    if is_of(value, "zarr", "Group"):
        with reading(str(value)):
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
    except _client_errors() as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StepError(f"cannot read {name}: {reason}: {_REMEDY}") from error


def read_all(values: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the values of an iterable that reads files; see `reading`."""
    with reading(name):
        yield from values


def _client_errors() -> tuple[type[Exception], ...]:
    """Return OSError and the classes of `_CLIENT_ERRORS` whose modules are imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _CLIENT_ERRORS)
    return (OSError, *(error for error in found if error is not None))


def is_of(value: object, module: str, *path: str) -> bool:
    """Return True if the value is an instance of a class of a module that may not be imported."""
    found: Any = sys.modules.get(module)
    for name in path:
        found = getattr(found, name, None)
    return isinstance(found, type) and isinstance(value, found)
