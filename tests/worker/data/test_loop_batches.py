"""Batches of a training loop of which each rank reads its own rows."""

from __future__ import annotations

from typing import Any

import datasets
import grain
import numpy as np
import pytest

from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.loop_batches import BatchArray, LoopBatches, whole

SAMPLES, BATCH = 22, 4


class Records:
    """Records that note which of them are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: Any) -> Any:
        self.read.append(int(number))
        return np.full(3, number, np.float32), int(number)


class Lists(Records):
    def __getitem__(self, number: Any) -> Any:
        return [super().__getitem__(number)[0]]


class Texts(Records):
    def __getitem__(self, number: Any) -> Any:
        return str(number)


class Changing(Records):
    def __getitem__(self, number: Any) -> Any:
        super().__getitem__(number)
        return len(self.read)


def batches(rank: int, ranks: int) -> LoopBatches:
    return LoopBatches("line 1", RankRows(rank=rank, ranks=ranks, replicas=ranks), ("x",))


def table(**columns: Any) -> datasets.Dataset:
    columns = {"x": [float(n) for n in range(SAMPLES)], **columns}
    return datasets.Dataset.from_dict(columns).with_format("numpy")


def all_rows(data: Any, ranks: int) -> list[Any]:
    """Return the batches, joined from the rows that each rank has read."""
    parts = [[*batches(rank, ranks).of(data(), {})] for rank in range(ranks)]
    joined = []
    for of_ranks in zip(*parts, strict=True):
        columns = []
        for leaves in zip(*map(_leaves, of_ranks), strict=True):
            assert all(isinstance(leaf, BatchArray) for leaf in leaves)
            each = len(leaves[0]) // ranks if len(leaves[0]) % ranks == 0 else 0
            own = [leaf[r * each : (r + 1) * each] for r, leaf in enumerate(leaves)]
            columns.append(np.concatenate(own) if each else leaves[0].whole())
            np.testing.assert_array_equal(leaves[-1], columns[-1])  # reads the other rows
        joined.append(columns)
    return joined


def _leaves(element: Any) -> list[Any]:
    return [*(element.values() if isinstance(element, dict) else element)]


DATA = {
    "grain": lambda: grain.MapDataset.source(Records()).seed(1).shuffle().batch(BATCH),
    "without the rest": lambda: grain.MapDataset.source(Records()).batch(
        BATCH, drop_remainder=True
    ),
    "hugging face": lambda: table(y=[*range(SAMPLES)]).shuffle(seed=1).iter(BATCH),
    "hugging face without the rest": lambda: table().iter(BATCH, drop_last_batch=True),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_rows_equal_those_of_one_process(data: Any, ranks: int) -> None:
    expected = [_leaves(element) for element in data()]
    found = all_rows(data, ranks)
    for actual, columns in zip(found, expected, strict=True):
        for one, other in zip(actual, columns, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


def started() -> Any:
    iterator = table().iter(BATCH)
    next(iterator)
    return iterator


OTHERS = {
    "list": [1, 2],
    "iterator of grain": iter(grain.MapDataset.source(Records()).batch(BATCH)),
    "samples": grain.MapDataset.source(Records()),
    "filter": grain.MapDataset.source(Records()).filter(bool).to_iter_dataset().batch(BATCH),
    "lists": grain.MapDataset.source(Lists()).batch(BATCH),
    "texts": grain.MapDataset.source(Texts()).batch(BATCH),
    "samples that change": grain.MapDataset.source(Changing()).batch(BATCH),
    "iterator that has begun": started(),
    "missing values": table(y=[None, *range(1, SAMPLES)]).iter(BATCH),
    "other format": table().with_format(None).iter(BATCH),
    "transform": table().with_transform(lambda rows: rows).iter(BATCH),
    "generator": (number for number in range(3)),
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_other_data_are_read_as_a_whole(data: Any) -> None:
    assert batches(0, 2).of(data, {}) is data


def test_a_loop_whose_step_needs_whole_batches() -> None:
    stream, loop = DATA["grain"](), batches(0, 2)
    assert loop.of(stream, {}) is not stream
    loop.stop()
    assert loop.of(stream, {}) is stream


def test_length_is_that_of_the_data() -> None:
    assert len(batches(0, 2).of(DATA["grain"](), {})) == 6  # type: ignore[arg-type]


def test_global_names_contain_all_rows_at_the_end() -> None:
    loop, namespace = batches(1, 2), {}
    (first, *_) = loop.of(DATA["without the rest"](), namespace)
    namespace["x"] = {"a": first[0], "b": 1}
    loop.finish()
    assert type(namespace["x"]["a"]) is np.ndarray
    assert namespace["x"]["a"][:, 0].tolist() == [0, 1, 2, 3]


def test_other_values_remain_the_same_objects() -> None:
    value = {"a": (1, [2])}
    assert whole(value) is value
