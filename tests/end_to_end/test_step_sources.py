"""Values of `--data` that two workers read in part: grain, Zarr and tar files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import webdataset
import zarr
from msgspec import structs

import nbdist
from nbdist.records import Planning, Saving, StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS, BATCH = 200, 20
ROW = re.compile(r"each worker reads its own rows only")


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        running.run(RECORDS, strategy="pjrt")
        yield running


RECORDS = f"""
import grain, jax.numpy as jnp, numpy as np
class Records:
    def __init__(self):
        self.read = []
    def __len__(self):
        return {ROWS}
    def __getitem__(self, number):
        self.read.append(int(number))
        return np.float32(number)
class Noise(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element + rng.normal()
records, steps = Records(), jnp.zeros(())
"""
GRAIN = {
    "map": "stream = grain.MapDataset.source(records).seed(1).shuffle()"
    ".random_map(Noise()).batch(20)",
    "iter": "stream = grain.MapDataset.source(records).seed(1).shuffle().random_map(Noise())"
    ".to_iter_dataset().batch(20)",
    "loader": f"sampler = grain.samplers.IndexSampler({ROWS}, shuffle=True, seed=1, num_epochs=1)\n"
    "stream = grain.DataLoader(data_source=records, sampler=sampler,"
    " operations=[Noise(), grain.transforms.Batch(20)])",
}
LOSS = "loss = jnp.mean(batch)\nsteps = steps + 1"


def run(cluster: nbdist.Cluster, **options: Any) -> nbdist.Run:
    saving = options.pop("saving", None)
    step = StepOptions(data="stream", **options)
    return cluster.run(LOSS, step=step, strategy="pjrt", saving=saving)


def expected(define: str) -> list[float]:
    """Return the means of the batches in this process, without nbdist."""
    namespace: dict[str, Any] = {}
    exec(RECORDS + define, namespace)
    return [float(np.mean(batch)) for batch in namespace["stream"]]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "map" else pytest.mark.full) for kind in GRAIN],
)  # tests/worker/data/test_grain_rows.py covers all kinds
def test_grain_reads_the_rows_of_each_worker(
    cluster: nbdist.Cluster, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("records.read.clear()\n" + GRAIN[kind], strategy="pjrt")
    found = run(cluster)
    np.testing.assert_allclose(found.loss, expected(GRAIN[kind]), rtol=1e-6)
    assert ROW.search(capsys.readouterr().out)
    # Besides its half, a worker reads the first sample, and the first batch once: for the layout of
    # the step and for the comparison with the other workers.
    read = cluster.run("len(records.read)", strategy="pjrt").results
    assert [*read.values()] == [str(ROWS // 2 + 1 + BATCH)] * 2


GENERATED = """
made = []
def batches():
    for number in range(4):
        made.append(number)
        yield np.full(BATCH, number, np.float32)
stream = batches()
"""


def test_generator_is_read_once_and_in_order(cluster: nbdist.Cluster) -> None:
    cluster.run(GENERATED.replace("BATCH", str(BATCH)), strategy="pjrt")
    assert run(cluster).loss.tolist() == [0, 1, 2, 3]
    assert clusters.evaluate(cluster, "made") == "[0, 1, 2, 3]"


def test_plan_takes_no_batch_from_an_iterator(cluster: nbdist.Cluster) -> None:
    cluster.run(GENERATED.replace("BATCH", str(BATCH)), strategy="pjrt")
    with pytest.raises(nbdist.CellError, match="a plan would take its first batch"):
        run(cluster, planning=Planning(only=True))
    assert run(cluster).loss.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [pytest.param("map", marks=pytest.mark.full), "loader"])
def test_resumed_run_continues_at_its_sample(
    cluster: nbdist.Cluster, kind: str, tmp_path: Path
) -> None:
    """The checkpoint is in the second of three epochs. Batches before it are not read again."""
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=1)
    losses = {}
    for resume, steps in ((False, 0), (False, 14), (True, 18)):
        cluster.run(RECORDS + GRAIN[kind], strategy="pjrt")
        kept = structs.replace(saving, resume=resume) if steps else None
        losses[steps] = run(cluster, epochs=3, steps=steps, saving=kept).loss
    assert len(set(losses[0][:10].tolist())) == 10
    np.testing.assert_array_equal(losses[14], losses[0][:14])
    np.testing.assert_array_equal(losses[18], losses[0][14:18])
    assert clusters.evaluate(cluster, "int(steps)") == "18"
    read = cluster.run("len(records.read)", strategy="pjrt").results
    assert [*read.values()] == [str(6 * BATCH // 2 + 1 + BATCH)] * 2


@pytest.mark.parametrize("strategy", ["pjrt", pytest.param("mirrored", marks=pytest.mark.full)])
def test_stored_arrays_are_read_by_rows(
    cluster: nbdist.Cluster, tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    zarr.save_array(tmp_path / "train.zarr", rows)
    cluster.run(
        "import tensorflow as tf, zarr\n"
        f"stream = {{'x': zarr.open({str(tmp_path / 'train.zarr')!r}, mode='r')}}",
        strategy=strategy,
    )
    mean = {"pjrt": "jnp.mean", "mirrored": "tf.reduce_mean"}[strategy]
    options = StepOptions(data="stream", batch=BATCH)
    found = cluster.run(f"loss = {mean}(batch['x'])", step=options, strategy=strategy)
    np.testing.assert_allclose(found.loss, rows.reshape(-1, BATCH * 3).mean(axis=1), atol=1e-6)
    assert ROW.search(capsys.readouterr().out)


@pytest.mark.parametrize("order", ["exact", "source"])
def test_tar_files_are_read_in_the_chosen_order(
    cluster: nbdist.Cluster, tmp_path: Path, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By source, the means of batches differ, and that of the epoch does not."""
    rows = np.arange(ROWS, dtype=np.float32)
    for number, part in enumerate(np.split(rows, 4)):
        with webdataset.TarWriter(str(tmp_path / f"{number}.tar")) as writer:
            for row in part:
                writer.write({"__key__": f"{int(row):03}", "npy": row[None]})
    cluster.run(
        "import webdataset\n"
        f"files = [{str(tmp_path)!r} + f'/{{n}}.tar' for n in range(4)]\n"
        "stream = webdataset.WebDataset(files, shardshuffle=False).decode().to_tuple('npy')",
        strategy="pjrt",
    )
    options = StepOptions(data="stream", batch=BATCH, order=order)  # type: ignore[arg-type]
    loss = cluster.run("loss = jnp.mean(batch[0])", step=options, strategy="pjrt").loss
    in_order = rows.reshape(-1, BATCH).mean(axis=1)
    assert np.array_equal(loss, in_order) == (order == "exact")
    np.testing.assert_allclose(np.mean(loss), rows.mean())
    text = "by source: each worker reads shards of its own"
    assert (text in capsys.readouterr().out) == (order == "source")
