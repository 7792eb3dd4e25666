"""Pickles of objects that the notebook copies to the workers."""

from __future__ import annotations

import pickle
import threading

import ml_dtypes
import numpy as np
import pytest

from nbdist.errors import TransferError
from nbdist.jobs import pushed_objects
from nbdist.session.transfer import fingerprint, write_objects

ROWS = np.arange(240_000.0).reshape(600, 400)


class Sink:
    """Receiver that counts the copies of elements: bytes that are no buffer of an array."""

    def __init__(self) -> None:
        self.content = b""
        self.copied = 0

    def write(self, data: bytes | memoryview | pickle.PickleBuffer) -> None:
        view = data.raw() if isinstance(data, pickle.PickleBuffer) else memoryview(data)
        self.copied += view.nbytes * isinstance(data, bytes)
        self.content += view


@pytest.mark.parametrize(
    "array",
    [
        ROWS,
        np.asfortranarray(ROWS),
        ROWS.astype(ml_dtypes.bfloat16),
        np.asfortranarray(ROWS.astype(ml_dtypes.bfloat16)),
        ROWS.astype("M8[ns]"),
        ROWS.astype(ml_dtypes.float8_e4m3fn),
    ],
    ids=["rows", "columns", "bfloat16 rows", "bfloat16 columns", "times", "float8"],
)
def test_elements_of_contiguous_arrays_are_not_copied(array: np.ndarray) -> None:
    sink = Sink()
    write_objects({"x": array}, sink)
    assert sink.copied < 1000
    for found in (pickle.loads(sink.content)["x"], pushed_objects.read(sink.content)["x"]):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.f_contiguous == array.flags.f_contiguous
        assert found.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        ROWS.astype(ml_dtypes.bfloat16)[::2, ::3],
        np.array(1.5, ml_dtypes.bfloat16),
        np.zeros((0, 2), ml_dtypes.bfloat16),
        np.zeros(3, [("a", "M8[s]"), ("b", "O")]),
        np.ma.masked_array(ROWS, ROWS > 2).view(),
        np.array(["2020-01-01"], "M8[D]"),
    ],
    ids=["strided", "scalar", "empty", "records", "masked", "days"],
)
def test_other_arrays_are_read_as_they_were(array: np.ndarray) -> None:
    sink = Sink()
    write_objects({"x": array}, sink)
    found = pickle.loads(sink.content)["x"]
    assert type(found) is type(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tolist() == array.tolist()


def test_a_fingerprint_changes_with_the_value() -> None:
    assert fingerprint(ROWS) == fingerprint(ROWS.copy()) != fingerprint(ROWS + 1)


def test_objects_that_cannot_be_pickled_are_all_named() -> None:
    values = {"a": threading.Lock(), "b": 1, "c": threading.Lock()}
    with pytest.raises(TransferError, match=r"(?s)a \(lock\).*c \(lock\).*Nothing was pushed"):
        write_objects(values, Sink())
