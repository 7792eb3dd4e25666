"""Parquet files and Hugging Face data sets, in the order of one device and by source."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import fsspec
import grain
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import webdataset
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as some

from nbdist.errors import StepError
from nbdist.records import StepOptions
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.indexed_rows import IndexedRows
from nbdist.worker.data.padding import Padding
from nbdist.worker.data.source_shards import ALL_GROUPS, RowGroups
from nbdist.worker.data.sources import Arrays, open_source
from tests.worker.data.test_rank_shards import RANKS, Collectives, on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.worker.data.sources import Source

ROWS, GROUP = 22, 3
OWN = "those of its own rows"
TABLE = pa.table(
    {
        "x": pa.array([[float(n), float(-n)] for n in range(ROWS)], pa.list_(pa.float32())),
        "y": np.arange(ROWS),
    }
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two files of 12 and 10 rows, in row groups of 3."""
    for name, part in (("a", TABLE.slice(0, 12)), ("b", TABLE.slice(12))):
        pyarrow.parquet.write_table(part, tmp_path / f"{name}.parquet", row_group_size=GROUP)
    return tmp_path


def read(make: Callable[[], Any], order: str, batch: int = 4) -> list[list[Any]]:
    """Return the batches of an epoch on each of two ranks."""
    collectives = Collectives()

    def of_rank(rank: int) -> list[Any]:
        options = StepOptions(data="train", batch=batch, order=order)  # type: ignore[arg-type]
        source = open_source(make(), options, rank=rank, ranks=RANKS, gather=collectives.of(rank))
        return list(source.epoch(1, RankRows(rank, RANKS, RANKS)))

    return on_ranks(of_rank)


def numbers(batches: list[Any]) -> list[list[int]]:
    return [batch.values[0]["y"].tolist() for batch in batches]


def source_of(data: Any, **options: Any) -> Source:
    chosen = StepOptions(data="train", **options)
    return open_source(data, chosen, rank=0, ranks=2, gather=lambda found: found[None])


def files_of(folder: Path) -> Any:
    return pyarrow.dataset.dataset(folder)


class TestParquet:
    def test_exact_order_is_that_of_the_files(self, folder: Path) -> None:
        source = source_of(files_of(folder), batch=4)
        assert (source.samples, source.steps) == (ROWS, 6)
        assert source.sharding == "by row group: each worker reads 7 to 8 of 8 row groups, " + OWN
        first, second = read(lambda: files_of(folder), "auto")
        assert numbers(first) == [[n, n + 1] for n in range(0, 20, 4)] + [[20]]
        assert numbers(second) == [[n + 2, n + 3] for n in range(0, 20, 4)] + [[21]]
        assert first[1].values[0]["x"].tolist() == [[4, -4], [5, -5]]

    def test_each_rank_reads_its_own_row_groups(self, folder: Path) -> None:
        first, second = read(lambda: files_of(folder), "source")
        assert numbers(first)[:3] == [[0, 1], [2, 6], [7, 8]]
        assert numbers(second)[:3] == [[3, 4], [5, 9], [10, 11]]
        whole = [n for batch in first if batch.whole for n in batch.values[0]["y"].tolist()]
        own = [n for b in (*first, *second) if not b.whole for n in b.values[0]["y"].tolist()]
        assert sorted(own + whole) == list(range(ROWS))

    def test_row_groups_of_one_file(self, folder: Path) -> None:
        def file() -> Any:
            return pyarrow.parquet.ParquetFile(folder / "a.parquet")

        assert [*map(numbers, read(file, "exact"))] == [
            [[0, 1], [4, 5], [8, 9]],
            [[2, 3], [6, 7], [10, 11]],
        ]
        assert [*map(numbers, read(file, "source"))] == [
            [[0, 1], [2, 6], [7, 8]],
            [[3, 4], [5, 9], [10, 11]],
        ]

    @pytest.mark.parametrize("order", ["exact", "source"])
    def test_file_system_of_fsspec(self, folder: Path, order: str) -> None:
        store = fsspec.filesystem("memory")
        store.put(str(folder), "/train", recursive=True)

        def make() -> Any:
            return pyarrow.dataset.dataset("/train", filesystem=store, format="parquet")

        try:
            expected = read(lambda: files_of(folder), order)
            assert [*map(numbers, read(make, order))] == [*map(numbers, expected)]
            files = make()
        finally:
            store.rm("/train", recursive=True)
        with pytest.raises(StepError, match=r"cannot read train: .*AWS_ACCESS_KEY_ID"):
            source_of(files, batch=4)

    def test_rows_before_a_checkpoint_are_not_read(self, folder: Path) -> None:
        source = source_of(files_of(folder), batch=4)
        for first in (0, 3):
            found = list(source.epoch(2, RankRows(1, 2, 2), first))
            assert numbers(found) == [[n + 2, n + 3] for n in range(4 * first, 20, 4)] + [[21]]

    def test_fewer_rows_than_ranks(self, tmp_path: Path) -> None:
        pyarrow.parquet.write_table(TABLE.slice(0, 3), tmp_path / "a.parquet", row_group_size=1)
        (batch,) = source_of(files_of(tmp_path), batch=8).epoch(1, RankRows(3, 4, 4))
        assert (batch.whole, batch.values[0]["y"].tolist()) == (True, [0, 1, 2])

    def test_columns_of_partitions_are_read(self, tmp_path: Path) -> None:
        parts = pyarrow.dataset.partitioning(flavor="hive")
        table = pa.table({"y": np.arange(4), "part": [0, 0, 1, 1]})
        pyarrow.dataset.write_dataset(
            table, tmp_path, format="parquet", partitioning=["part"], partitioning_flavor="hive"
        )
        files = pyarrow.dataset.dataset(tmp_path, partitioning=parts)
        (batch,) = source_of(files, batch=4).epoch(1, RankRows(0, 1, 1))
        assert batch.values[0]["part"].tolist() == [0, 0, 1, 1]

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (pa.table({"y": [1, None]}), "column `y` has missing values: fill them"),
            (pa.table({"y": [[1], [1, 2]]}), r"such as \(1,\) int64 and \(2,\) int64: pad them"),
            (pa.table({"y": [[1]] * 3 + [[1, 2]]}), "have different lengths: choose .* --bucket"),
            (TABLE.slice(0, 0), "the data are empty"),
        ],
    )
    def test_unsuitable_columns_are_refused(
        self, tmp_path: Path, table: pa.Table, message: str
    ) -> None:
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(StepError, match=message):
            list(source_of(files_of(tmp_path), batch=4).epoch(1, RankRows(1, 2, 2)))

    def test_lists_are_padded_to_a_bucket(self, tmp_path: Path) -> None:
        table = pa.table({"y": [[1], [2], [3], [4, 5]]})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
        source = source_of(files_of(tmp_path), batch=4, bucket=(2,))
        assert source.sharding == "by element"
        (batch,) = source.epoch(1, RankRows(1, 2, 2))
        assert batch.values[0]["y"].tolist() == [[3, 0], [4, 5]]

    def test_filter_is_refused(self, folder: Path) -> None:
        files = files_of(folder).filter(pyarrow.dataset.field("y") > 3)
        with pytest.raises(StepError, match="train has a filter: use arrays"):
            source_of(files, batch=2)

    def test_lost_file_is_an_error_with_a_remedy(self, folder: Path) -> None:
        files = files_of(folder)
        (folder / "b.parquet").unlink()
        with pytest.raises(StepError, match=r"cannot read train: .*AWS_ACCESS_KEY_ID"):
            source_of(files, batch=2)


class TestHuggingFace:
    @pytest.mark.parametrize("streams", [False, True])
    def test_each_rank_reads_its_own_part(self, streams: bool) -> None:
        def make() -> Any:
            table = datasets.Dataset.from_dict({"y": list(range(16))})
            return table.to_iterable_dataset(num_shards=4) if streams else table

        first, second = map(numbers, read(make, "source"))
        assert first == [[n, n + 1] for n in range(0, 8, 2)] or streams
        assert sorted(n for part in (*first, *second) for n in part) == list(range(16))

    def test_a_stream_maps_the_samples_of_the_rank_only(self) -> None:
        seen: dict[int, list[int]] = {}

        def make() -> Any:
            own: list[int] = []
            seen[len(seen)] = own

            def noted(sample: dict[str, int]) -> dict[str, int]:
                own.append(sample["y"])
                return {"y": 2 * sample["y"]}

            table = datasets.Dataset.from_dict({"y": list(range(16))})
            return table.to_iterable_dataset(num_shards=4).map(noted)

        ranks = read(make, "source")
        assert sorted(n for rank in ranks for part in numbers(rank) for n in part) == [
            2 * n for n in range(16)
        ]
        assert sorted(map(len, seen.values())) == [8, 8]


class Records:
    """Records that note which of them are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: Any) -> dict[str, int]:
        self.read.append(int(number))
        return {"y": int(number)}


class Even(grain.transforms.Filter):
    def filter(self, element: dict[str, int]) -> bool:
        return element["y"] % 2 == 0


def loader(records: Records, *operations: Any) -> Any:
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1)
    return grain.DataLoader(data_source=records, sampler=sampler, operations=list(operations))


class TestGrain:
    @pytest.mark.parametrize(
        "made",
        [
            lambda records: grain.MapDataset.source(records).shuffle(seed=1).filter(Even()),
            lambda records: grain.MapDataset.source(records).filter(Even()).to_iter_dataset(),
            lambda records: loader(records, Even()),
        ],
    )
    def test_each_rank_reads_its_own_part(self, made: Callable[[Records], Any]) -> None:
        records: list[Records] = []

        def make() -> Any:
            records.append(Records())
            return made(records[-1])

        first, second = read(make, "source")
        whole = [n for batch in first if batch.whole for n in batch.values[0]["y"].tolist()]
        own = [n for b in (*first, *second) if not b.whole for n in b.values[0]["y"].tolist()]
        assert sorted(own + whole) == list(range(0, ROWS, 2))
        assert [len(each.read) for each in records] == [ROWS // 2] * 2

    @pytest.mark.parametrize(
        ("made", "message"),
        [
            (grain.MapDataset.range(8).batch(2), "remove `batch` from the data set"),
            (grain.MapDataset.range(8).to_iter_dataset().batch(2), "remove `batch`"),
            (grain.MapDataset.range(8).batch(2).to_iter_dataset(), "remove `batch`"),
            (loader(Records(), grain.transforms.Batch(2)), "remove `batch`"),
            (grain.MapDataset.range(8).repeat(), "train never ends"),
            (grain.MapDataset.range(8).to_iter_dataset().map(abs), "cannot divide at its source"),
        ],
    )
    def test_unsuitable_data_are_refused(self, made: Any, message: str) -> None:
        with pytest.raises(StepError, match=message):
            source_of(made, order="source", batch=4)


@pytest.fixture
def tars(tmp_path: Path) -> Iterator[list[str]]:
    """Return four tar files of 6, 6, 6 and 4 samples. webdataset does not close them."""
    paths = [str(tmp_path / f"{number}.tar") for number in range(4)]
    for number, path in enumerate(paths):
        with webdataset.TarWriter(path) as writer:
            for row in range(6 * number, min(6 * (number + 1), ROWS)):
                writer.write({"__key__": f"{row:03}", "x.npy": np.full(2, row), "y.cls": row})
    yield paths
    gc.collect()


def pipeline(tars: list[str]) -> Any:
    """Return a pipeline of dicts of arrays."""
    samples = webdataset.WebDataset(tars, shardshuffle=False).decode()
    return samples.map(lambda sample: {"x": sample["x.npy"], "y": sample["y.cls"]})


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
class TestTarFiles:
    def test_exact_order_is_that_of_the_files(self, tars: list[str]) -> None:
        first, second = read(lambda: pipeline(tars), "auto")
        assert numbers(first) == [[n, n + 1] for n in range(0, 20, 4)] + [[20]]
        assert numbers(second) == [[n + 2, n + 3] for n in range(0, 20, 4)] + [[21]]
        assert first[1].values[0]["x"].tolist() == [[4, 4], [5, 5]]

    def test_each_rank_reads_its_own_files(self, tars: list[str]) -> None:
        opened: list[list[str]] = []

        def make() -> Any:
            made, own = pipeline(tars), []
            opened.append(own)

            def noted(urls: Any) -> Any:
                for url in urls:
                    own.append(url["url"])
                    yield url

            made.pipeline.insert(1, noted)
            return made

        first, second = read(make, "source")
        assert numbers(first)[:3] == [[0, 1], [2, 3], [4, 5]]
        assert numbers(second)[:3] == [[6, 7], [8, 9], [10, 11]]
        whole = [n for batch in first if batch.whole for n in batch.values[0]["y"].tolist()]
        own = [n for b in (*first, *second) if not b.whole for n in b.values[0]["y"].tolist()]
        assert sorted(own + whole) == list(range(ROWS))
        assert sorted(opened) == [tars[0::2], tars[1::2]]

    def test_unsuitable_pipelines_are_refused(self, tars: list[str]) -> None:
        resampled = webdataset.WebDataset(tars, resampled=True, shardshuffle=False)
        for made, message in (
            (pipeline(tars[:1]), "train has 1 tar files, fewer than 2 workers"),
            (pipeline(tars).with_epoch(8), "train has `with_epoch`.*use --steps N instead"),
            (resampled, "cannot divide at its source"),
        ):
            with pytest.raises(StepError, match=message):
                source_of(made, order="source", batch=4)

    def test_lost_file_is_an_error_with_a_remedy(self, tars: list[str]) -> None:
        with pytest.raises(StepError, match=r"cannot read train: .*lost.tar.*AWS_ACCESS_KEY_ID"):
            read(
                lambda: pipeline([*tars[:2], *[path + ".lost.tar" for path in tars[:2]]]), "source"
            )

    def test_samples_of_different_shapes_are_refused(self, tars: list[str]) -> None:
        def make() -> Any:
            return pipeline(tars).map(lambda sample: {"y": np.ones(sample["y"])})

        with pytest.raises(StepError, match="the samples of train have different shapes: map them"):
            read(make, "source")


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (np.arange(4), {"batch": 2}, "train has type ndarray, which nbdist cannot divide"),
        (range(4), {}, "--order source needs --batch N, and no --bucket or --shuffle"),
    ],
)
def test_data_without_shards_are_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StepError, match=message):
        source_of(data, order="source", **options)


@given(
    counts=some.lists(some.integers(0, 6), min_size=1, max_size=8).filter(any),
    batch=some.integers(1, 12),
    ranks=some.sampled_from([1, 2, 4]),
    first=some.integers(0, 3),
)
def test_a_rank_reads_the_row_groups_of_its_rows(
    counts: list[int], batch: int, ranks: int, first: int
) -> None:
    values = np.arange(sum(counts))
    of_row = np.repeat(np.arange(len(counts)), counts)
    parts = [pa.table({"y": part}) for part in np.split(values, np.cumsum(counts)[:-1])]
    numbers_read = []
    for rank in range(ranks):
        seen: list[int] = []

        def read_group(number: int, seen: list[int] = seen) -> pa.Table:
            seen.append(number)
            return parts[number]

        groups = RowGroups([(n, partial(read_group, i)) for i, n in enumerate(counts)])
        rows = IndexedRows(len(groups), groups.read, "train", alike=True)
        found = Arrays(rows, batch, None, Padding(()))
        whole = Arrays({"y": values}, batch, None, Padding(()))
        rank_rows = RankRows(rank, ranks, ranks)
        expected = list(whole.epoch(1, rank_rows, first))
        own = numbers(list(found.epoch(1, rank_rows, first)))
        assert own == numbers(expected)
        needed = {int(of_row[row]) for part in own for row in part}
        assert sorted(seen) == sorted(needed | ({int(of_row[0])} if own else set()))
        needed = {int(of_row[row]) for b in whole.epoch(1, rank_rows) for row in b.values[0]["y"]}
        numbers_read.append(len(needed))
    low, high, total = min(numbers_read), max(numbers_read), np.count_nonzero(counts)
    each = f"reads {low} of" if low == high else f"reads {low} to {high} of"
    shown = groups.sharding(batch, ranks)
    if ranks == 1:
        assert shown == "by element"
    else:
        assert shown == ALL_GROUPS if low == total else f"{each} {total} row groups" in shown


class CountingFiles(LocalFileSystem):  # type: ignore[misc]
    """Local files of fsspec that count the bytes that are read."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        original = file.f.read

        def read_counted(size: int = -1) -> bytes:
            found: bytes = original(size)
            self.read_bytes += len(found)
            return found

        file.read = read_counted
        return file


def test_a_rank_reads_the_bytes_of_its_row_groups(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=400_000)
    table = pa.table({"y": rows})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=50_000, compression="none")
    counters = []

    def make() -> Any:
        counters.append(CountingFiles())
        return pyarrow.dataset.dataset(str(path), filesystem=counters[-1], format="parquet")

    # A rank also reads the first sample, to compare the others with it.
    for order, batch, shares in (
        ("exact", 1000, [1.0, 1.0]),
        ("exact", 200_000, [0.5, 0.625]),
        ("source", 1000, [0.5, 0.5]),
    ):
        counters.clear()
        read(make, order, batch=batch)
        size = path.stat().st_size
        found = sorted(counter.read_bytes / size for counter in counters)
        assert found == pytest.approx(shares, rel=0.1)
