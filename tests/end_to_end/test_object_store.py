"""Step cells that read Parquet files of an object store, with PyArrow's client of S3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import nbdist
from nbdist.records import StepOptions
from tests import clusters
from tests.object_store import KEY, ObjectStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS, GROUPS, BATCH = 400_000, 80, 20_000
OPEN = """
import jax.numpy as jnp
import pyarrow.dataset, pyarrow.fs
store = pyarrow.fs.S3FileSystem(
    endpoint_override="{address}", scheme="http", region="test", access_key="{key}",
    secret_key="secret")
stream = pyarrow.dataset.dataset("bucket/train", filesystem=store, format="parquet")
"""
ANONYMOUS = """
other = pyarrow.fs.S3FileSystem(
    endpoint_override="{address}", scheme="http", region="test", anonymous=True)
files = pyarrow.dataset.FileSystemDataset.from_paths(
    stream.files, schema=stream.schema, filesystem=other,
    format=pyarrow.dataset.ParquetFileFormat())
"""
LOSS = "loss = jnp.mean(batch['x'])"


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    """Start an object store with two files of forty row groups each."""
    folder = tmp_path / "bucket" / "train"
    folder.mkdir(parents=True)
    for n, rows in enumerate(np.split(np.arange(ROWS, dtype=np.float64), 2)):
        table = pa.table({"x": rows})
        pyarrow.parquet.write_table(
            table,
            folder / f"{n}.parquet",
            row_group_size=ROWS // GROUPS,
            compression="none",
            use_dictionary=False,
        )
    running = ObjectStore(tmp_path)
    yield running
    running.stop()


@pytest.mark.parametrize("order", [pytest.param("source", marks=pytest.mark.full), "exact"])
def test_a_step_reads_parquet_of_an_object_store(
    cluster: nbdist.Cluster,
    store: ObjectStore,
    order: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The two workers read the files once in sum."""
    cluster.run(OPEN.format(address=store.address, key=KEY), strategy="pjrt")
    options = StepOptions(data="stream", batch=BATCH, order=order)  # type: ignore[arg-type]
    before = store.sent_bytes
    run = cluster.run(LOSS, step=options, strategy="pjrt")
    np.testing.assert_allclose(np.mean(run.loss), (ROWS - 1) / 2, rtol=1e-5)
    in_order = np.arange(ROWS // BATCH) * BATCH + (BATCH - 1) / 2
    np.testing.assert_allclose(run.loss, in_order, rtol=1e-5)  # also by source, for these groups
    size = 8 * ROWS
    assert size <= store.sent_bytes - before < 1.3 * size
    sharding = {
        "exact": "by row group: each worker reads 40 of 80 row groups, those of its own rows",
        "source": "by source: each worker reads shards of its own",
    }[order]
    assert sharding in capsys.readouterr().out


def test_missing_credentials_are_one_error(cluster: nbdist.Cluster, store: ObjectStore) -> None:
    cluster.run(OPEN.format(address=store.address, key=KEY), strategy="pjrt")
    cluster.run(ANONYMOUS.format(address=store.address), strategy="pjrt")
    options = StepOptions(data="files", batch=BATCH)
    with pytest.raises(nbdist.CellError, match=r"cannot read files: .*AWS_ACCESS_KEY_ID") as caught:
        cluster.run(LOSS, step=options, strategy="pjrt")
    assert "ACCESS_DENIED" in str(caught.value)
