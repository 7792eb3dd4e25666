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


class RowKinds:
    """Kinds of rows that earlier batches contained."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._ends: dict[int, tuple[int, int]] = {}

    def look(self, data: Any) -> tuple[bool, np.ndarray | None]:
        """Examine a batch.

        Returns:
            True if the batch contains a new kind of row, or an integer outside of the earlier
            range. An order of its rows with rare kinds first: shape (rows,), int64, or None for
            sparse and ragged data.
        """
        flat = tree.flatten(data)
        leaves = [leaf for leaf in flat if _is_read(leaf)]
        if not leaves or any(isinstance(leaf, _COMPOSITE) for leaf in flat):
            return False, None
        columns, has_grown = [], False
        for number, leaf in enumerate(leaves):
            rows = leaf.numpy().reshape(leaf.shape[0], -1)
            columns += _columns(rows, leaf.dtype)
            has_grown |= leaf.dtype.is_integer and rows.size > 0 and self._grows(number, rows)
        kinds, own, counts = np.unique(
            np.stack(columns, 1), axis=0, return_inverse=True, return_counts=True
        )
        found = {kind.tobytes() for kind in kinds}
        is_new = has_grown or bool(found - self._seen)
        self._seen |= found
        return is_new, np.argsort(counts[own.reshape(-1)], kind="stable")

    def _grows(self, number: int, rows: np.ndarray) -> bool:
        """Record the range of a leaf's integers. Returns True if it has grown."""
        least, most = int(rows.min()), int(rows.max())
        low, high = self._ends.get(number, (least, most))
        self._ends[number] = min(low, least), max(high, most)
        return least < low or most > high


def _columns(rows: np.ndarray, dtype: tf.DType) -> list[np.ndarray]:
    """Describe each row: zeros, negative numbers, NaN, smallest and largest integer."""
    found: list[Any] = [~rows.all(1)]
    if not dtype.is_bool:
        found += [(rows < 0).any(1), (rows != rows).any(1)]
    if dtype.is_integer and rows.size:
        found += [(rows == rows.min()).any(1), (rows == rows.max()).any(1)]
    return found


def _is_read(leaf: Any) -> bool:
    if not tf.is_tensor(leaf) or isinstance(leaf, _COMPOSITE) or not leaf.shape.rank:
        return False
    return bool(leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool)
