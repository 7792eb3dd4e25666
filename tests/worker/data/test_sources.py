"""Sources of batches for the values that `--data` may name."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.records import StepOptions
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.worker.data.sources import Source

ALL_ROWS = RankRows(rank=0, ranks=1, replicas=1)
TWO = [RankRows(rank=rank, ranks=2, replicas=2) for rank in range(2)]


def source_of(data: Any, **options: Any) -> Source:
    chosen = StepOptions(data="train", **options)
    return open_source(data, chosen, rank=0, ranks=1, gather=lambda numbers: numbers[None])


def batches(source: Source, epoch: int = 1, rank_rows: RankRows = ALL_ROWS) -> list[Any]:
    """Return the first argument of each step."""
    return [batch.values[0] for batch in source.epoch(epoch, rank_rows)]


def refusal(data: Any, **options: Any) -> str:
    """Return the text of the error for the data."""
    with pytest.raises(StepError) as caught:
        list(source_of(data, **options).epoch(1, ALL_ROWS))
    return str(caught.value)


class TestArrays:
    def test_last_batch_contains_the_rest(self) -> None:
        source = source_of(np.arange(10), batch=4)
        assert (source.samples, source.steps) == (10, 3)
        assert (source.common, source.by_number, source.sharding) == (True, True, "by element")
        assert [part.tolist() for part in batches(source)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    def test_number_of_steps_of_an_even_epoch(self) -> None:
        assert source_of(np.arange(8), batch=4).steps == 2

    def test_order_depends_on_seed_and_epoch(self) -> None:
        def order(seed: int, epoch: int) -> list[int]:
            source = source_of(np.arange(20), batch=20, shuffle=seed)
            return list(batches(source, epoch)[0])

        assert order(1, 1) == order(1, 1)
        assert sorted(order(1, 1)) == list(range(20))
        assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (1, 2)}) == 4

    def test_columns_stay_together_after_a_shuffle(self) -> None:
        x = np.arange(12)
        source = source_of({"x": x, "y": [2 * number for number in range(12)]}, batch=4, shuffle=3)
        for batch in batches(source):
            assert batch["y"].tolist() == (2 * batch["x"]).tolist()

    def test_ranks_take_halves_of_each_batch(self) -> None:
        source = source_of((np.arange(8),), batch=4)
        halves = [
            [part.tolist() for (part,) in batches(source, rank_rows=rank_rows)] for rank_rows in TWO
        ]
        assert halves == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]

    def test_all_rows_of_a_batch_determine_the_padded_length(self) -> None:
        source = source_of(([[1], [2], [3, 3, 3], [4]], np.arange(4)), batch=4, bucket=(2, 4))
        for rank_rows in TWO:
            (batch,) = source.epoch(1, rank_rows)
            (sequences, _), mask = batch.values
            assert sequences.shape == mask.shape == (2, 4)

    def test_equal_sequences_of_both_halves_are_padded(self) -> None:
        source = source_of(np.ones((4, 3)), batch=4, bucket=(8,))
        (batch,) = source.epoch(1, TWO[1])
        assert [value.shape for value in batch.values] == [(2, 8), (2, 8)]

    def test_nested_columns(self) -> None:
        source = source_of((np.arange(4), {"a": (np.arange(4), [5, 6, 7, 8])}), batch=2)
        _, inner = batches(source)[1]
        assert [part.tolist() for part in inner["a"]] == [[2, 3], [7, 8]]

    def test_memory_map_is_read_batch_by_batch(self, tmp_path: Path) -> None:
        """A value that changes after the source was opened is in the batch: nothing was copied."""
        np.save(tmp_path / "x.npy", np.arange(8))
        source = source_of((np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(8)), batch=8)
        np.load(tmp_path / "x.npy", mmap_mode="r+")[5] = 50
        assert [batches(source, rank_rows=TWO[1])[0][0].tolist()] == [[4, 50, 6, 7]]

    def test_data_frame_is_a_dict_of_columns(self) -> None:
        pandas = pytest.importorskip("pandas")
        source = source_of(pandas.DataFrame({"x": [1, 2, 3], "y": [4.0, 5.0, 6.0]}), batch=2)
        assert batches(source)[1].keys() == {"x", "y"}
        assert batches(source)[1]["y"].tolist() == [6.0]

    @pytest.mark.parametrize(
        ("data", "options", "message"),
        [
            (np.ones(4), {}, "--data train names arrays: set the batch size with --batch N"),
            ((np.ones(4), np.ones(3)), {"batch": 2}, "different numbers of samples: [3, 4]"),
            (np.ones((0, 3)), {"batch": 2}, "the data are empty"),
        ],
    )
    def test_invalid_arrays_are_refused(
        self, data: Any, options: dict[str, Any], message: str
    ) -> None:
        assert message in refusal(data, **options)


class TestElements:
    def test_samples_are_stacked_to_batches(self) -> None:
        source = source_of([(n, np.full(2, n)) for n in range(5)], batch=2)
        assert (source.samples, source.steps, source.common, source.by_number) == (
            *(5, 3),
            *(True, False),
        )
        numbers = [first.tolist() for first, _ in batches(source)]
        assert numbers == [[0, 1], [2, 3], [4]]
        assert batches(source)[0][1].shape == (2, 2)

    def test_even_number_of_samples_has_no_rest(self) -> None:
        source = source_of([1, 2, 3, 4], batch=2)
        assert source.steps == 2
        assert [part.tolist() for part in batches(source)] == [[1, 2], [3, 4]]

    def test_elements_are_batches_without_a_batch_size(self) -> None:
        source = source_of([np.ones((3, 1)), np.ones((2, 1))])
        assert (source.samples, source.steps) == (-1, 2)
        assert [part.shape for part in batches(source)] == [(3, 1), (2, 1)]

    def test_function_starts_again_in_each_epoch(self) -> None:
        def data() -> Iterator[int]:
            yield from range(4)

        source = source_of(data, batch=4, epochs=2)
        assert (source.samples, source.steps) == (-1, -1)
        assert [len(batches(source, epoch)) for epoch in (1, 2)] == [1, 1]

    def test_samples_of_different_lengths_are_padded(self) -> None:
        samples = [(np.ones(1), 0), (np.ones(3), 1)]
        (batch,) = source_of(samples, batch=2, bucket=(4,)).epoch(1, ALL_ROWS)
        (sequences, labels), mask = batch.values
        assert (sequences.shape, labels.tolist()) == ((2, 4), [0, 1])
        assert mask.sum(axis=1).tolist() == [1, 3]

    def test_elements_of_lists_of_different_lengths_are_padded(self) -> None:
        (batch,) = source_of([([[1], [2, 2]],)], bucket=(2,)).epoch(1, ALL_ROWS)
        ((sequences,), mask) = batch.values
        assert sequences.tolist() == [[1, 0], [2, 2]]
        assert mask.tolist() == [[True, False], [True, True]]

    def test_list_of_equal_arrays_has_elements(self) -> None:
        assert len(batches(source_of([np.ones((2, 3)), np.ones((2, 3))]))) == 2

    def test_only_the_first_element_is_checked(self) -> None:
        elements = [(np.ones(2), np.ones(2)), (np.ones(1), np.ones(1))]
        assert len(batches(source_of(elements))) == 2

    @pytest.mark.parametrize(
        ("data", "options", "message"),
        [
            (
                [np.ones((4, 2)), np.ones(4)],
                {"batch": 2},
                "train is a list of arrays: for columns use a tuple, train = (a, b)",
            ),
            (iter([1]), {"epochs": 2, "batch": 1}, "can be read only once, but --epochs is 2"),
            (5, {"batch": 1}, "--data train has type int: name arrays"),
            (np.float32(1), {"batch": 1}, "--data train has type float32: name arrays"),
            ([1, 2], {"shuffle": 1}, "--shuffle is only for arrays: shuffle train itself"),
            ([1.0, 2.0], {}, "the elements of train are single samples"),
            ([(np.ones(2), np.ones(3))], {}, "the elements of train are single samples"),
            ([(np.ones(2), np.float32(1))], {}, "set the batch size with --batch N"),
        ],
    )
    def test_invalid_elements_are_refused(
        self, data: Any, options: dict[str, Any], message: str
    ) -> None:
        assert message in refusal(data, **options)

    @pytest.mark.parametrize(("batch", "expected"), [(0, [[0, 0], [1, 1], [2, 2]]), (3, None)])
    def test_generator_may_use_one_array_for_all_elements(
        self, batch: int, expected: list[list[int]] | None
    ) -> None:
        def elements() -> Iterator[np.ndarray]:
            array = np.zeros(2, int)
            for number in range(3):
                array[:] = number
                yield array

        found = [part.tolist() for part in batches(source_of(elements, batch=batch))]
        assert found == (expected or [[[0, 0], [1, 1], [2, 2]]])

    def test_iterator_is_read_once(self) -> None:
        numbers = itertools.count()
        source = source_of(numbers, batch=2, steps=1)
        epoch = source.epoch(1, ALL_ROWS)
        assert next(epoch).values[0].tolist() == [0, 1]
        assert next(numbers) == 2

    def test_tuple_with_a_part_that_is_no_column_is_an_iterable(self) -> None:
        assert source_of((1, 2, 3), batch=2).steps == 2
        assert source_of((), batch=2).steps == 0
