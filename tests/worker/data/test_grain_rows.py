"""Data sets and loaders of grain: each rank reads its own rows of the batches of one device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.errors import LibraryVersionError, StepError
from nbdist.records import StepOptions
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.grain_rows import Positions
from nbdist.worker.data.sources import open_source
from nbdist.worker.data.stores import BY_ROW

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.data.sources import Source

SAMPLES, BATCH, RANKS = 22, 4, 2


class Records:
    """Records that note which of them are read."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.read: list[int] = []
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: Any) -> dict[str, Any]:
        self.read.append(int(number))
        return {"x": np.full(3, number, np.float32), "y": int(number)}


class Noise(grain.transforms.RandomMap):
    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**element, "noise": rng.normal()}


class Doubled(grain.transforms.Map):
    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        return {**element, "x": 2 * element["x"]}


class Large(grain.transforms.Filter):
    def filter(self, element: dict[str, Any]) -> bool:
        return bool(element["y"] > 3)


class Longer(grain.transforms.Map):
    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.ones(1 + element["y"] // 2 % 2)}


def samples(records: Records) -> Any:
    dataset = grain.MapDataset.source(records).seed(5).shuffle()
    return dataset.random_map(Noise()).map(Doubled())


def loader(records: Records, *last: Any, **options: Any) -> Any:
    sampler = grain.samplers.IndexSampler(
        len(records), shuffle=True, seed=3, num_epochs=options.pop("num_epochs", 1)
    )
    operations = [Noise(), Doubled(), *last]
    return grain.DataLoader(data_source=records, sampler=sampler, operations=operations, **options)


IN_BATCHES: dict[str, Callable[[Records], Any]] = {
    "map": lambda records: samples(records).batch(BATCH),
    "map without rest": lambda records: samples(records).batch(BATCH, drop_remainder=True),
    "map to iter": lambda records: samples(records).batch(BATCH).to_iter_dataset(),
    "iter": lambda records: samples(records).to_iter_dataset().batch(BATCH),
    "two epochs": lambda records: samples(records).repeat(2).batch(BATCH),
    "loader": lambda records: loader(records, grain.transforms.Batch(BATCH)),
    "loader without rest": lambda records: loader(records, grain.transforms.Batch(BATCH, True)),
    "loader of epochs": lambda records: loader(records, grain.transforms.Batch(5), num_epochs=2),
}
BY_SAMPLE: dict[str, Callable[[Records], Any]] = {
    "map": samples,
    "iter": lambda records: samples(records).to_iter_dataset(),
    "loader": loader,
}


def source_of(data: Any, **options: Any) -> Source:
    chosen = StepOptions(data="train", **options)
    return open_source(data, chosen, rank=0, ranks=RANKS, gather=lambda found: found[None])


def batches(source: Source, rank: int, first: int = 0) -> list[Any]:
    return list(source.epoch(1, RankRows(rank, RANKS, RANKS), first))


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert found[name].dtype == np.asarray(column).dtype
        np.testing.assert_array_equal(found[name], column)


def assert_rows_of_one_device(
    expected: list[Any], make: Callable[[Records], Any], batch: int
) -> None:
    """Compare the batches of two ranks with those of one device, and count what they read."""
    sizes = [len(whole["y"]) for whole in expected]
    for rank in range(RANKS):
        records = Records()
        source = source_of(make(records), batch=batch)
        assert (source.sharding, source.samples, source.steps) == (BY_ROW, sum(sizes), len(sizes))
        own = batches(source, rank)
        # A rank compares its samples with the first of the data set.
        assert len(records.read) == 1 + sum(s if s % RANKS else s // RANKS for s in sizes)
        for found, whole, rows in zip(own, expected, sizes, strict=True):
            assert (found.rows, found.whole) == (rows, rows % RANKS > 0)
            each = rows // RANKS
            part = slice(rows) if found.whole else slice(rank * each, (rank + 1) * each)
            assert_equal(found.values[0], {name: column[part] for name, column in whole.items()})
            assert_equal(found.everything()[0], whole)
        assert [b.rows for b in batches(source, rank, first=2)] == sizes[2:]


@pytest.mark.parametrize("name", IN_BATCHES)
def test_each_rank_reads_its_rows_of_the_batches(name: str) -> None:
    make = IN_BATCHES[name]
    assert_rows_of_one_device(list(make(Records())), make, 0)


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_each_rank_reads_its_rows_of_samples(name: str) -> None:
    make = BY_SAMPLE[name]
    single = list(make(Records()))
    groups = [single[start : start + 5] for start in range(0, SAMPLES, 5)]
    expected = [{key: np.stack([s[key] for s in group]) for key in group[0]} for group in groups]
    assert_rows_of_one_device(expected, make, 5)


def test_skipped_batches_are_not_read() -> None:
    records = Records()
    source = source_of(grain.MapDataset.source(records).batch(BATCH))
    (last,) = batches(source, 1, first=5)
    assert last.values[0]["y"].tolist() == [21]
    assert records.read == [21, 0]
    assert batches(source, 1, first=6) == []


@given(
    samples=some.integers(1, 60),
    batch=some.integers(1, 20),
    ranks=some.integers(1, 4),
    devices=some.integers(1, 2),
    first=some.integers(0, 70),
)
def test_positions_are_those_of_one_device(
    samples: int, batch: int, ranks: int, devices: int, first: int
) -> None:
    starts = range(0, samples, batch)[first:]
    own = [
        iter(Positions(samples, batch, RankRows(r, ranks, ranks * devices), first))
        for r in range(ranks)
    ]
    for start in starts:
        rows = list(range(start, min(start + batch, samples)))
        whole = len(rows) % (ranks * devices) > 0
        each = len(rows) if whole else len(rows) // ranks
        parts = [[next(positions) for _ in range(each)] for positions in own]
        joined = [position for part in parts for position in part]
        assert parts == [rows] * ranks if whole else joined == rows
    assert [next(positions, None) for positions in own] == [None] * ranks


BATCHES = grain.transforms.Batch(BATCH)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda r: samples(r).filter(Large()), {"batch": 4}, "`filter` or `flat_map` changes"),
        (lambda r: samples(r).filter(Large()).to_iter_dataset().batch(4), {}, "`filter` or"),
        (lambda r: samples(r).to_iter_dataset().map(Doubled()), {"batch": 4}, "an operation on"),
        (lambda r: samples(r).batch(4).map(Doubled()), {}, "its last operation is not `batch`"),
        (lambda r: samples(r).batch(4, batch_fn=stacked), {}, "its `batch` has a `batch_fn`"),
        (lambda r: loader(r, BATCHES, Doubled()), {}, "its last operation is not a `Batch`"),
        (lambda r: loader(r, Large(), BATCHES), {}, "an operation before the batch"),
    ],
)
def test_other_operations_need_all_samples(
    make: Callable[[Records], Any], options: dict[str, Any], reason: str
) -> None:
    records = Records()
    expected = list(make(records))
    if options:
        groups = [expected[n : n + BATCH] for n in range(0, len(expected), BATCH)]
        expected = [
            {key: np.stack([s[key] for s in group]) for key in group[0]} for group in groups
        ]
    source = source_of(make(records), **options)
    assert f"each worker reads all samples, because {reason}" in source.sharding
    assert source.samples == -1
    for found, whole in zip(batches(source, 1), expected, strict=True):
        assert_equal(found.everything()[0], whole)


def stacked(found: Any) -> Any:
    return {"x": np.stack([sample["x"] for sample in found])}


def test_another_version_of_grain_is_read_as_an_iterable(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = sys.modules["grain._src.python.dataset.transformations.batch"]
    batched, single = samples(Records()).batch(BATCH), samples(Records())
    monkeypatch.delattr(parts, "BatchMapDataset")
    source = source_of(batched)
    assert f"because grain {grain.__version__} has no grain._src." in source.sharding
    assert len(batches(source, 1)) == -(-SAMPLES // BATCH)
    with pytest.raises(LibraryVersionError, match=r"BatchMapDataset, which nbdist needs for data"):
        source_of(single, batch=BATCH, order="source")


def test_loader_with_processes_needs_all_samples() -> None:
    data = loader(Records(), BATCHES, worker_count=2)
    assert source_of(data).sharding.endswith("because the loader has worker processes")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda r: samples(r).repeat(), {"batch": 4}, "train never ends: set the number of steps"),
        (lambda r: loader(r, BATCHES, num_epochs=None), {}, "train never ends: set the number"),
        (samples, {"batch": 4, "shuffle": 1}, "--shuffle is only for arrays"),
        (samples, {}, "the elements of train are single samples: set the batch size"),
        (
            lambda r: grain.MapDataset.source(r).map(lambda s: None if s["y"] == 6 else s),
            {"batch": 4},
            "sample 6 is None: use `filter` of grain",
        ),
        (lambda r: loader(r, Longer()), {"batch": 4}, "different lengths: choose the lengths"),
        (
            lambda r: grain.MapDataset.source(r).map(Longer()),
            {"batch": 4},
            r"different shapes or types, such as \(1,\) float64 and \(2,\) float64: pad them",
        ),
    ],
)
def test_unsuitable_data_are_refused(
    make: Callable[[Records], Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(StepError, match=message):
        batches(source_of(make(Records()), **options), 1)


def test_endless_data_run_for_the_number_of_steps() -> None:
    source = source_of(samples(Records()).repeat(), batch=4, steps=3)
    assert (source.samples, source.steps) == (-1, -1)
    epoch = source.epoch(1, RankRows(0, RANKS, RANKS))
    assert [next(epoch).rows for _ in range(12)] == [4] * 12


def test_buckets_need_all_samples() -> None:
    source = source_of(grain.MapDataset.source(Records()).map(Longer()), batch=4, bucket=(2,))
    assert source.sharding == "by element"
    assert batches(source, 0)[0].values[0]["x"].shape == (2, 2)
