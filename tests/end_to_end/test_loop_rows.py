"""Rows that each worker reads of the batches in training loops of JAX."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import CellError
from nbdist.records import Saving
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

ROWS, BATCH, EPOCHS = 45, 8, 2
FULL, LAST = divmod(ROWS, BATCH)

SETUP = f"""
import datasets, grain, jax, jax.numpy as jnp, numpy as np
class Records:
    def __init__(self):
        self.read = []
    def __len__(self):
        return {ROWS}
    def __getitem__(self, number):
        self.read.append(int(number))
        x = np.cos(np.arange(3) + number).astype(np.float32)
        return {{"x": x, "y": x.sum()}}
class Noise(grain.transforms.RandomMap):
    def random_map(self, sample, rng):
        return {{**sample, "x": sample["x"] + 0.1 * rng.normal(size=3).astype(np.float32)}}
class Drawn(Records):
    def __getitem__(self, number):
        sample = super().__getitem__(number)
        return {{**sample, "x": sample["x"] + np.float32(np.random.normal())}}
class RarelyDrawn(Records):
    def __getitem__(self, number):
        sample = super().__getitem__(number)
        if number == 17:
            sample["x"] = sample["x"] + np.float32(np.random.normal())
        return sample
def in_batches(samples):
    return samples.batch({BATCH})
def shuffled(records):
    return grain.MapDataset.source(records).seed(5).shuffle().random_map(Noise())
def loaded(records, **options):
    sampler = grain.samplers.IndexSampler({ROWS}, shuffle=True, seed=1, num_epochs=1)
    operations = [Noise(), grain.transforms.Batch({BATCH})]
    return grain.DataLoader(
        data_source=records, sampler=sampler, operations=operations, **options
    )
decoded = []
def table():
    rows = [Records()[number] for number in range({ROWS})]
    columns = {{name: [row[name] for row in rows] for name in rows[0]}}
    found = datasets.Dataset.from_dict(columns).shuffle(seed=3)
    return found.with_format("numpy", dtype=np.float32)

def loss_of(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

@jax.jit
def train_step(w, batch):
    loss, gradient = jax.value_and_grad(loss_of)(w, batch)
    return w - 0.1 * gradient, loss

def centered(values):
    return values - values.mean()

spread = np.float32(0.5)
def scaled(values, offset=0.0):
    "Scale values, as tutorials do."
    values = values.astype(np.float32)
    values -= offset
    return jnp.asarray(values) / spread

def prepared(batch):
    x, y = batch["x"], batch["y"]
    return {{"x": scaled(x), "y": jnp.where(y > 0, y, 0.5 * y)}}

records, offset, key = Records(), np.float32([[0.0]] * 3), jax.random.key(0)
w, losses, seen = jnp.zeros(3), [], []
"""
LOOP = f"""
for epoch in range({EPOCHS}):
    for batch in stream:
        w, loss = train_step(w, batch)
        losses.append(float(loss))
"""
STREAMS = {
    "data set": "stream = in_batches(shuffled(records))",
    "iterator": "stream = in_batches(shuffled(records)).to_iter_dataset()",
    "loader": "stream = loaded(records)",
}
LOOPS = {
    "numbered batches and their sizes": f"""
total = 0
for epoch in range({EPOCHS}):
    for number, batch in enumerate(stream):
        w, loss = train_step(w, batch)
        total += number * batch["x"].shape[0] + len(batch["y"])
        losses.append(float(loss))
""",
    "parts of a batch in a function": f"""
def train(w, stream):
    for epoch in range({EPOCHS}):
        for batch in stream:
            x, y = batch["x"], batch["y"]
            w, loss = train_step(w, {{"x": x, "y": y}})
            losses.append(float(loss))
    return w, np.sum(x), np.sum(batch["y"])
w, *total = train(w, stream)
""",
}
"""Loops that use batches besides their step, and assign `total`."""

CONVERSIONS = {
    "in the call": """w, loss = train_step(
            w, {"x": jnp.asarray(batch["x"]), "y": jnp.array(batch["y"])}
        )""",
    "before the call": """x = jnp.asarray(batch["x"])
        y = np.asarray(batch["y"]).astype(np.float32)
        w, loss = train_step(w, {"x": x, "y": y})""",
    "scaled and flat": """x, y = batch["x"], batch["y"]
        x = x[..., None] / 2.0 - offset
        x, y = jnp.array(2 * x), jnp.array(y, dtype=jnp.float32)
        w, loss = train_step(w, {"x": x.reshape(x.shape[0], -1), "y": y})""",
    "flat in the call": """x, y = batch["x"][:, None].astype(np.float32), batch["y"]
        w, loss = train_step(w, {"x": x.reshape(len(x), -1), "y": y})""",
    "on the device": """batch = jax.device_put(batch)
        w, loss = train_step(w, batch)""",
    "as a tree": """key, own = jax.random.split(key)
        batch = jax.tree.map(jnp.asarray, batch)
        w, loss = train_step(w, batch)""",
    "as a tree by a lambda": """batch = jax.tree.map(lambda part: jnp.asarray(part) / 1.0, batch)
        w, loss = train_step(w, batch)""",
    "in a dict comprehension": """batch = {name: jnp.array(v) for name, v in batch.items()}
        w, loss = train_step(w, batch)""",
    "by `map`": """x, y = map(jnp.asarray, (batch["x"], batch["y"]))
        w, loss = train_step(w, {"x": x, "y": y})""",
    "in place": """x, y = batch["x"], batch["y"]
        x /= 2
        w, loss = train_step(w, {"x": x, "y": y})""",
    "by a comparison": """mask = (batch["x"] > 0) & (batch["x"] != 1)
        w, loss = train_step(w, {"x": jnp.asarray(mask), "y": batch["y"]})""",
    "by an own function": """x, y = scaled(batch["x"], offset=0.25), batch["y"]
        w, loss = train_step(w, {"x": x, "y": y})""",
    "by a compiled function": """batch = prepared(batch)
        w, loss = train_step(w, batch)""",
    "as a tree by an own function": """batch = jax.tree.map(scaled, batch)
        w, loss = train_step(w, batch)""",
}
"""Statements of a loop that convert a batch for its step."""

WHOLE = {
    "read by another statement": LOOP + "        seen.append(float(np.sum(batch['y'])))\n",
    "read by a function": "def look():\n    seen.append(float(np.sum(batch['y'])))\n"
    + LOOP
    + "        look()\ndel look\n",
    "read in a cell text": LOOP + "        seen.append(float(np.sum(eval('batch')['y'])))\n",
    "number of all rows": LOOP.replace(
        "        w, loss",
        "        seen.append(float(jnp.asarray(batch['y']).mean()))\n        w, loss",
    ),
    "converted by a function of the user": LOOP.replace(
        "        w, loss", "        batch = jax.tree.map(centered, batch)\n        w, loss"
    ),
    "changed": LOOP.replace(
        "        w, loss", "        batch['y'] = batch['y'] + 1\n        w, loss"
    ),
}
"""Loops whose batches each worker reads as a whole."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        yield running


def loop_with(code: str) -> str:
    """Return the loop with other statements in place of the call of its step."""
    return LOOP.replace("w, loss = train_step(w, batch)", code)


def run(cluster: nbdist.Cluster, *cells: str) -> list[dict[str, Any]]:
    """Run cells after the setup, and return the values of each rank."""
    cluster.run(SETUP, strategy="pjrt")
    for cell in cells:
        cluster.run(cell, strategy="pjrt")
    cluster.run("reads, w = len(records.read), np.asarray(w)", strategy="pjrt")
    return [*cluster.pull(["w", "losses", "seen", "reads"]).values()]


def alone(*cells: str) -> dict[str, Any]:
    """Return the values of this process, without nbdist."""
    namespace: dict[str, Any] = {}
    for cell in (SETUP, *cells):
        exec(cell, namespace)
    return namespace


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare the numbers of each rank with those of one process."""
    for values in found:
        for name in ("losses", "w", "seen"):
            np.testing.assert_allclose(values[name], expected[name], rtol=1e-5, atol=1e-7)


def own_reads(ranks: int, epochs: int = EPOCHS) -> int:
    """Return the number of samples that a rank reads: its rows, and the last batch of an epoch.

    Batches that do not divide over the ranks are read as a whole. Each rank also reads the first
    sample, in each epoch and three times on trial, and the first batch.
    """
    last = LAST // ranks if LAST % ranks == 0 else LAST
    return epochs * (FULL * BATCH // ranks + last + 1) + 3 + BATCH


@pytest.mark.parametrize("kind", STREAMS)
def test_batches_are_read_by_row(
    cluster: nbdist.Cluster, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(cluster, STREAMS[kind], LOOP)
    assert re.search(
        r"8 samples a batch.*, by row: each worker reads its own rows only", capsys.readouterr().out
    )
    check(found, alone(STREAMS[kind], LOOP))
    assert {values["reads"] for values in found} == {own_reads(len(found))}


@pytest.mark.parametrize("loop", LOOPS)
def test_sizes_and_parts_of_batches(cluster: nbdist.Cluster, loop: str) -> None:
    """Statements besides the step read sizes only. After the loop, names have all rows."""
    cells = STREAMS["data set"], LOOPS[loop], "seen.append(float(np.sum(total)))"
    found = run(cluster, *cells)
    check(found, alone(*cells))
    assert {values["reads"] for values in found} == {own_reads(len(found))}


def test_batch_in_a_later_cell(cluster: nbdist.Cluster) -> None:
    """A name of the last batch, of which a rank has read its own rows, is an array of all rows."""
    loop = LOOP + f"        if len(losses) == {EPOCHS * (FULL + 1) - 1}: break\n"
    cells = STREAMS["data set"], loop, "seen += [float(batch['y'].sum()), batch['x'].ravel()[-1]]"
    found = run(cluster, *cells)
    check(found, alone(*cells))
    last = LAST // len(found) if LAST % len(found) == 0 else LAST
    assert {values["reads"] for values in found} <= {
        own_reads(len(found)) + BATCH - skipped for skipped in range(last + 1)
    }  # grain reads ahead of the last batch


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_conversions_of_batches(
    cluster: nbdist.Cluster, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversions compute a rank's rows. After the loop, names contain all rows, and types."""
    loop = loop_with(CONVERSIONS[kind])
    later = "seen += [float(np.sum(batch['x'])), isinstance(batch['x'], jax.Array)]"
    cells = STREAMS["data set"], loop, later
    found = run(cluster, *cells)
    check(found, alone(*cells))
    assert "by row: each worker reads its own rows only" in capsys.readouterr().out
    assert {values["reads"] for values in found} == {own_reads(len(found))}


def test_conversion_that_needs_all_rows(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion whose form suggests rows, and whose operand has rows of its own."""
    cell = LOOP.replace(
        "        w, loss",
        "        x = batch['x'] + 0.1 * np.arange(len(batch['x']))[:, None]\n        w, loss",
    ).replace("(w, batch)", "(w, {'x': jnp.asarray(x, np.float32), 'y': batch['y']})")
    check(run(cluster, STREAMS["data set"], cell), alone(STREAMS["data set"], cell))
    assert "own rows" not in capsys.readouterr().out


def test_type_that_gives_way(cluster: nbdist.Cluster) -> None:
    """`x / 2.0` of integers in JAX takes the type of the parameters."""
    cell = """
kinds = []
def weak_loss(w, x):
    kinds.append(str((x * w).dtype))
    return jnp.sum(x * w)
@jax.jit
def weak_step(w, x):
    loss, gradient = jax.value_and_grad(weak_loss)(w, x)
    return w - gradient, loss
w = jnp.ones(3, jnp.bfloat16)
for batch in stream:
    x = jnp.asarray(batch["x"]).astype(np.uint8) / 2.0
    w, loss = weak_step(w, x)
    losses.append(float(loss))
w, seen = jnp.zeros(3), [{*kinds} == {"bfloat16"}]
"""
    cells = STREAMS["data set"], cell
    found = run(cluster, *cells)
    check(found, alone(*cells))


@pytest.mark.parametrize("loop", WHOLE)
def test_batches_that_others_read_are_whole(cluster: nbdist.Cluster, loop: str) -> None:
    found = run(cluster, STREAMS["data set"], WHOLE[loop])
    check(found, alone(STREAMS["data set"], WHOLE[loop]))
    assert {values["reads"] for values in found} == {EPOCHS * ROWS}


def test_samples_that_draw_global_random_numbers_are_whole(cluster: nbdist.Cluster) -> None:
    """Each rank draws all numbers: the generators remain equal on all ranks."""
    cell = (
        "records = Drawn()\nnp.random.seed(0)\nstream = in_batches(shuffled(records))"
        ".to_iter_dataset(grain.ReadOptions(num_threads=1))"
    )
    found = run(cluster, cell, LOOP, "seen.append(np.random.rand())")
    assert {values["reads"] for values in found} == {EPOCHS * ROWS + 1}
    check(found, alone(cell, LOOP, "seen.append(np.random.rand())"))


def test_samples_that_rarely_draw_end_the_cell(cluster: nbdist.Cluster) -> None:
    cell = "records = RarelyDrawn()\nstream = in_batches(grain.MapDataset.source(records))"
    cluster.run(SETUP + cell, strategy="pjrt")
    with pytest.raises(CellError, match=r"line 2: reading a batch drew random numbers.*--no-lift"):
        cluster.run(LOOP, strategy="pjrt")


@pytest.mark.parametrize("last", ["", ", drop_last_batch=True"])
def test_iterator_of_hugging_face(
    cluster: nbdist.Cluster, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = LOOP.replace("in stream", f"in stream.iter(batch_size={BATCH}{last})")
    cells = "stream = table()", loop, "seen.append(float(batch['y'].sum()))"
    check(run(cluster, *cells), alone(*cells))
    assert "each worker reads its own rows" in capsys.readouterr().out


RESUMED = {
    "plain": LOOP,
    "converted": loop_with(CONVERSIONS["scaled and flat"]),
    "converted as a tree": loop_with(CONVERSIONS["as a tree"]),
}


@pytest.mark.parametrize("loop", RESUMED.values(), ids=RESUMED)
def test_resumed_loop_reads_its_own_rows(
    cluster: nbdist.Cluster, tmp_path: Path, loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run continues at the same batch, with the numbers of a run without a failure."""
    expected = alone(STREAMS["data set"], loop)
    cluster.run(SETUP + STREAMS["data set"], strategy="pjrt")
    stopped = loop + "        if len(losses) == 7: raise RuntimeError('stopped')\n"
    with pytest.raises(CellError, match="stopped"):
        cluster.run(stopped, strategy="pjrt", saving=Saving(str(tmp_path), every_steps=3))
    cluster.run("losses = []", strategy="pjrt")
    cluster.run(loop, strategy="pjrt", saving=Saving(str(tmp_path), every_steps=3, resume=True))
    for values in cluster.pull(["w", "losses"]).values():
        np.testing.assert_allclose(values["w"], expected["w"], rtol=1e-5)
        np.testing.assert_allclose(values["losses"], expected["losses"], rtol=1e-5)
    shown = capsys.readouterr()
    assert "by row" in shown.out
    assert "lack" not in shown.out + shown.err
