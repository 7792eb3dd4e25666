"""Step cells that read `gs://` and `hf://` paths, with the clients gcsfs and huggingface_hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zarr

import nbdist
from nbdist.records import StepOptions
from tests import clusters
from tests.cloud_stores import REPO, GoogleStorage, Hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS, GROUP, BATCH = 200, 10, 20
full = pytest.mark.full
LOSS = "loss = jnp.mean(batch['x'])"
IN_ORDER = np.arange(ROWS // BATCH) * BATCH + (BATCH - 1) / 2
BY_GROUP = "by row group: each worker reads 10 of 20 row groups, those of its own rows"
BY_ROW = "by row: each worker reads its own rows only"
BY_SOURCE = "by source: each worker reads shards of its own"
ALL = "by element"

SETTINGS = """
import os
os.environ |= {settings!r}
import datetime
import jax.numpy as jnp, datasets, gcsfs, pandas as pd, pyarrow.dataset, pyarrow.fs, zarr
from google.oauth2.credentials import Credentials
from huggingface_hub import HfFileSystem
token = Credentials({key!r})
"""
PARQUET_OF_GOOGLE = """
files = gcsfs.GCSFileSystem(token=token)
train = pyarrow.dataset.dataset("bucket/train", filesystem=files, format="parquet")
"""
ZARR_OF_GOOGLE = """
train = zarr.open("gs://bucket/train.zarr", mode="r", storage_options=dict(token=token))
"""
ARROW_OF_GOOGLE = """
files = pyarrow.fs.GcsFileSystem(
    access_token=token.token,
    credential_token_expiration=datetime.datetime.now() + datetime.timedelta(hours=1),
    scheme="http",
    endpoint_override=os.environ["STORAGE_EMULATOR_HOST"].removeprefix("http://"),
    retry_time_limit=datetime.timedelta(seconds=1),
)
train = pyarrow.dataset.dataset("bucket/train", filesystem=files, format="parquet")
"""
FRAME_OF_GOOGLE = """
train = pd.read_parquet("gs://bucket/train/", storage_options=dict(token=token))
"""
FILES_OF_GOOGLE = """
files = "gs://bucket/train/*.parquet"
train = datasets.load_dataset(
    "parquet", data_files=files, split="train", storage_options=dict(token=token))
"""
PARQUET_OF_HUB = f'train = pyarrow.dataset.dataset("hf://datasets/{REPO}/train")'
FSSPEC_OF_HUB = f"""
train = pyarrow.dataset.dataset("datasets/{REPO}/train", filesystem=HfFileSystem())
"""
FRAME_OF_HUB = f'train = pd.read_parquet("hf://datasets/{REPO}/train")'
FILES_OF_HUB = f"""
files = "hf://datasets/{REPO}/train/*.parquet"
train = datasets.load_dataset("parquet", data_files=files, split="train")
"""
REPO_OF_HUB = f'train = datasets.load_dataset("{REPO}", split="train")'
STREAM_OF_HUB = f'train = datasets.load_dataset("{REPO}", split="train", streaming=True)'


class Stores(NamedTuple):
    """Store of Google and Hub with the same data."""

    google: GoogleStorage
    hub: Hub


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Start stores with two files of ten row groups each, and a Zarr array."""
    (tmp_path / "train").mkdir()
    rows = np.arange(ROWS, dtype=np.float64)
    for number, part in enumerate(np.split(rows, 2)):
        file = tmp_path / "train" / f"{number}.parquet"
        pyarrow.parquet.write_table(pa.table({"x": part}), file, row_group_size=GROUP)
    group = zarr.open_group(tmp_path / "train.zarr", mode="w")
    group.create_array("x", data=rows, chunks=(GROUP,))
    google, hub = GoogleStorage(), Hub(tmp_path)
    google.put(tmp_path)
    yield Stores(google, hub)
    google.stop()
    hub.stop()


@pytest.fixture
def cluster(tmp_path: Path, stores: Stores) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        settings = stores.google.environment | {
            "HF_ENDPOINT": f"http://{stores.hub.address}",
            "HF_TOKEN": stores.hub.key,
            "HF_HOME": str(tmp_path / "home"),
        }
        cell = SETTINGS.format(settings=settings, key=stores.google.key)
        running.run(cell, strategy="pjrt")
        yield running


@pytest.mark.parametrize(
    ("opened", "order", "sharding"),
    [
        pytest.param(PARQUET_OF_GOOGLE, "exact", BY_GROUP, id="gs-parquet"),
        pytest.param(PARQUET_OF_GOOGLE, "source", BY_SOURCE, id="gs-parquet-source", marks=full),
        pytest.param(ARROW_OF_GOOGLE, "exact", BY_GROUP, id="gs-arrow", marks=full),
        pytest.param(FRAME_OF_GOOGLE, "exact", "", id="gs-pandas", marks=full),
        pytest.param(ZARR_OF_GOOGLE, "exact", BY_ROW, id="gs-zarr"),
        pytest.param(FILES_OF_GOOGLE, "exact", BY_ROW, id="gs-files", marks=full),
        pytest.param(PARQUET_OF_HUB, "exact", BY_GROUP, id="hf-parquet"),
        pytest.param(PARQUET_OF_HUB, "source", BY_SOURCE, id="hf-parquet-source", marks=full),
        pytest.param(FSSPEC_OF_HUB, "exact", BY_GROUP, id="hf-fsspec", marks=full),
        pytest.param(FRAME_OF_HUB, "exact", "", id="hf-pandas", marks=full),
        pytest.param(FILES_OF_HUB, "exact", BY_ROW, id="hf-files"),
        pytest.param(REPO_OF_HUB, "exact", BY_ROW, id="hf-repo", marks=full),
        pytest.param(REPO_OF_HUB, "source", BY_SOURCE, id="hf-repo-source", marks=full),
        pytest.param(STREAM_OF_HUB, "exact", ALL, id="hf-stream"),
        pytest.param(STREAM_OF_HUB, "source", BY_SOURCE, id="hf-stream-source", marks=full),
    ],
)
def test_a_step_reads_the_samples_of_a_store(
    cluster: nbdist.Cluster,
    opened: str,
    order: str,
    sharding: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.run(opened, strategy="pjrt")
    options = StepOptions(data="train", batch=BATCH, order=order)  # type: ignore[arg-type]
    run = cluster.run(LOSS, step=options, strategy="pjrt")
    np.testing.assert_allclose(np.mean(run.loss), (ROWS - 1) / 2, rtol=1e-6)
    if order != "source":
        np.testing.assert_allclose(run.loss, IN_ORDER, rtol=1e-6)
    assert sharding in capsys.readouterr().out


@pytest.mark.parametrize(
    ("opened", "order"),
    [
        pytest.param(PARQUET_OF_GOOGLE, "exact", id="gs-parquet"),
        pytest.param(PARQUET_OF_GOOGLE, "source", id="gs-parquet-source", marks=full),
        pytest.param(ARROW_OF_GOOGLE, "exact", id="gs-arrow", marks=full),
        pytest.param(ZARR_OF_GOOGLE, "exact", id="gs-zarr", marks=full),
        pytest.param(PARQUET_OF_HUB, "exact", id="hf-parquet", marks=full),
        pytest.param(STREAM_OF_HUB, "exact", id="hf-stream"),
        pytest.param(STREAM_OF_HUB, "source", id="hf-stream-source", marks=full),
    ],
)
def test_lost_access_is_one_error_with_a_remedy(
    cluster: nbdist.Cluster, stores: Stores, opened: str, order: str
) -> None:
    cluster.run(opened, strategy="pjrt")
    stores.google.key = stores.hub.key = "other"
    options = StepOptions(data="train", batch=BATCH, order=order)  # type: ignore[arg-type]
    with pytest.raises(nbdist.CellError, match=r"cannot read .*: .*(HF_TOKEN|GOOGLE)") as caught:
        cluster.run(LOSS, step=options, strategy="pjrt")
    assert str(caught.value).count("cannot read") == 1


@pytest.mark.parametrize(
    "opened",
    [
        pytest.param(PARQUET_OF_GOOGLE, id="gs-parquet"),
        pytest.param(PARQUET_OF_HUB, id="hf-parquet"),
        pytest.param(STREAM_OF_HUB, id="hf-stream", marks=full),
    ],
)
def test_a_missing_file_is_one_error_with_a_remedy(
    cluster: nbdist.Cluster, stores: Stores, opened: str
) -> None:
    cluster.run(opened, strategy="pjrt")
    (stores.hub.root / "train/1.parquet").unlink()
    stores.google.remove("train/1.parquet")
    options = StepOptions(data="train", batch=BATCH)
    with pytest.raises(nbdist.CellError, match=r"cannot read train: .*1\.parquet") as caught:
        cluster.run(LOSS, step=options, strategy="pjrt")
    assert str(caught.value).count("cannot read") == 1
