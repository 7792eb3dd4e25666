"""Data sets whose samples have numbers: each rank reads its own rows of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.records import StepOptions
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.indexed_rows import IS_RANDOM
from nbdist.worker.data.sources import open_source
from nbdist.worker.data.stores import BY_ROW

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.data.sources import Source

SAMPLES = 22
X = np.random.default_rng(0).normal(size=(SAMPLES, 3)).astype(np.float32)
Y = np.arange(SAMPLES)


def table(columns: dict[str, Any] | None = None) -> Any:
    return datasets.Dataset.from_dict(columns or {"x": X.tolist(), "y": Y.tolist()})


def source_of(data: Any, ranks: int = 2, **options: Any) -> Source:
    chosen = StepOptions(data="train", **options)
    return open_source(data, chosen, rank=0, ranks=ranks, gather=lambda found: found[None])


def batches(source: Source, rank: int = 0, ranks: int = 1, first: int = 0) -> list[Any]:
    return list(source.epoch(2, RankRows(rank, ranks, ranks), first))


def assert_rows_of_one_device(
    make: Callable[[], Any], expected: dict[str, np.ndarray], ranks: int, **options: Any
) -> None:
    """Compare the rows of all ranks with those of arrays in one process, bit for bit."""
    whole = batches(source_of(expected, **options))
    assert [b.rows for b in whole] == [5, 5, 5, 5, 2]
    for rank in range(ranks):
        source = source_of(make(), ranks, **options)
        assert (source.samples, source.steps, source.sharding) == (SAMPLES, 5, BY_ROW)
        for first in (0, 3):
            found = batches(source, rank, ranks, first)
            for own, batch in zip(found, whole[first:], strict=True):
                each = batch.rows // ranks
                part = slice(rank * each, (rank + 1) * each)
                assert own.whole == (batch.rows % ranks > 0)
                assert own.values[0].keys() == own.everything()[0].keys() == expected.keys()
                for name, column in batch.values[0].items():
                    rows = column if own.whole else column[part]
                    assert own.values[0][name].dtype == column.dtype
                    np.testing.assert_array_equal(own.values[0][name], rows)
                    np.testing.assert_array_equal(own.everything()[0][name], column)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": [2 * np.float32(row) for row in batch["x"]], "y": batch["y"]}


def centred(batch: dict[str, Any]) -> dict[str, Any]:
    """Return rows that depend on the other rows of a call."""
    return {"x": np.float32(batch["x"]) - np.mean(batch["x"], axis=0, dtype=np.float32)}


ORDER = np.random.default_rng(3).permutation(SAMPLES)
HUGGING_FACE: dict[str, tuple[Callable[[], Any], dict[str, np.ndarray]]] = {
    "no format": (table, {"x": X, "y": Y}),
    "chosen rows": (lambda: table().select(ORDER), {"x": X[ORDER], "y": Y[ORDER]}),
    "parts": (
        lambda: datasets.concatenate_datasets([table().select(range(7)), table().skip(7)]),
        {"x": X, "y": Y},
    ),
    "map": (lambda: table().map(doubled, batched=True), {"x": 2 * X, "y": Y}),
    "columns": (lambda: table().with_format("numpy", columns=["y"]), {"y": Y}),
    "types": (
        lambda: table().with_format("numpy", dtype=np.float64),
        {"x": X.astype(np.float64), "y": Y.astype(np.float64)},
    ),
    "format of another framework": (lambda: table().with_format("jax"), {"x": X, "y": Y}),
    "transform": (lambda: table().with_transform(doubled), {"x": 2 * X, "y": Y}),
    "transform of rows together": (lambda: table().with_transform(centred), {"x": 0 * X}),
}


class TestHuggingFace:
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    @pytest.mark.parametrize("name", HUGGING_FACE)
    def test_rows_are_those_of_one_device(self, name: str, ranks: int) -> None:
        assert_rows_of_one_device(*HUGGING_FACE[name], ranks, batch=5)

    def test_order_of_a_seed(self) -> None:
        assert_rows_of_one_device(table, {"x": X, "y": Y}, 2, batch=5, shuffle=3)

    @pytest.mark.parametrize("first", [0, 2])
    def test_a_rank_reads_its_own_rows_only(self, first: int) -> None:
        seen: list[int] = []

        def noted(batch: dict[str, Any]) -> dict[str, Any]:
            seen.extend(batch["y"])
            return batch

        source = source_of(table().with_transform(noted), batch=4)
        seen.clear()
        batches(source, 1, 2, first)
        own = [n for start in range(4 * first, 20, 4) for n in (start + 2, start + 3)]
        assert sorted(seen) == sorted([0, *own, 21])  # and the first sample, to compare

    def test_data_are_not_read_into_memory(self) -> None:
        """A value of the table that changes after the source was opened is in the batch."""
        values = np.arange(8.0)
        arrow = datasets.table.InMemoryTable(datasets.table.pa.table({"y": values}))
        source = source_of(datasets.Dataset(arrow), batch=8)
        values[5] = 50
        assert batches(source, 1, 2)[0].values[0]["y"].tolist() == [4, 50, 6, 7]

    def test_random_transform_is_read_by_all_ranks(self) -> None:
        def noise(batch: dict[str, Any]) -> dict[str, Any]:
            return {"x": np.random.normal(size=len(batch["y"]))}

        def epoch(rank: int, ranks: int) -> list[Any]:
            np.random.seed(7)
            source = source_of(table().with_transform(noise), ranks, batch=4)
            assert source.sharding == IS_RANDOM
            return [batch.values[0]["x"].tolist() for batch in batches(source, rank, ranks)]

        whole = epoch(0, 1)
        assert epoch(0, 2) == [part[: len(part) // 2] for part in whole]
        assert epoch(1, 2) == [part[len(part) // 2 :] for part in whole]
        with pytest.raises(StepError, match="--shuffle is only for arrays"):
            source_of(table().with_transform(noise), batch=4, shuffle=1)

    def test_buckets_need_all_rows_of_a_batch(self) -> None:
        texts = [list(range(1, 2 + n // 3)) for n in range(8)]
        for rank in range(2):
            source = source_of(table({"x": texts}), batch=4, bucket=(2, 4))
            assert source.sharding == "by element"
            masks = [batch.values[1] for batch in batches(source, rank, 2)]
            assert [mask.shape for mask in masks] == [(2, 2), (2, 4)]

    @pytest.mark.parametrize(
        ("columns", "options", "message"),
        [
            ({"y": [1, 2]}, {}, "--data train names samples: set the batch size with --batch N"),
            ({"y": []}, {"batch": 2}, "the data are empty"),
            ({"x": [[1.0]] * 6 + [[1.0, 2.0]] * 2}, {"batch": 4}, r"\(1,\) float32 and \(2,\)"),
            ({"x": [[1.0]] * 7 + [[1.0, 2.0]]}, {"batch": 4}, "have different lengths: choose"),
            ({"y": [1] * 7 + [None]}, {"batch": 4}, r"\(\) int64 and \(\) float32: pad them"),
        ],
    )
    def test_unsuitable_data_are_refused(
        self, columns: dict[str, Any], options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(StepError, match=message):
            batches(source_of(table(columns), **options), 1, 2)

    def test_several_parts_are_refused(self) -> None:
        parts = datasets.DatasetDict(train=table(), test=table())
        message = r"train is a dict of Dataset, not of arrays: .* part = train\['train'\]"
        with pytest.raises(StepError, match=message):
            source_of(parts, batch=4)

    def test_fewer_rows_than_ranks(self) -> None:
        (batch,) = batches(source_of(table({"y": [5, 6, 7]}), batch=8), 3, 4)
        assert (batch.whole, batch.values[0]["y"].tolist()) == (True, [5, 6, 7])
