"""Samples of different lengths, padded in each batch to one of a few lengths.

Few lengths mean few shapes, and thus few compilations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import StepError
from nbdist.worker.data.batches import leaves, map_arrays, map_trees

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.worker.data.batches import Tree


class Ragged:
    """Column whose samples differ in the length of their first axis.

    Args:
        samples: array-like values, one for each sample.
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = [np.asarray(sample) for sample in samples]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, rows: slice | np.ndarray) -> Ragged:
        if isinstance(rows, slice):
            return Ragged(self._samples[rows])
        return Ragged([self._samples[row] for row in rows])

    @property
    def shape(self) -> tuple[int]:
        """Shape of the axes that are equal in all samples: only the first."""
        return (len(self),)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sample."""
        return np.array([len(sample) for sample in self._samples])

    def padded(self, length: int) -> np.ndarray:
        """Return one array of shape `(samples, length, ...)`, zero after each sample's end."""
        first = self._samples[0]
        kind = np.result_type(*self._samples)
        array = np.zeros((len(self), length, *first.shape[1:]), kind)
        for row, sample in zip(array, self._samples, strict=True):
            row[: len(sample)] = sample
        return array


class Padding:
    """Pads the sequences of a batch, and marks the real positions with a mask.

    Args:
        buckets: lengths to choose from; if empty, samples of different lengths raise an error.
    """

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = sorted(buckets)

    def of(self, tree: Tree) -> tuple[Tree, ...]:
        """Return the step's arguments for a global batch: `batch` and, with buckets, `mask`.

        Ragged columns are padded. Without any, the columns with the length of the first column of
        at least two axes are padded. `mask` has shape `(rows, length)` and is True at real
        positions. If columns differ in their lengths, it is a tuple of masks.

        Raises:
            StepError: a sample is longer than all buckets, the samples differ in length without
                buckets, or there are buckets but no sequences.
        """
        columns = leaves(tree)
        ragged = [column for column in columns if isinstance(column, Ragged)]
        if not self._buckets:
            if ragged:
                raise StepError(
                    "the samples have different lengths: choose the lengths to pad to, for example "
                    f"--bucket {_suggested(ragged[0])}; the step then has a `mask`"
                )
            return (tree,)
        chosen = ragged or _sequences(columns)
        if not chosen:
            raise StepError("--bucket: the batch has no sequences to pad")
        padded = {id(column): self._pad(column) for column in chosen}
        masks = [mask for _, mask in padded.values()]
        alike = all(np.array_equal(mask, masks[0]) for mask in masks)
        new = map_arrays(lambda column: padded.get(id(column), (column, None))[0], tree)
        return new, masks[0] if alike else tuple(masks)

    def _pad(self, column: Any) -> tuple[np.ndarray, np.ndarray]:
        is_ragged = isinstance(column, Ragged)
        lengths = column.lengths if is_ragged else np.full(len(column), column.shape[1])
        longest = int(lengths.max())
        fitting = [bucket for bucket in self._buckets if bucket >= longest]
        if not fitting:
            raise StepError(
                f"a sample has length {longest}, and the largest bucket is {self._buckets[-1]}: "
                f"use --bucket {','.join(map(str, [*self._buckets, longest]))}"
            )
        mask = np.arange(fitting[0]) < lengths[:, None]
        if is_ragged:
            return column.padded(fitting[0]), mask
        width = [(0, 0), (0, fitting[0] - longest), *[(0, 0)] * (column.ndim - 2)]
        return np.pad(column, width), mask


def column_of(values: Any) -> np.ndarray | Ragged:
    """Return the samples of a column as an array, `Ragged` if they differ in their lengths."""
    if isinstance(values, Ragged):
        return values
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return Ragged(values)
    has_sequences = (
        array.dtype == object and array.size and isinstance(array.flat[0], (list, np.ndarray))
    )
    return Ragged(list(array)) if has_sequences else array


def stack(samples: list[Tree]) -> Tree:
    """Stack samples to a batch. A column is `Ragged` if its samples differ in their shapes."""
    return map_trees(_stack, samples)


def _stack(samples: list[Any]) -> Any:
    arrays = [np.asarray(sample) for sample in samples]
    alike = len({array.shape for array in arrays}) == 1
    return np.stack(arrays) if alike else Ragged(arrays)


def _sequences(columns: list[Any]) -> list[Any]:
    wide = [column for column in columns if column.ndim >= 2]
    return [column for column in wide if column.shape[1] == wide[0].shape[1]]


def _suggested(column: Ragged) -> str:
    """Suggest buckets: powers of two from the median length to the longest."""
    middle, longest = int(np.median(column.lengths)), int(column.lengths.max())
    power = 1 << max(0, middle - 1).bit_length()
    sizes = [power]
    while sizes[-1] < longest:
        sizes.append(sizes[-1] * 2)
    return ",".join(map(str, sizes))
