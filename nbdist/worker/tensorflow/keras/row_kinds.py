"""Kinds of rows in the batches of a model, by which nbdist chooses rows for trials.

Masks depend on values: zeros, negative numbers, NaN, or the largest integer (255 as the label of
what is ignored). A row with another combination of them than any before is of a new kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree


class RowKinds:
    """The kinds of rows that batches have contained."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._ends: dict[int, tuple[int, int]] = {}
        self._has_grown = False

    def look(self, data: Any) -> tuple[bool, np.ndarray | None]:
        """Look through a batch.

        Returns:
            True if the batch contains a new kind, or an integer beyond those before. An order of
            its rows with rare kinds first: shape (rows,), int64; None for sparse and ragged data.
        """
        leaves = [leaf for leaf in tree.flatten(data) if _is_read(leaf)]
        if not leaves or any(_is_composite(leaf) for leaf in tree.flatten(data)):
            return False, None
        columns = [column for n, leaf in enumerate(leaves) for column in self._columns(n, leaf)]
        kinds, own, counts = np.unique(
            np.stack(columns, 1), axis=0, return_inverse=True, return_counts=True
        )
        found = {kind.tobytes() for kind in kinds}
        is_new = bool(found - self._seen) or self._has_grown
        self._seen |= found
        self._has_grown = False
        return is_new, np.argsort(counts[own.reshape(-1)], kind="stable")

    def _columns(self, number: int, leaf: tf.Tensor) -> list[np.ndarray]:
        """Describe each row: zeros, negative numbers, NaN, the least and the largest integer."""
        rows = leaf.numpy().reshape(leaf.shape[0], -1)
        found = [~rows.all(1)]
        if not leaf.dtype.is_bool:
            found += [(rows < 0).any(1), (rows != rows).any(1)]
        if leaf.dtype.is_integer and rows.size:
            least, most = int(rows.min()), int(rows.max())
            low, high = self._ends.get(number, (least, most))
            self._has_grown |= least < low or most > high
            self._ends[number] = min(low, least), max(high, most)
            found += [(rows == least).any(1), (rows == most).any(1)]
        return found


def _is_read(leaf: Any) -> bool:
    if not tf.is_tensor(leaf) or _is_composite(leaf) or not leaf.shape.rank:
        return False
    return bool(leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool)


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor))
