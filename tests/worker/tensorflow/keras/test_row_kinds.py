"""Kinds of rows in a batch. A process of its own imports TensorFlow."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.references import plainly

pytestmark = pytest.mark.processes

PROGRAM = """
import numpy as np, tensorflow as tf
from nbdist.worker.tensorflow.keras.row_kinds import RowKinds, rare_first

ones = np.ones((4, 3), np.float32)

def with_value(value):
    rows = ones.copy()
    rows[2, 1] = value
    return rows

def news(*batches):
    kinds = RowKinds()
    return [kinds.is_new(batch) for batch in batches]

def order(data):
    found = rare_first(data)
    return None if found is None else found.tolist()

labels, flags = np.array([1, 2, 2, 1]), [True, False, True, True]
many, text = [ones] * 30, tf.constant(["a", "b"])
ragged, sparse = tf.ragged.constant([[1.0], [1.0, 2.0]]), tf.sparse.from_dense(ones)
outcome = {
    "values": {
        str(value): news([ones], [2 * ones], [with_value(value)], [with_value(value)])
        for value in (0, -1, np.nan)
    },
    "range": news([labels], [labels], [labels * 100]),
    "tensors": news(
        [with_value(0), np.array(flags)],
        [tf.constant(with_value(0)), tf.constant(flags)],
        [tf.constant(with_value(0)), tf.constant(flags[::-1])],
    ),
    "types": {
        kind.name: news([tf.ones((4, 3), kind)], [tf.cast(with_value(0), kind)])
        for kind in (tf.float16, tf.bfloat16, tf.float64, tf.int8)
    },
    "many": news(many, many, [*many[:-1], with_value(0)]),
    "many order": order([*many[:-1], with_value(0)]),
    "order": order([with_value(0), np.arange(4.0) + 1]),
    "unread": [[*news([data]), order([data])] for data in (text, ragged, sparse)],
}
"""


@cache
def outcome() -> dict[str, Any]:
    found: dict[str, Any] = plainly({"kinds": PROGRAM}, "tensorflow", "keras")["kinds"]
    return found


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_rows_with_zeros_negative_numbers_or_nan_are_of_a_new_kind(value: str) -> None:
    assert outcome()["values"][value] == [True, False, True, False]


def test_an_integer_outside_of_the_earlier_range_is_new() -> None:
    assert outcome()["range"] == [True, False, True]


def test_tensors_and_arrays_have_the_same_kinds() -> None:
    assert outcome()["tensors"] == [True, False, True]


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64", "int8"])
def test_other_types_of_numbers_are_read(kind: str) -> None:
    assert outcome()["types"][kind] == [True, True]


def test_kinds_of_many_arrays_differ_in_the_last_one() -> None:
    """The description of a row needs more than 64 bits."""
    assert outcome()["many"] == [True, False, True]
    assert outcome()["many order"] == [2, 0, 1, 3]


def test_rare_rows_come_first_and_others_keep_their_order() -> None:
    assert outcome()["order"] == [2, 0, 1, 3]


def test_text_and_ragged_and_sparse_data_have_no_kinds() -> None:
    assert outcome()["unread"] == [[False, None]] * 3
