"""Values of `--data`: files, distributed datasets, frames and sequences."""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs

import nbdist
from nbdist.records import Saving, StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet

STRATEGIES = ("mirrored", "pjrt")
ONLY_PJRT = pytest.mark.parametrize(
    "strategy", [pytest.param("mirrored", marks=pytest.mark.full), "pjrt"]
)
"""Parametrize a test with both strategies. `make test` runs it under pjrt only."""

SUM = {"mirrored": "tf.reduce_sum", "pjrt": "jnp.sum"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Cluster]:
    """Cluster of two workers, and three files of 5, 6 and 30 distinct numbers."""
    folder = tmp_path_factory.mktemp("files")
    with clusters.cluster(hosts=2) as running:
        running.run(FILES.format(folder=str(folder)))
        yield running


FILES = """
import jax.numpy as jnp, numpy as np, tensorflow as tf
files = ["{folder}/" + str(i) for i in range(3)]
if rank == 0:
    for i, (path, count) in enumerate(zip(files, (5, 6, 30))):
        with tf.io.TFRecordWriter(path) as writer:
            for j in range(count):
                writer.write(np.float32(1 + 100 * i + j).tobytes())

def read(paths):
    records = tf.data.TFRecordDataset(paths)
    return records.map(lambda r: tf.reshape(tf.io.decode_raw(r, tf.float32), []))
"""
NUMBERS = [*range(1, 6), *range(101, 107), *range(201, 231)]


def alternating(defined: dict[str, str]) -> list[ParameterSet]:
    """Return all pairs of a strategy and a definition. `make test` runs each definition once."""
    return [
        pytest.param(
            *(strategy, define),
            marks=() if STRATEGIES[(number + 1) % 2] == strategy else pytest.mark.full,
            id=f"{strategy}-{name}",
        )
        for number, (name, define) in enumerate(defined.items())
        for strategy in STRATEGIES
    ]


def step(cluster: nbdist.Cluster, cell: str, strategy: str, **options: Any) -> nbdist.Run:
    chosen = StepOptions(**{"data": "stream", **options})
    return cluster.run(cell, step=chosen, strategy=strategy)


@ONLY_PJRT  # sharding by file does not depend on the strategy
@pytest.mark.parametrize(
    ("define", "batch"),
    [
        pytest.param("read(files)", 8, id="records"),
        pytest.param(
            "tf.data.Dataset.from_tensor_slices(files).interleave(read, cycle_length=3)",
            8,
            id="interleaved",
            marks=pytest.mark.full,
        ),
        pytest.param("read(files).batch(4)", 0, id="batched", marks=pytest.mark.full),
    ],
)
def test_sharded_files_give_every_sample_once(
    cluster: nbdist.Cluster,
    strategy: str,
    define: str,
    batch: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The files are uneven: one worker reads 35 numbers and the other 6."""
    cluster.run(f"stream = {define}")
    share = {
        "mirrored": "tf.reduce_mean(tf.cast(batch == n, tf.float32))",
        "pjrt": "jnp.mean(batch == n)",
    }[strategy]
    cell = f"{{f'of {{n}}': {share} for n in {NUMBERS}}}"
    run = step(cluster, cell, strategy, batch=batch, epochs=2)
    assert "by file: each worker reads files of its own" in capsys.readouterr().out
    for epoch in (1, 2):
        ranks = [{**m.own, **m.shared} for m in run.metrics if m.step < 0 and m.epoch == epoch]
        shares = [[values[f"of {n}"] for n in NUMBERS] for values in ranks]
        np.testing.assert_allclose(np.mean(shares, axis=0), 1 / len(NUMBERS), rtol=1e-5)


@ONLY_PJRT
def test_fewer_files_than_workers_are_sharded_by_element(
    cluster: nbdist.Cluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("stream = read(files[2:])")
    mean = "tf.reduce_mean" if strategy == "mirrored" else "jnp.mean"
    run = step(cluster, f"loss = {mean}(batch)", strategy, batch=8)
    shown = capsys.readouterr()
    assert shown.out.count("there are fewer files than workers") == 1
    assert "FILE based sharding" not in shown.err
    np.testing.assert_allclose(run.loss, [204.5, 212.5, 220.5, 227.5])


@pytest.mark.parametrize(
    "define",
    [
        pytest.param(
            "tf.data.Dataset.range(64).map(lambda i: tf.cast(i, tf.float32)).batch(32)",
            id="in memory",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "tf.data.Dataset.zip((read(files), tf.data.Dataset.range(64))).map(lambda x, i: x)"
            ".batch(32)",
            id="partly in memory",
        ),
    ],
)
def test_sharding_by_element_logs_no_library_warnings(
    cluster: nbdist.Cluster, define: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(f"stream = {define}")
    capsys.readouterr()
    step(cluster, "loss = jnp.mean(batch)", "pjrt")
    shown = capsys.readouterr()
    assert "by element" in shown.out
    assert "tf_auto_shard" not in shown.out + shown.err
    assert "rendezvous" not in shown.err
    assert len((shown.out + shown.err).splitlines()) < 20


def test_files_are_read_in_the_order_of_one_device_on_request(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("stream = read(files)")
    run = step(cluster, "loss = jnp.mean(batch)", "pjrt", batch=10, order="exact")
    np.testing.assert_allclose(run.loss[0], np.mean(NUMBERS[:10]))
    shown = capsys.readouterr().out
    assert "data by element: each worker maps its own samples only" in shown


def test_sharding_by_element_on_request(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(
        "options = tf.data.Options()\n"
        "options.experimental_distribute.auto_shard_policy = "
        "tf.data.experimental.AutoShardPolicy.DATA\n"
        "stream = read(files).with_options(options)"
    )
    run = step(cluster, "loss = jnp.mean(batch)", "pjrt", batch=10)
    np.testing.assert_allclose(run.loss[0], np.mean(NUMBERS[:10]))
    assert "data by element" in capsys.readouterr().out


COMPARED = 4
"""Samples of the first batch of a pass that each rank maps to compare them."""

COUNTED = """
calls = []

def counted(x):
    calls.append(1)
    return x

def noted(x, y):  # TensorFlow knows of no effect
    return tf.reshape(tf.numpy_function(counted, [x], tf.float32, stateful=False), [2]) * 2.0, y

x = np.arange(38, dtype="float32").reshape(19, 2)
samples = tf.data.Dataset.from_tensor_slices((x, np.arange(19.0)))
stream = samples.map(noted).shuffle(19, seed=3).batch(8).prefetch(2)
"""


@ONLY_PJRT
@pytest.mark.parametrize("prefetch", [0, pytest.param(2, marks=pytest.mark.full)])
def test_each_worker_maps_its_own_samples(
    cluster: nbdist.Cluster, strategy: str, prefetch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches of 8, 8 and 3 rows: the last one does not divide over two replicas."""
    cell = f"loss = {SUM[strategy]}(batch[0][:, 0] * batch[1])"
    if strategy == "mirrored":
        cell = "loss = tf.reduce_mean(batch[0][:, 0] * tf.cast(batch[1], tf.float32))"
    losses = []
    for seen in ("noted", "lambda x, y: (x * 2.0 + 0 * tf.random.uniform([2]), y)"):
        cluster.run(COUNTED.replace("map(noted)", f"map({seen})"), strategy=strategy)
        run = step(cluster, cell, strategy, epochs=2, prefetch=prefetch)
        losses.append(run.loss)
    shown = capsys.readouterr().out
    assert "data by element: each worker maps its own samples only" in shown
    assert "each worker maps all samples, because a map function has a state" in shown
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    cluster.run(COUNTED, strategy=strategy)
    step(cluster, cell, strategy, epochs=2, check=strategy == "pjrt")
    counts = cluster.pull(["calls"]).values()
    assert [len(objects["calls"]) for objects in counts] == [2 * (4 + 4 + 3 + COMPARED)] * 2


OWN_FOLDERS = """
import os, tempfile
folder = tempfile.mkdtemp()  # another one on each rank
for n in range(16):
    with open(os.path.join(folder, f"{n:02}"), "w") as file:
        file.write(str(n))

def parsed(path):
    return tf.strings.to_number(tf.io.read_file(path)) + tf.zeros([2])

paths = tf.data.Dataset.list_files(folder + "/*", shuffle=False)
stream = paths.map(parsed, 2).batch(8)
"""


@pytest.mark.parametrize("strategy", ["mirrored", pytest.param("pjrt", marks=pytest.mark.full)])
def test_own_samples_may_come_from_a_folder_of_each_rank(
    cluster: nbdist.Cluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mean = "tf.reduce_mean" if strategy == "mirrored" else "jnp.mean"
    cluster.run(OWN_FOLDERS, strategy=strategy)
    run = step(cluster, f"loss = {mean}(batch)", strategy)
    assert "each worker maps its own samples only" in capsys.readouterr().out
    np.testing.assert_allclose(run.loss, [3.5, 11.5])
    cluster.run(OWN_FOLDERS.replace("str(n)", "str(n + rank)"), strategy=strategy)
    with pytest.raises(nbdist.CellError, match="begins with different samples on each rank"):
        step(cluster, f"loss = {mean}(batch)", strategy)


def test_own_samples_of_different_data_are_refused(cluster: nbdist.Cluster) -> None:
    cluster.run(COUNTED + "stream = samples.skip(rank).take(8).map(noted).batch(8)")
    with pytest.raises(nbdist.CellError, match="begins with different samples on each rank"):
        step(cluster, "loss = jnp.sum(batch[0])", "pjrt")
    cluster.run(COUNTED + "stream = samples.map(lambda x, y: (x + rank, y)).batch(8)")
    with pytest.raises(nbdist.CellError, match="begins with different samples on each rank"):
        step(cluster, "loss = jnp.sum(batch[0])", "pjrt")


def test_resumed_run_continues_at_its_sample(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """The checkpoint is in the second of three epochs. The data set is shuffled in each."""
    cell, losses = "loss = jnp.sum(batch[0][:, 0] * batch[1])\nsteps = steps + 1", {}
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=1)
    for resume, steps in ((False, 0), (False, 5), (True, 9)):
        cluster.run(COUNTED + "steps = jnp.zeros(())", strategy="pjrt")
        kept = structs.replace(saving, resume=resume) if steps else None
        options = StepOptions(data="stream", epochs=3, steps=steps)
        losses[steps] = cluster.run(cell, step=options, strategy="pjrt", saving=kept).loss
    assert len(set(losses[0][:9].tolist())) == 9
    np.testing.assert_array_equal(losses[5], losses[0][:5])
    np.testing.assert_array_equal(losses[9], losses[0][5:])
    assert clusters.evaluate(cluster, "int(steps)") == "9"


NUMBERED = """
import datasets
seen, steps = [], jnp.zeros(())

def noted(rows):
    seen.extend(rows["y"])
    return {"x": [np.float32(2 * y) for y in rows["y"]]}

stream = datasets.Dataset.from_dict({"y": np.arange(19.0)}).shuffle(seed=1).with_transform(noted)
"""


def test_rows_are_read_by_their_numbers(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run stops in the second of two epochs, and another one continues it."""
    datasets = pytest.importorskip("datasets")
    rows = 2 * np.array(datasets.Dataset.from_dict({"y": np.arange(19.0)}).shuffle(seed=1)["y"])
    expected = [rows[start : start + 4].mean() for start in range(0, 19, 4)] * 2
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=1)
    losses: list[float] = []
    for steps in (7, 10):
        cluster.run(NUMBERED, strategy="pjrt")
        options = StepOptions(data="stream", batch=4, epochs=2, steps=steps, prefetch=2)
        cell = "loss = jnp.mean(batch['x'])\nsteps = steps + 1"
        kept = structs.replace(saving, resume=steps == 10)
        losses += cluster.run(cell, step=options, strategy="pjrt", saving=kept).loss.tolist()
        assert "by row: each worker reads its own rows only" in capsys.readouterr().out
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    own, compared, probed = 2 + 2 + 3, 4, 2 + 1  # the last batch of three rows is not divided
    counts = [len(objects["seen"]) for objects in cluster.pull(["seen"]).values()]
    assert counts == [own + compared + probed] * 2
    run = step(cluster, "loss = jnp.mean(batch['x'])", "pjrt", batch=5)
    np.testing.assert_allclose(run.loss, [rows[n : n + 5].mean() for n in range(0, 19, 5)])
    shown = capsys.readouterr().out
    assert "each worker reads all samples, because a batch of 5 does not divide over" in shown


SINGLE = "the elements of stream are single samples: set the batch size with --batch N"


@pytest.mark.parametrize(
    ("define", "options", "message"),
    [
        ("tf.data.Dataset.range(8)", {}, SINGLE),
        *(
            pytest.param(define, {}, SINGLE, marks=pytest.mark.full)
            for define in (
                "read(files)",
                "tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones(8)))",
                "tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 2))))",
                "[1.0, 2.0, 3.0]",
                "[(np.ones(3), 1.0)] * 8",
                "lambda: ((np.ones(3), np.ones(2)) for _ in range(8))",
            )
        ),
        (
            "tf.data.Dataset.range(8).repeat()",
            {"batch": 4},
            "stream never ends: set the number of steps with --steps N",
        ),
        pytest.param(
            "read(files).repeat().batch(4)", {}, "stream never ends", marks=pytest.mark.full
        ),
        (
            "[np.ones((8, 3)), np.ones(8)]",
            {"batch": 4},
            r"stream is a list of arrays: for columns use a tuple, stream = \(a, b\)",
        ),
        (
            "tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [3]])).batch(2)",
            {"batch": 2, "bucket": (4,)},
            (
                r"the elements of stream are batches, as ragged tensors: omit --batch 2, or use "
                r"stream.unbatch\(\)"
            ),
        ),
        (
            "tf.ragged.constant([[[1], [2, 3]], [[4]]])",
            {"batch": 2, "bucket": (4,)},
            (
                r"a ragged tensor has 2 axes of different lengths: make all but one even, with its "
                r"to_tensor\(\)"
            ),
        ),
    ],
)
def test_unsuitable_data_are_refused(
    cluster: nbdist.Cluster, define: str, options: dict[str, Any], message: str
) -> None:
    cluster.run(f"stream = {define}")
    with pytest.raises(nbdist.CellError, match=message):
        step(cluster, "loss = 1.0 + 0 * jnp.sum(1.0)", "pjrt", **options)


def test_endless_data_run_for_the_number_of_steps(cluster: nbdist.Cluster) -> None:
    cluster.run("stream = tf.data.Dataset.range(8).repeat()")
    run = step(cluster, "loss = jnp.sum(batch)", "pjrt", batch=4, steps=3)
    np.testing.assert_array_equal(run.loss, [6, 22, 6])


DISTRIBUTED = {
    "mirrored": "strategy.experimental_distribute_dataset("
    "tf.data.Dataset.range(11).map(lambda i: tf.cast(i, tf.float32)).batch(4))",
    "pjrt": "strategy.experimental_distribute_dataset("
    "[np.arange(0., 4.), np.arange(4., 8.), np.arange(8., 11.)])",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_distributed_dataset_is_accepted(cluster: nbdist.Cluster, strategy: str) -> None:
    cluster.run(f"stream = {DISTRIBUTED[strategy]}", strategy=strategy)
    mean = "tf.reduce_mean" if strategy == "mirrored" else "jnp.mean"
    run = step(cluster, f"loss = {mean}(batch)", strategy, epochs=2)
    np.testing.assert_allclose(run.loss, [1.5, 5.5, 9.0] * 2)


HUGGING_FACE = (
    "import datasets\n"
    "stream = datasets.Dataset.from_dict({'x': np.arange(10.0), 'y': list(range(10))})"
)


SAMPLES = """
class Samples:
    def __len__(self):
        return 10

    def __getitem__(self, number):
        return {"x": float(number), "y": number}

stream = Samples()
"""


@pytest.mark.parametrize(
    ("strategy", "define"),
    alternating(
        {
            "pandas": (
                "import pandas as pd\nstream = pd.DataFrame({'x': np.arange(10.0), 'y': range(10)})"
            ),
            "Hugging Face": HUGGING_FACE,
            "lists": "stream = {'x': list(np.arange(10.0)), 'y': np.arange(10)}",
            "samples": SAMPLES,
        }
    ),
)
def test_columns_are_accepted(cluster: nbdist.Cluster, strategy: str, define: str) -> None:
    cluster.run(define)
    mean = "tf.reduce_mean" if strategy == "mirrored" else "jnp.mean"
    run = step(
        cluster,
        f"loss = {mean}(batch['x'] + 0 * batch['y'].astype(float))"
        if strategy == "pjrt"
        else f"loss = {mean}(batch['x'] + 0 * tf.cast(batch['y'], batch['x'].dtype))",
        strategy,
        batch=4,
    )
    np.testing.assert_allclose(run.loss, [1.5, 5.5, 8.5])


@pytest.mark.full  # another form of columns
def test_pair_of_columns_is_accepted(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "import pandas as pd, datasets\nframe = pd.DataFrame({'x': np.arange(10.0)})\n"
        "stream = frame['x'], datasets.Dataset.from_dict({'y': list(range(10))})['y']"
    )
    run = step(cluster, "x, y = batch\nloss = jnp.mean(x - y)", "pjrt", batch=4)
    np.testing.assert_allclose(run.loss, 0)


TEXTS = "texts = [np.arange(1, n + 1) for n in (3, 9, 4, 2, 7, 5, 8)]\n"


class TestBuckets:
    """`--bucket`: sequences of different lengths, padded to few lengths, with a mask."""

    @pytest.mark.parametrize(
        ("strategy", "define"),
        alternating(
            {
                "lists": "stream = texts, np.arange(7.0)",
                "ragged tensor": (
                    "stream = tf.ragged.constant([t.tolist() for t in texts]), np.arange(7.0)"
                ),
                "elements": "stream = [(t, float(i)) for i, t in enumerate(texts)]",
            }
        ),
    )
    def test_sequences_are_padded_and_masked(
        self, cluster: nbdist.Cluster, strategy: str, define: str
    ) -> None:
        cluster.run(TEXTS + define)
        cell = {
            "mirrored": "x, y = batch\nlong = tf.shape(x)[1]\n"
            "{'loss': tf.reduce_sum(tf.where(mask, x, 0)), 'length': long, "
            "'real': tf.reduce_sum(tf.cast(mask, 'int32'))}",
            "pjrt": "x, y = batch\n"
            "{'loss': jnp.where(mask, x, 0).sum(), 'length': x.shape[1], 'real': mask.sum()}",
        }[strategy]
        run = step(cluster, cell, strategy, batch=4, bucket=(4, 8, 16))
        share = 2 if strategy == "mirrored" else 1
        lengths = np.array([[3, 9, 4, 2], [7, 5, 8, 0]])
        history = {name: values.mean(axis=0) for name, values in run.history.items()}
        np.testing.assert_array_equal(history["length"], [16, 8])
        divisor = [share, 1]  # each replica gets all three rows of the second batch
        np.testing.assert_allclose(history["real"], lengths.sum(1) / divisor)
        np.testing.assert_allclose(history["loss"], (lengths * (lengths + 1) // 2).sum(1) / divisor)

    @pytest.mark.parametrize(
        ("suffix", "batch"),
        [
            pytest.param(".batch(2)", 0, id="batches", marks=pytest.mark.full),
            pytest.param("", 2, id="samples"),
        ],
    )
    def test_ragged_tensors_in_a_dataset_are_padded(
        self, cluster: nbdist.Cluster, suffix: str, batch: int
    ) -> None:
        """The middle batch has equal lengths by chance, and gets padding like the others."""
        cluster.run(
            "ragged = tf.ragged.constant([[1, 2], [3], [4, 5], [6, 7], [8, 9, 10], [11]])\n"
            f"stream = tf.data.Dataset.from_tensor_slices((ragged, tf.range(6.0))){suffix}"
        )
        cell = "x, y = batch\n{'loss': jnp.where(mask, x, 0).sum(), 'real': mask.sum()}"
        run = step(cluster, cell, "pjrt", batch=batch, bucket=(4,))
        np.testing.assert_array_equal(run.loss, [6, 22, 38])
        np.testing.assert_array_equal(run.history["real"][0], [3, 4, 4])
        with pytest.raises(nbdist.CellError, match="the samples have different lengths"):
            step(cluster, "loss = batch[1].mean()", "pjrt", batch=batch)

    def test_padded_batches_are_extended_to_a_bucket(self, cluster: nbdist.Cluster) -> None:
        cluster.run("stream = [np.ones((4, n)) for n in (3, 5, 6, 7, 9)]")
        run = step(
            cluster,
            "{'loss': jnp.sum(batch * mask), 'length': batch.shape[1]}",
            "pjrt",
            bucket=(8, 16),
        )
        np.testing.assert_array_equal(run.history["length"][0], [8, 8, 8, 8, 16])
        np.testing.assert_allclose(run.loss, [12, 20, 24, 28, 36])
        assert run.summary.compilations == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "different lengths: .* --bucket 4,8,16"),
            ({"bucket": (4, 8)}, "has length 9, and the largest bucket is 8: use --bucket 4,8,9"),
        ],
    )
    def test_sequences_without_a_fitting_bucket_are_refused(
        self, cluster: nbdist.Cluster, options: dict[str, Any], message: str
    ) -> None:
        cluster.run(TEXTS + "stream = texts, np.arange(7.0)")
        with pytest.raises(nbdist.CellError, match=message):
            step(cluster, "loss = batch[1].mean()", "pjrt", batch=4, **options)

    def test_data_without_sequences_are_refused(self, cluster: nbdist.Cluster) -> None:
        cluster.run("stream = np.arange(8.0)")
        with pytest.raises(nbdist.CellError, match="--bucket: the batch has no sequences"):
            step(cluster, "loss = batch.mean()", "pjrt", batch=4, bucket=(4,))


@ONLY_PJRT
def test_recompilations_are_reported(
    cluster: nbdist.Cluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("stream = [np.ones((4, n), 'float32') for n in (1, 2, 2, 3, 4, 5, 6)]")
    run = step(cluster, f"loss = {SUM[strategy]}(batch)", strategy)
    shown = capsys.readouterr()
    assert run.summary.compilations == 6
    assert "step 2 was recompiled for a batch of (2, 2)" in shown.out
    assert shown.err.count("compiled 5 times") == 1
    assert "--bucket 32,64,128" in shown.err


@pytest.mark.parametrize(
    ("rows", "batch", "message"),
    [
        (64, 8, "each replica has 4 samples of a batch of 8.*--batch 16 or more"),
        (66, 33, "a batch of 33 does not divide over 2 replicas.*--batch 32 or 34"),
        (1, 8, "the data have 1 samples for 2 replicas"),
    ],
)
def test_inefficient_batch_size_is_reported_once(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], rows: int, batch: int, message: str
) -> None:
    cluster.run(f"stream = np.ones({rows})")
    run = step(cluster, "loss = jnp.mean(batch)", "pjrt", batch=batch)
    err = capsys.readouterr().err
    assert len([n for n in run.notes if n.topic == "batch" and n.rank == 0]) == 1
    assert re.search(message, err)


def test_run_converts_to_arrays_frame_and_image(cluster: nbdist.Cluster) -> None:
    cluster.run("stream = np.arange(24.0, dtype='float32')")
    cell = "{'loss': tf.reduce_mean(batch), 'most': tf.reduce_max(batch)}"
    run = step(cluster, cell, "mirrored", batch=8, epochs=2)
    history = run.history
    np.testing.assert_allclose(history["loss"], [[1.5, 9.5, 17.5] * 2, [5.5, 13.5, 21.5] * 2])
    np.testing.assert_allclose(run.loss, [3.5, 11.5, 19.5] * 2)
    frame = run.to_dataframe()
    assert list(frame.columns) == ["rank", "epoch", "step", "time_s", "loss", "most"]
    assert len(frame) == 12
    assert frame.groupby("rank").loss.mean().tolist() == pytest.approx([9.5, 13.5])
    summary = run.summary
    assert (summary.ranks, summary.epochs, summary.steps, summary.batch) == (2, 2, 6, 8)
    assert summary.replicas == 2
    assert summary.last["loss"] == pytest.approx(11.5)
    assert "2 workers, epoch 2 of 2, step 6 of 6, loss 19.5 (last step)" in repr(run)
    assert "<img" in str(run._repr_mimebundle_()["text/html"])
    assert pickle.loads(pickle.dumps(run)) == run


def test_run_without_metrics_has_no_image(cluster: nbdist.Cluster) -> None:
    run = cluster.run("1 + 1")
    assert run.history == {}
    assert set(run._repr_mimebundle_()) == {"text/plain"}
    with pytest.raises(KeyError, match="'loss' was not reported; reported metrics: none"):
        _ = run.loss
