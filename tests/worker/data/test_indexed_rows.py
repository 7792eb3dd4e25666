"""Data sets whose samples have numbers: each rank reads its own rows of each batch."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.records import StepOptions
from nbdist.worker.data.batches import RankRows, leaves
from nbdist.worker.data.indexed_rows import IS_RANDOM
from nbdist.worker.data.sources import open_source
from nbdist.worker.data.stores import BY_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Samples:
    """Map-style data set that notes the samples that are read."""

    def __init__(self, noise: Callable[[], Any] = lambda: 0.0) -> None:
        self.read: list[int] = []
        self._noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read.append(number)
        return {"x": X[number] + np.float32(self._noise()), "y": int(Y[number])}


class TestMapStyle:
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_rows_are_those_of_one_device(self, ranks: int) -> None:
        assert_rows_of_one_device(Samples, {"x": X, "y": Y}, ranks, batch=5)
        assert_rows_of_one_device(Samples, {"x": X, "y": Y}, ranks, batch=5, shuffle=2)

    def test_a_rank_reads_its_own_rows_only(self) -> None:
        data = Samples()
        source = source_of(data, batch=4)
        data.read.clear()
        batches(source, 1, 2, first=3)
        assert data.read == [0, 14, 15, 18, 19, 21]

    def test_without_a_batch_size_items_are_batches(self) -> None:
        class Batches:
            def __len__(self) -> int:
                return 2

            def __getitem__(self, number: int) -> tuple[np.ndarray, list[int]]:
                return X[4 * number : 4 * number + 4], [4 * number + n for n in range(4)]

        source = source_of(Batches())
        assert (source.steps, source.sharding) == (2, "by element")
        assert [b.values[0][1].tolist() for b in batches(source, 1, 2)] == [[2, 3], [6, 7]]
        with pytest.raises(StepError, match="are single samples: set the batch size with --batch"):
            batches(source_of(Samples()))

    def test_samples_that_draw_random_numbers_are_read_by_all_ranks(self) -> None:
        own = np.random.default_rng(0)
        for noise in (random.random, np.random.random, own.random):
            states = random.getstate(), np.random.get_state()[1].tolist()
            source = source_of(Samples(noise), batch=4)
            assert (random.getstate(), np.random.get_state()[1].tolist()) == states
            assert source.sharding == IS_RANDOM
            (first, *_) = batches(source, 1, 2)
            assert first.values[0]["y"].tolist() == [2, 3]

    def test_a_class_that_makes_an_iterable_is_a_function(self) -> None:
        class Stream:
            def __iter__(self) -> Iterator[int]:
                return iter(range(4))

            def __len__(self) -> int:
                return 4

            def __getitem__(self, number: int) -> int:
                raise NotImplementedError

        assert [b.values[0].tolist() for b in batches(source_of(Stream, batch=2))] == [
            [0, 1],
            [2, 3],
        ]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


class TestTorch:
    def test_rows_of_a_data_set(self, torch: Any) -> None:
        class Rows(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
            def __len__(self) -> int:
                return SAMPLES

            def __getitem__(self, number: int) -> dict[str, Any]:
                return {"x": torch.from_numpy(X[number]), "y": torch.tensor(int(Y[number]))}

        def chosen() -> Any:
            return torch.utils.data.Subset(Rows(), ORDER.tolist())

        for ranks in (1, 2, 4):
            assert_rows_of_one_device(Rows, {"x": X, "y": Y}, ranks, batch=5)
            assert_rows_of_one_device(chosen, {"x": X[ORDER], "y": Y[ORDER]}, ranks, batch=5)

    def test_samples_that_draw_random_numbers(self, torch: Any) -> None:
        state = torch.get_rng_state()
        source = source_of(Samples(lambda: torch.rand(())), batch=4)
        assert source.sharding == IS_RANDOM
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"shuffle": True},
            {"shuffle": True, "drop_last": True},
            pytest.param(
                {"num_workers": 2, "shuffle": True},
                marks=[
                    pytest.mark.processes,
                    pytest.mark.filterwarnings("ignore:.*fork"),  # JAX may be loaded
                ],
            ),
        ],
    )
    def test_rank_reads_its_rows_of_a_loader(
        self, torch: Any, settings: dict[str, Any], ranks: int
    ) -> None:
        """Two epochs, with a generator that the loader draws from. The last batch has 2 rows."""

        class Rows(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.read: list[int] = []

            def __len__(self) -> int:
                return 22

            def __getitem__(self, number: int) -> Any:
                self.read.append(number)
                return torch.from_numpy(X[number]), {"y": int(Y[number])}

        def loader() -> Any:
            generator = torch.Generator().manual_seed(3)
            return torch.utils.data.DataLoader(
                Rows(), batch_size=4, generator=generator, **settings
            )

        whole = loader()
        expected = [[x.numpy(), y["y"].numpy()] for _ in range(2) for x, y in whole]
        for rank in range(ranks):
            mine = loader()
            source = source_of(mine)
            assert source.sharding == "by row: each worker reads its own rows only"
            assert source.steps == len(expected) // 2
            mine.dataset.read.clear()
            rows = RankRows(rank=rank, ranks=ranks, replicas=ranks)
            found = [batch for epoch in (1, 2) for batch in source.epoch(epoch, rows)]
            read = len(mine.dataset.read)
            for batch, parts in zip(found, expected, strict=True):
                part = rows.share(len(parts[0]), range(len(parts[0])).__getitem__).values
                x, others = batch.values[0]
                np.testing.assert_array_equal(x, parts[0][part])
                np.testing.assert_array_equal(others["y"], parts[1][part])
                np.testing.assert_array_equal(batch.everything()[0][0], parts[0])
            if "num_workers" not in settings:
                first = int(ranks > 1)
                assert read == first + sum(len(batch.values[0][0]) for batch in found)
            assert torch.equal(mine.generator.get_state(), whole.generator.get_state())

    def test_batches_of_other_loaders_are_read_by_all_ranks(self, torch: Any) -> None:
        data = torch.utils.data
        rows = data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))

        def collate(samples: Any) -> Any:
            return [column.flip(0) for column in data.default_collate(samples)]

        class Flipped(data.DataLoader):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[Any]:
                return (column.flip(0) for column, _ in super().__iter__())

        noisy = Samples(lambda: torch.rand(()))
        others = {
            "own collation": data.DataLoader(rows, batch_size=4, collate_fn=collate),
            "own iterator": Flipped(rows, batch_size=4),
            "own batches": data.DataLoader(rows, batch_sampler=[[0, 2, 4, 6], [1, 3]]),
            "random": data.DataLoader(noisy, batch_size=4),
        }
        for name, loader in others.items():
            source = source_of(loader)
            assert source.sharding == (IS_RANDOM if name == "random" else "by element")
            torch.manual_seed(0)
            whole = [np.asarray(leaves(batch)[0]) for batch in loader]
            torch.manual_seed(0)
            for found, expected in zip(batches(source, 1, 2), whole, strict=True):
                half = len(expected) // 2
                np.testing.assert_array_equal(leaves(found.values)[0], expected[half:])

    def test_loader_of_a_stream(self, torch: Any) -> None:
        class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[Any]:
                return iter(torch.arange(6))

        source = source_of(torch.utils.data.DataLoader(Stream(), batch_size=4))
        assert source.steps == -1
        assert [b.values[0].tolist() for b in batches(source, 1, 2)] == [[2, 3], [5]]
        assert [b.values[0].tolist() for b in batches(source_of(Stream(), batch=6))] == [
            [0, 1, 2, 3, 4, 5]
        ]
