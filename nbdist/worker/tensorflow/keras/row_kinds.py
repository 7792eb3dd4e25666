"""Kinds of rows in the batches of a model, used to choose rows for trials.

Masks depend on values: zeros, negative numbers, NaN, or the largest integer (255 as the label of
ignored pixels). A row with a new combination of them is of a new kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree

_COMPOSITE = (tf.SparseTensor, tf.RaggedTensor)
_WORD = 8
"""Bytes of an integer that describes a row."""


class RowKinds:
    """Kinds of rows that earlier batches contained."""

    def __init__(self) -> None:
        self._seen: set[int | bytes] = set()
        self._ends: dict[int, tuple[int, int]] = {}

    def is_new(self, data: Any) -> bool:
        """Record the kinds of rows in a batch.

        Returns:
            True if the batch contains a new kind of row, or an integer outside of the earlier
            range. False for sparse and ragged data.
        """
        leaves = _leaves(data)
        if not leaves:
            return False
        grown = [self._grows(i, rows) for i, rows in enumerate(leaves) if _has_range(rows)]
        found = set(np.unique(_kinds(leaves)).tolist())
        is_new = any(grown) or not found <= self._seen
        self._seen |= found
        return is_new

    def _grows(self, number: int, rows: np.ndarray) -> bool:
        """Record the range of a leaf's integers. Returns True if it has grown."""
        least, most = int(rows.min()), int(rows.max())
        low, high = self._ends.get(number, (least, most))
        self._ends[number] = min(low, least), max(high, most)
        return least < low or most > high


def rare_first(data: Any) -> np.ndarray | None:
    """Return an order of the rows of a batch with rare kinds first.

    Returns:
        Shape (rows,), int64. None for sparse and ragged data.
    """
    leaves = _leaves(data)
    if not leaves:
        return None
    _, own, counts = np.unique(_kinds(leaves), return_inverse=True, return_counts=True)
    return np.argsort(counts[own], kind="stable")


def _leaves(data: Any) -> list[np.ndarray]:
    """Return the numbers of a batch, of shape (rows, values). Empty for sparse and ragged data."""
    flat = tree.flatten(data)
    if any(isinstance(leaf, _COMPOSITE) for leaf in flat):
        return []
    arrays = [np.asarray(leaf) for leaf in flat if _is_read(leaf)]
    return [array.reshape(array.shape[0], -1) for array in arrays]


def _kinds(leaves: list[np.ndarray]) -> np.ndarray:
    """Return the kind of each row as an integer, or as bytes if there are many leaves."""
    columns = [column for rows in leaves for column in _columns(rows)]
    bits = np.packbits(np.stack(columns, 1), axis=1)
    rows, count = bits.shape
    if count > _WORD:
        return bits.view(f"V{count}").ravel()
    words = np.zeros((rows, _WORD), np.uint8)
    words[:, :count] = bits
    return words.view(np.uint64).ravel()


def _columns(rows: np.ndarray) -> list[np.ndarray]:
    """Describe each row: zeros, negative numbers, NaN, smallest and largest integer."""
    found: list[Any] = [~rows.all(1)]
    if rows.dtype != bool:
        found += [(rows < 0).any(1), (rows != rows).any(1)]
    if _has_range(rows):
        found += [(rows == rows.min()).any(1), (rows == rows.max()).any(1)]
    return found


def _has_range(rows: np.ndarray) -> bool:
    return rows.dtype.kind in "iu" and rows.size > 0


def _is_read(leaf: Any) -> bool:
    if not (tf.is_tensor(leaf) or isinstance(leaf, np.ndarray)) or not len(leaf.shape):
        return False
    dtype = tf.as_dtype(leaf.dtype)
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)
