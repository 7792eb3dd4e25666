"""Arrays of Zarr and HDF5: each rank reads its own rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import fsspec
import gcsfs.retry
import google.auth.exceptions
import h5py
import httpx2
import numpy as np
import pyarrow.fs
import pytest
import zarr
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from nbdist.errors import StepError
from nbdist.records import StepOptions
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.sources import open_source
from nbdist.worker.data.stores import BY_ROW, reading
from tests.object_store import KEY, ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.worker.data.sources import Source

X = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
Y = np.arange(22)


class CountingStore(zarr.storage.MemoryStore):  # type: ignore[misc]
    """Store in memory that notes the chunks that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        self.read.append(key)
        return await super().get(key, *arguments, **options)


@pytest.fixture(params=["zarr", "h5py"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Return a group of arrays `x` and `y`, in chunks of four rows."""
    if request.param == "zarr":
        made = zarr.open_group(tmp_path / "train.zarr", mode="w")
        made.create_array("x", data=X, chunks=(4, 3))
        made.create_array("y", data=Y, chunks=(4,))
        yield zarr.open(tmp_path / "train.zarr", mode="r")
        return
    with h5py.File(tmp_path / "train.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(4, 3))
        file.create_dataset("y", data=Y, chunks=(4,))
        yield file


def source_of(data: Any, **options: Any) -> Source:
    chosen = StepOptions(data="train", **options)
    return open_source(data, chosen, rank=0, ranks=2, gather=lambda numbers: numbers[None])


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize(
    "columns",
    [
        lambda group: group,
        lambda group: {"x": group["x"], "y": Y},
        lambda group: {"x": group["x"], "y": group["y"]},
    ],
)
def test_rows_are_those_of_arrays_in_memory(
    group: Any, columns: Callable[[Any], Any], shuffle: int | None
) -> None:
    stored = source_of(columns(group), batch=5, shuffle=shuffle)
    whole = source_of({"x": X, "y": Y}, batch=5, shuffle=shuffle)
    assert (stored.samples, stored.steps, stored.sharding) == (22, 5, BY_ROW)
    for rank in range(2):
        rank_rows = RankRows(rank, 2, 2)
        pairs = zip(stored.epoch(2, rank_rows), whole.epoch(2, rank_rows), strict=True)
        for found, expected in pairs:
            assert found.values[0].keys() == {"x", "y"}
            for name, column in expected.values[0].items():
                assert isinstance(found.values[0][name], np.ndarray)
                assert found.values[0][name].dtype == column.dtype
                np.testing.assert_array_equal(found.values[0][name], column)


def test_one_array_is_the_batch(group: Any) -> None:
    first, *_ = source_of(group["x"], batch=4).epoch(1, RankRows(1, 2, 2))
    np.testing.assert_array_equal(first.values[0], X[2:4])


def test_a_rank_reads_its_own_chunks() -> None:
    store = CountingStore()
    array = zarr.create_array(store, shape=(32, 3), chunks=(4, 3), dtype="f4")
    array[:] = np.arange(96).reshape(32, 3)
    store.read.clear()
    list(source_of({"x": array}, batch=16).epoch(1, RankRows(1, 2, 2)))
    assert sorted(store.read) == ["c/2/0", "c/3/0", "c/6/0", "c/7/0"]


def test_rows_before_a_checkpoint_are_not_read() -> None:
    store = CountingStore()
    array = zarr.create_array(store, shape=(32, 3), chunks=(4, 3), dtype="f4")
    array[:] = np.arange(96).reshape(32, 3)
    store.read.clear()
    list(source_of({"x": array}, batch=16).epoch(1, RankRows(1, 2, 2), first=1))
    assert sorted(store.read) == ["c/6/0", "c/7/0"]


def test_array_of_an_fsspec_store() -> None:
    files = fsspec.filesystem("memory")
    try:
        zarr.save_array("memory://train.zarr", X)
        array = zarr.open("memory://train.zarr", mode="r")
        first, *_ = source_of({"x": array}, batch=4).epoch(1, RankRows(1, 2, 2))
        np.testing.assert_array_equal(first.values[0]["x"], X[2:4])
    finally:
        files.rm("/train.zarr", recursive=True)


class LostStore(CountingStore):
    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        if key.startswith("c/"):
            raise PermissionError("access denied")
        return await super().get(key, *arguments, **options)


def test_unreadable_chunk_is_an_error_with_a_remedy() -> None:
    array = zarr.create_array(LostStore(), shape=(8,), chunks=(4,), dtype="f4", fill_value=1)
    source = source_of({"x": array}, batch=4)
    with pytest.raises(StepError, match=r"cannot read <Array .*access denied: .*AWS_ACCESS_KEY_ID"):
        list(source.epoch(1, RankRows(0, 2, 2)))


class ArrowStore(ArrowFSWrapper):  # type: ignore[misc]
    fsid = "s3"  # fsspec takes it from the host of HDFS


def opened_with_pyarrow(address: str) -> Any:
    files = pyarrow.fs.S3FileSystem(
        endpoint_override=address, scheme="http", region="test", access_key=KEY, secret_key="-"
    )
    wrapped = AsyncFileSystemWrapper(ArrowStore(files), asynchronous=True)
    store = zarr.storage.FsspecStore(wrapped, path="bucket/train.zarr", read_only=True)
    return zarr.open(store, mode="r")


def opened_with_s3fs(address: str) -> Any:
    pytest.importorskip("s3fs", reason="s3fs needs another python-dateutil than the dev tools")
    options = {"key": KEY, "secret": "-", "endpoint_url": f"http://{address}"}
    return zarr.open("s3://bucket/train.zarr", mode="r", storage_options=options)


@pytest.fixture
def object_store(tmp_path: Path) -> Iterator[ObjectStore]:
    """Start an object store with a group of arrays `x` and `y`, in chunks of four rows."""
    group = zarr.open_group(tmp_path / "bucket" / "train.zarr", mode="w")
    group.create_array("x", data=X, chunks=(4, 3), compressors=None)
    group.create_array("y", data=Y, chunks=(4,), compressors=None)
    store = ObjectStore(tmp_path)
    yield store
    store.stop()


@pytest.mark.parametrize("opened", [opened_with_pyarrow, opened_with_s3fs])
class TestObjectStore:
    def test_a_rank_reads_its_own_chunks(
        self, object_store: ObjectStore, opened: Callable[[str], Any]
    ) -> None:
        source = source_of(opened(object_store.address), batch=8)
        assert source.sharding == BY_ROW
        for rank, chunks in ((0, 3), (1, 4)):
            before = object_store.sent_bytes
            own = list(source.epoch(1, RankRows(rank, 2, 2)))
            assert object_store.sent_bytes - before == chunks * 4 * (3 * 4 + 8)
            whole = source_of({"x": X, "y": Y}, batch=8).epoch(1, RankRows(rank, 2, 2))
            for found, expected in zip(own, whole, strict=True):
                for name, column in expected.values[0].items():
                    np.testing.assert_array_equal(found.values[0][name], column)

    def test_lost_access_is_an_error_with_a_remedy(
        self, object_store: ObjectStore, opened: Callable[[str], Any]
    ) -> None:
        source = source_of(opened(object_store.address), batch=8)
        object_store.key = "other"
        with pytest.raises(StepError, match=r"cannot read <Array .*/[xy] .*: .*AWS_ACCESS_KEY_ID"):
            list(source.epoch(1, RankRows(0, 2, 2)))


@pytest.mark.parametrize(
    "error",
    [
        gcsfs.retry.HttpError({"code": 401, "message": "Anonymous caller"}),
        google.auth.exceptions.DefaultCredentialsError("no credentials"),
        httpx2.ConnectError("connection refused"),
        aiohttp.ServerDisconnectedError(),
        FileNotFoundError("train/0.parquet"),
    ],
)
def test_errors_of_clients_have_a_remedy(error: Exception) -> None:
    remedy = f"cannot read train: {' '.join(str(error).split())}: check the path, .*HF_TOKEN"
    with pytest.raises(StepError, match=remedy), reading("train"):
        raise error


def test_other_errors_are_raised_as_they_are() -> None:
    with pytest.raises(ValueError, match="wrong"), reading("train"):
        raise ValueError("wrong")
