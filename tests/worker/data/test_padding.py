"""Padding of sequences to a few lengths, and their masks."""

from __future__ import annotations

import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.worker.data.padding import Padding, Ragged


def ragged(*lengths: int) -> Ragged:
    return Ragged([np.full(length, 1 + row) for row, length in enumerate(lengths)])


def test_ragged_column_takes_slices_and_rows() -> None:
    column = ragged(1, 2, 3)
    assert column.shape == (3,)
    assert column[1:].lengths.tolist() == [2, 3]
    assert column[np.array([2, 0])].lengths.tolist() == [3, 1]


def test_padded_array_is_zero_after_each_sample() -> None:
    column = Ragged([[1, 2], [3.5]])
    padded = column.padded(3)
    assert padded.tolist() == [[1, 2, 0], [3.5, 0, 0]]
    assert padded.dtype == float
    assert Ragged([np.ones((2, 4), "float32")]).padded(3).shape == (1, 3, 4)


@pytest.mark.parametrize(
    ("lengths", "length"), [((1, 3), 4), ((4, 2), 4), ((5, 1), 8), ((0, 0), 4)]
)
def test_longest_sample_selects_the_bucket(lengths: tuple[int, ...], length: int) -> None:
    (padded, mask) = Padding([8, 4]).of(ragged(*lengths))
    assert padded.shape == mask.shape == (2, length)
    assert mask.sum(axis=1).tolist() == list(lengths)
    assert (padded[~mask] == 0).all()
    assert (padded[mask] > 0).all()


def test_sample_longer_than_all_buckets_is_refused() -> None:
    message = "a sample has length 9, and the largest bucket is 8: use --bucket 4,8,9"
    with pytest.raises(StepError, match=message):
        Padding([8, 4]).of(ragged(9, 1))


@pytest.mark.parametrize(
    ("lengths", "suggested"),
    [
        ((3, 5, 17), "8,16,32"),
        ((1, 1, 1, 2), "1,2"),
        ((4, 4), "4"),
        ((0, 0, 1), "1"),
        ((8, 8, 9), "8,16"),
    ],
)
def test_different_lengths_without_buckets_are_refused(
    lengths: tuple[int, ...], suggested: str
) -> None:
    with pytest.raises(StepError, match=rf"--bucket {suggested}; the step then has a `mask`"):
        Padding([]).of(({"x": ragged(*lengths)}, np.ones(len(lengths))))


def test_batch_without_buckets_is_the_only_argument() -> None:
    tree = (np.ones((2, 3)), np.ones(2))
    assert Padding([]).of(tree) == (tree,)


def test_columns_with_the_length_of_the_first_sequence_are_padded() -> None:
    tree = {
        "label": np.ones(2),
        "tokens": np.ones((2, 5)),
        "features": np.ones((2, 3)),
        "vectors": np.ones((2, 5, 2)),
    }
    padded, mask = Padding([8]).of(tree)
    shapes = {name: column.shape for name, column in padded.items()}
    assert shapes == {"label": (2,), "tokens": (2, 8), "features": (2, 3), "vectors": (2, 8, 2)}
    assert mask.tolist() == [[True] * 5 + [False] * 3] * 2
    assert padded["tokens"][0].tolist() == [1] * 5 + [0] * 3


def test_ragged_columns_leave_others_unpadded() -> None:
    wide = np.ones((2, 3))
    (sequence, other), mask = Padding([4]).of((ragged(1, 2), wide))
    assert sequence.shape == (2, 4)
    assert other is wide
    assert mask.sum() == 3


def test_columns_of_equal_lengths_share_a_mask() -> None:
    _, mask = Padding([4]).of((ragged(1, 2), ragged(1, 2)))
    assert mask.shape == (2, 4)
    _, masks = Padding([2, 4]).of((ragged(1, 2), ragged(3, 1)))
    assert [part.shape for part in masks] == [(2, 2), (2, 4)]
    _, masks = Padding([4]).of((ragged(1, 2), ragged(2, 1)))
    assert len(masks) == 2


def test_batch_without_sequences_is_refused() -> None:
    with pytest.raises(StepError, match="--bucket: the batch has no sequences to pad"):
        Padding([4]).of((np.ones(3), np.ones(3)))
