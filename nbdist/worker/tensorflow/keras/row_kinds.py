"""Kinds of rows in the batches of a model, used to choose rows for trials.

Masks depend on values: zeros, negative numbers, NaN, or the largest integer (255 as the label of
ignored pixels). A row with a new combination of them is of a new kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from nbdist.private_api.keras import tree

_COMPOSITE = (tf.SparseTensor, tf.RaggedTensor)


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
        kinds, ranges = _described(leaves)
        # The bytes of an array become a set in a quarter of the time of its list.
        found = set(kinds.tobytes() if kinds.itemsize == 1 else kinds.tolist())
        grown = [self._grows(number, *ends) for number, ends in ranges.items()]
        is_new = any(grown) or not found <= self._seen
        self._seen |= found
        return is_new

    def _grows(self, number: int, least: int, most: int) -> bool:
        """Record the range of a leaf's integers. Returns True if it has grown."""
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
    kinds, _ = _described(leaves)
    _, own, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    return np.argsort(counts[own], kind="stable")


def _leaves(data: Any) -> list[np.ndarray]:
    """Return the numbers of a batch, of shape (rows, values). Empty for sparse and ragged data."""
    flat = tree.flatten(data)
    if any(isinstance(leaf, _COMPOSITE) for leaf in flat):
        return []
    arrays = [np.asarray(leaf) for leaf in flat if _is_read(leaf)]
    return [array.reshape(array.shape[0], -1) for array in arrays]


def _described(leaves: list[np.ndarray]) -> tuple[np.ndarray, dict[int, tuple[int, int]]]:
    """Return the kind of each row, and the smallest and largest integer of leaves by number.

    The kinds are bytes. A leaf has four bits: a zero, a negative number, the smallest integer or
    NaN, and the largest integer. The function makes few calls of NumPy, because it may run in each
    step, and then a call takes 5 µs.
    """
    bits = np.zeros((4 * len(leaves), len(leaves[0])), bool)
    ranges = {}
    for number, rows in enumerate(leaves):
        zero, negative, special, largest = bits[4 * number : 4 * number + 4]
        if not rows.size:
            continue
        least = rows.min()  # NaN if any number is
        _mark(zero, rows == 0)
        if rows.dtype.kind in "iu":
            most = rows.max()
            ranges[number] = int(least), int(most)
            _mark(special, rows == least)
            _mark(largest, rows == most)
        elif least != least:
            _mark(special, rows != rows)
        if rows.dtype != bool and not least >= 0:
            _mark(negative, rows < 0)
    packed = np.packbits(bits, axis=0)
    if len(packed) > 1:
        packed = np.ascontiguousarray(packed.T).view(f"V{len(packed)}").T
    return packed[0], ranges


def _mark(row_bits: np.ndarray, found: np.ndarray) -> None:
    """Set the bits of the rows in which anything was found."""
    if found.shape[1] == 1:
        row_bits[:] = found[:, 0]
    else:
        found.any(1, out=row_bits)


def _is_read(leaf: Any) -> bool:
    # `tf.is_tensor` of an array takes as long as the description of its rows.
    if not (isinstance(leaf, np.ndarray) or tf.is_tensor(leaf)) or not len(leaf.shape):
        return False
    dtype = tf.as_dtype(leaf.dtype)
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)
