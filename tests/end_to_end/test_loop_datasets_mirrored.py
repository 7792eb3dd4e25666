"""Samples of a `tf.data.Dataset` that each worker maps in training loops of TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import CellError
from nbdist.records import Saving
from tests import clusters
from tests.end_to_end.test_loop_datasets import COUNTED, OWN
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

ROWS, BATCH, EPOCHS = 165, 8, 2
FULL, LAST = divmod(ROWS, BATCH)
TRIALS = 7
"""Batches 1, 2, 3, 5, 9, 17 and 33, which each worker also computes as a whole."""


SETUP = f"""
import numpy as np, tensorflow as tf
{COUNTED}numbers = tf.data.Dataset.range({ROWS})
stream = numbers.shuffle(20, seed=1).map(decoded).batch({BATCH})
w = tf.Variable(tf.zeros((3, 1)))
losses, seen = [], []
@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.squeeze(x @ w, 1) - y) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss
"""
LOOP = f"""
for epoch in range({EPOCHS}):
    for x, y in stream:
        loss = train_step(x, y)
        losses.append(float(loss))
"""
LOOPS = {
    "tensors": LOOP,
    "numbered arrays": LOOP.replace(
        "x, y in stream", "i, (x, y) in enumerate(stream.as_numpy_iterator())"
    )
    + "        seen.append(i + len(x))\n",
    "read after the loop": LOOP + "seen += [float(tf.reduce_sum(x)), x.shape.as_list()[0]]\n",
}
STEPS = {
    "a square of a mean": LOOP.replace(
        "        loss = train_step(x, y)",
        "        with tf.GradientTape() as tape:\n"
        "            loss = tf.reduce_mean(tf.squeeze(x @ w, 1) - y) ** 2\n"
        "        w.assign_sub(0.1 * tape.gradient(loss, w))",
    ),
    "a mean of a mask": LOOP.replace(
        "        loss = train_step(x, y)",
        "        with tf.GradientTape() as tape:\n"
        "            mask = tf.cast(y > 0.3, tf.float32)\n"
        "            all_losses = (tf.squeeze(x @ w, 1) - y) ** 2\n"
        "            loss = tf.reduce_sum(mask * all_losses) / (1 + tf.reduce_sum(mask))\n"
        "        w.assign_sub(0.1 * tape.gradient(loss, w))",
    ),
    "not compiled": LOOP.replace(
        "        loss = train_step(x, y)",
        "        with tf.GradientTape() as tape:\n"
        "            values = (tf.squeeze(x @ w, 1) - np.array(y)) ** 2\n"
        "            loss = tf.reduce_mean(values)\n"
        "            kept = float(np.array(loss))\n"
        "        w.assign_sub(0.1 * tape.gradient(loss, w))",
    ),
    "all rows": LOOP + "        seen.append(float(tf.reduce_sum(y)))\n",
}
"""Loops whose steps need whole batches."""

RESULT = "\nresult = [w.numpy().tolist(), losses, seen, sorted(calls)]\n"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        yield running


def run(cluster: nbdist.Cluster, *cells: str) -> list[Any]:
    """Run cells after the setup, and return the weights, losses, other values and calls by rank."""
    for cell in (SETUP, *cells, RESULT):
        cluster.run(cell)
    return [objects["result"] for objects in cluster.pull(["result"]).values()]


def alone(*cells: str) -> Any:
    """Return the same values of a process without nbdist."""
    program = "\n".join((SETUP, *cells, RESULT, "outcome = result"))
    return plainly({"only": program}, "tensorflow", "keras")["only"]


def check(found: list[Any], expected: Any) -> None:
    """Compare the numbers of each rank with those of one process."""
    for values in found:
        for one, other in zip(values[:3], expected[:3], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOOPS)
def test_a_worker_maps_its_own_samples(
    cluster: nbdist.Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, expected = run(cluster, LOOPS[name]), alone(LOOPS[name])
    check(found, expected)
    assert f"samples a batch, {BATCH // len(found)} on each, {OWN}" in capsys.readouterr().out
    own = EPOCHS * (FULL * BATCH // len(found) + LAST) + TRIALS * BATCH
    assert {len(values[3]) for values in found} == {own}
    assert own < len(expected[3])


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_need_whole_batches(
    cluster: nbdist.Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first pass, workers also map their own rows. The next one maps each sample once."""
    found, expected = run(cluster, STEPS[name]), alone(STEPS[name])
    check(found, expected)
    assert all(len(values[3]) <= 1.5 * len(expected[3]) for values in found)
    assert OWN not in capsys.readouterr().out


GRAIN = f"""
import grain
class Records:
    def __len__(self):
        return {ROWS}
    def __getitem__(self, number):
        calls.append(int(number))
        x = np.cos(np.arange(3) + number).astype(np.float32)
        return x, x.sum()
stream = grain.MapDataset.source(Records()).seed(0).shuffle().batch({BATCH})
"""


def test_a_worker_reads_its_own_records(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = GRAIN, LOOP.replace("train_step(x, y)", "train_step(x / np.float32(1), y)")
    found, expected = run(cluster, *cells), alone(*cells)
    check(found, expected)
    assert "by row: each worker reads its own rows only" in capsys.readouterr().out
    assert all(len(values[3]) < 0.85 * len(expected[3]) for values in found)


HUGGING_FACE = f"""
import datasets
numbers = np.arange({ROWS})[:, None]
x = np.cos(np.arange(3) + numbers).astype(np.float32)
table = datasets.Dataset.from_dict({{"x": x, "y": x.sum(1)}}).shuffle(seed=3)
"""
"""Shuffled rows of a data set of Hugging Face."""

TABLES = {
    "arrays": "table.with_format('numpy', dtype=np.float32)",
    "tensors": "table.with_format('tf')",
}


@pytest.mark.parametrize("form", TABLES)
def test_rows_of_hugging_face(
    cluster: nbdist.Cluster, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker reads its own rows of arrays, and all rows of tensors."""
    loop = LOOP.replace("for x, y in stream:", f"for batch in stream.iter(batch_size={BATCH}):")
    loop = loop.replace("train_step(x, y)", "train_step(batch['x'], batch['y'])")
    cells = f"{HUGGING_FACE}stream = {TABLES[form]}", loop
    check(run(cluster, *cells), alone(*cells))
    own = "by row: each worker reads its own rows only"
    assert (own in capsys.readouterr().out) is (form == "arrays")


def test_resumed_loop(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = alone(LOOP)
    cluster.run(SETUP)
    stopped = LOOP + "        if len(losses) == 25: raise RuntimeError('stopped')\n"
    with pytest.raises(CellError, match="stopped"):
        cluster.run(stopped, saving=Saving(str(tmp_path), every_steps=9))
    cluster.run(SETUP)
    cluster.run(LOOP, saving=Saving(str(tmp_path), every_steps=9, resume=True))
    cluster.run(RESULT)
    for objects in cluster.pull(["result"]).values():
        np.testing.assert_allclose(objects["result"][0], expected[0], rtol=1e-5)
    assert OWN in capsys.readouterr().out
