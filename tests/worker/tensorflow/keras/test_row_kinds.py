"""Kinds of rows in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from nbdist.worker.tensorflow.keras.row_kinds import RowKinds, rare_first

ONES = np.ones((4, 3), np.float32)


def with_value(value: float, dtype: Any = np.float32) -> np.ndarray:
    """Return ones with one value in row 2."""
    rows = np.ones((4, 3), dtype)
    rows[2, 1] = value
    return rows


@pytest.mark.parametrize("value", [0, -1, np.nan])
def test_rows_with_zeros_negative_numbers_or_nan_are_of_a_new_kind(value: float) -> None:
    kinds = RowKinds()
    assert kinds.is_new([ONES])
    assert not kinds.is_new([2 * ONES])
    assert kinds.is_new([with_value(value)])
    assert not kinds.is_new([with_value(value)])


def test_an_integer_outside_of_the_earlier_range_is_new() -> None:
    kinds = RowKinds()
    labels = np.array([1, 2, 2, 1])
    kinds.is_new([labels])
    assert not kinds.is_new([labels])
    assert kinds.is_new([labels * 100])


def test_tensors_and_arrays_have_the_same_kinds() -> None:
    kinds = RowKinds()
    kinds.is_new([with_value(0), np.array([True, False, True, True])])
    assert not kinds.is_new([tf.constant(with_value(0)), tf.constant([True, False, True, True])])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.int8])
def test_other_types_of_numbers_are_read(dtype: tf.DType) -> None:
    kinds = RowKinds()
    kinds.is_new([tf.ones((4, 3), dtype)])
    assert kinds.is_new([tf.cast(with_value(0), dtype)])


def test_kinds_of_many_arrays_differ_in_the_last_one() -> None:
    """The description of a row needs more than 64 bits."""
    kinds = RowKinds()
    many = [ONES] * 30
    kinds.is_new(many)
    assert not kinds.is_new(many)
    assert kinds.is_new([*many[:-1], with_value(0)])
    assert rare_first([*many[:-1], with_value(0)]).tolist() == [2, 0, 1, 3]  # type: ignore[union-attr]


def test_rare_rows_come_first_and_others_keep_their_order() -> None:
    order = rare_first([with_value(0), np.arange(4.0) + 1])
    assert order is not None
    assert order.tolist() == [2, 0, 1, 3]


def test_text_is_not_read() -> None:
    text = tf.constant(["a", "b"])
    assert not RowKinds().is_new([text])
    assert rare_first([text]) is None


@pytest.mark.parametrize(
    "data", [tf.ragged.constant([[1.0], [1.0, 2.0]]), tf.sparse.from_dense(ONES)]
)
def test_ragged_and_sparse_data_have_no_kinds(data: Any) -> None:
    assert not RowKinds().is_new([ONES, data])
    assert rare_first([ONES, data]) is None
