"""Parts of two ranks with different numbers of rows: every row is used once, in equal batches."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.rank_shards import LOOK_AHEAD, Parts, aligned, rows_of_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.data.batches import Batch

    Gather = Callable[[np.ndarray], np.ndarray]

RANKS = 2
WAIT_S = 10.0


class Collectives:
    """Double of a collective of all ranks, each on a thread of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self._barrier = threading.Barrier(RANKS)
        self._rows: list[np.ndarray] = [np.zeros(0)] * RANKS

    def of(self, rank: int) -> Gather:
        def gather(numbers: np.ndarray) -> np.ndarray:
            assert numbers.dtype == np.int32
            self._rows[rank] = numbers
            self.calls += rank == 0
            self._barrier.wait(WAIT_S)
            gathered = np.stack(self._rows)
            self._barrier.wait(WAIT_S)
            return gathered

        return gather


def on_ranks(function: Callable[[int], Any]) -> list[Any]:
    """Return the results of a function on all ranks, or raise the first error."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(function, range(RANKS)))


def epoch(parts: list[list[int]], batch: int = 0) -> tuple[list[list[Batch]], int]:
    """Return the batches of each rank for parts with so many rows, and the number of exchanges.

    Rows are numbered: those of rank 1 from 1000.
    """
    collectives = Collectives()

    def read(rank: int) -> list[Batch]:
        ends = np.cumsum(parts[rank], dtype=int)
        arrays = np.split(1000 * rank + np.arange(sum(parts[rank])), ends[:-1]) if len(ends) else []
        source = Parts(lambda: arrays, batch, "by file", collectives.of(rank))
        rank_rows = RankRows(rank=rank, ranks=RANKS, replicas=RANKS)
        return list(source.epoch(1, rank_rows))

    return on_ranks(read), collectives.calls


def values(batches: list[Batch]) -> list[list[int]]:
    return [batch.values[0].tolist() for batch in batches]


def test_equal_parts_are_not_exchanged() -> None:
    ranks, exchanges = epoch([[2, 3], [2, 3]])
    assert [values(rank) for rank in ranks] == [
        [[0, 1], [2, 3, 4]],
        [[1000, 1001], [1002, 1003, 1004]],
    ]
    assert [(batch.rows, batch.whole) for batch in ranks[0]] == [(4, False), (6, False)]
    assert exchanges == 1


def test_everything_contains_the_parts_of_all_ranks() -> None:
    collectives = Collectives()

    def read(rank: int) -> list[int]:
        source = Parts(lambda: [np.full(2, rank)], 0, "by file", collectives.of(rank))
        (batch,) = source.epoch(1, RankRows(rank=rank, ranks=RANKS, replicas=RANKS))
        (rows,) = batch.everything()
        found: list[int] = rows.tolist()
        return found

    assert on_ranks(read) == [[0, 0, 1, 1]] * RANKS


def test_parts_of_different_sizes_are_exchanged() -> None:
    ranks, _ = epoch([[3], [1]])
    assert [values(rank) for rank in ranks] == [[[0, 1]], [[2, 1000]]]


def test_uneven_rest_goes_to_all_ranks() -> None:
    ranks, _ = epoch([[2, 2], [2, 1]])
    assert [values(rank) for rank in ranks] == [
        [[0, 1], [2, 3, 1002]],
        [[1000, 1001], [2, 3, 1002]],
    ]
    assert [batch.whole for batch in ranks[0]] == [False, True]


def test_rank_without_further_parts_takes_part_in_the_rest() -> None:
    ranks, _ = epoch([[2, 4], [2]])
    assert [values(rank) for rank in ranks] == [[[0, 1], [2, 3]], [[1000, 1001], [4, 5]]]


def test_small_parts_are_collected_to_full_batches() -> None:
    ranks, _ = epoch([[2, 1], [2, 2, 1]], batch=4)
    assert [batch.rows for batch in ranks[0]] == [4, 4]
    assert [values(rank) for rank in ranks] == [[[0, 1], [2, 1002]], [[1000, 1001], [1003, 1004]]]


def test_rows_that_wait_come_before_equal_parts() -> None:
    ranks, _ = epoch([[2, 2], [1, 2]], batch=4)
    assert [values(rank) for rank in ranks] == [
        [[0, 1], [3, 1001, 1002]],
        [[1000, 2], [3, 1001, 1002]],
    ]


def test_large_parts_are_divided_into_several_batches() -> None:
    ranks, _ = epoch([[6], [5]], batch=4)
    assert [batch.rows for batch in ranks[0]] == [4, 4, 3]


@pytest.mark.parametrize("extra", range(4))
def test_parts_of_any_number_of_bytes_are_exchanged(extra: int) -> None:
    collectives = Collectives()

    def read(rank: int) -> list[int]:
        part = np.full(5 + extra * rank, rank, np.uint8)
        source = Parts(lambda: [part], 0, "by file", collectives.of(rank))
        (batch,) = source.epoch(1, RankRows(rank=rank, ranks=RANKS, replicas=3 * RANKS))
        found: list[int] = batch.everything()[0].tolist()
        return found

    assert on_ranks(read) == [[0] * 5 + [1] * (5 + extra)] * RANKS


def test_batch_that_replicas_do_not_divide_has_fewer_rows() -> None:
    """With a batch of 5, each of two ranks reads parts of two rows."""
    ranks, exchanges = epoch([[2, 2], [2, 2]], batch=5)
    assert [batch.rows for batch in ranks[0]] == [4, 4]
    assert exchanges == 1


def test_ranks_without_data_have_no_batch() -> None:
    assert epoch([[], []])[0] == [[], []]


def test_many_parts_are_compared_together() -> None:
    ranks, exchanges = epoch([[1] * (LOOK_AHEAD + 1)] * RANKS)
    assert len(ranks[0]) == LOOK_AHEAD + 1
    assert exchanges == 2


@settings(max_examples=10)
@given(
    sizes=some.lists(some.lists(some.integers(1, 4), max_size=4), min_size=RANKS, max_size=RANKS),
    batch=some.integers(0, 5),
)
def test_every_row_is_used_once(sizes: list[list[int]], batch: int) -> None:
    ranks, _ = epoch(sizes, batch)
    assert len({len(rank) for rank in ranks}) == 1
    used: list[int] = []
    for own, other in zip(*ranks, strict=True):
        assert own.rows == other.rows
        parts = [own] if own.whole else [own, other]
        used += [row for part in parts for row in part.values[0].tolist()]
    expected = [1000 * rank + row for rank in range(RANKS) for row in range(sum(sizes[rank]))]
    assert sorted(used) == expected


def test_aligned_counts_rows_with_the_given_function() -> None:
    def gather(numbers: np.ndarray) -> np.ndarray:
        return np.stack([numbers, numbers])

    found = list(aligned(iter(["ab", "c"]), 3, gather, rows_of_part=len))
    assert [(part, rows.tolist()) for part, rows in found] == [("ab", [2, 2]), ("c", [1, 1])]


def test_steps_of_other_ranks_have_no_own_part() -> None:
    def gather(numbers: np.ndarray) -> np.ndarray:
        return np.stack([numbers, np.array([1, 2], np.int32) * (len(found) < 1)])

    found: list[tuple[Any, list[int]]] = []
    for part, rows in aligned(iter([np.ones(5)]), 2, gather):
        found.append((part if part is None else len(part), rows.tolist()))
    assert found == [(5, [5, 1]), (None, [0, 2])]


class Dataset:
    """Double of a `tf.data.Dataset` of numbered rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def as_numpy_iterator(self) -> Iterator[tuple[int, np.ndarray]]:
        return ((row, np.full(2, row)) for row in range(self._rows))


@pytest.mark.parametrize(("batch", "sizes"), [(4, [2, 2, 1]), (5, [2, 2, 1]), (1, [1] * 5)])
def test_files_are_read_in_parts_of_a_batch(batch: int, sizes: list[int]) -> None:
    start = rows_of_files(Dataset(5), batch, RANKS)
    for _ in range(2):
        parts = list(start())
        assert [len(first) for first, _ in parts] == sizes
        assert np.concatenate([first for first, _ in parts]).tolist() == [0, 1, 2, 3, 4]
        assert parts[0][1].shape == (sizes[0], 2)


def test_elements_of_files_are_parts_without_a_batch_size() -> None:
    parts = list(rows_of_files(Dataset(2), 0, RANKS)())
    assert [(first.shape, second.shape) for first, second in parts] == [((), (2,))] * 2
