"""Samples of a `tf.data.Dataset` that each worker maps in training loops of JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import CellError
from nbdist.records import Saving
from tests import clusters
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

ROWS, BATCH, EPOCHS = 45, 8, 2
FULL, LAST = divmod(ROWS, BATCH)
OWN = "by element: each worker maps its own samples only"

COUNTED = """
calls = []
def count(number):
    calls.append(int(number))
    return number
def decoded(number):
    number = tf.numpy_function(count, [number], tf.int64, stateful=False)
    number = tf.cast(tf.reshape(number, []), tf.float32)
    x = tf.cos(tf.range(3, dtype=tf.float32) + number)
    return x, tf.reduce_sum(x)
"""
"""Map of a data set that counts its calls."""

SETUP = f"""
import jax, jax.numpy as jnp, numpy as np, tensorflow as tf
tf.random.set_seed(3)
{COUNTED}def named(x, y):
    return {{"x": x, "y": y}}
numbers = tf.data.Dataset.range({ROWS})

def loss_of(w, x, y):
    return jnp.mean((x @ w - y) ** 2)
@jax.jit
def train_step(w, x, y):
    loss, gradient = jax.value_and_grad(loss_of)(w, x, y)
    return w - 0.1 * gradient, loss
w, losses, seen = jnp.zeros(3), [], []
"""

ITERATED = f"""
for epoch in range({EPOCHS}):
    for x, y in stream.as_numpy_iterator():
        w, loss = train_step(w, x, y)
        losses.append(float(loss))
"""
TENSORS = ITERATED.replace("stream.as_numpy_iterator()", "stream")


def loop_with(code: str, loop: str = TENSORS) -> str:
    """Return a loop with other statements in place of the call of its step."""
    return loop.replace("w, loss = train_step(w, x, y)", code)


CONVERTED = loop_with("w, loss = train_step(w, jnp.asarray(x), jnp.asarray(y))")

STREAMS = {
    "in order": f"stream = numbers.map(decoded).batch({BATCH})",
    "shuffled by the global seed": f"stream = numbers.shuffle(20).map(decoded).batch({BATCH})"
    ".prefetch(tf.data.AUTOTUNE)",
    "shuffled after a parallel map": "stream = numbers.map(decoded, tf.data.AUTOTUNE).shuffle(9)"
    f".repeat(2).batch({BATCH}).take(9)",
    "cached sources": f"stream = numbers.cache().shuffle(20, 1).map(decoded).batch({BATCH})",
    "without the rest": f"stream = numbers.map(decoded).batch({BATCH}, drop_remainder=True)",
}
LOOPS = {
    "arrays": ITERATED,
    "converted tensors": CONVERTED,
    "arrays of tensors": loop_with("w, loss = train_step(w, x.numpy(), y.numpy())"),
    "numbered": ITERATED.replace("x, y in", "i, (x, y) in").replace(
        "stream.as_numpy_iterator()", "enumerate(stream.as_numpy_iterator())"
    )
    + "        seen.append(i * len(x) + y.shape[0])\n",
    "dicts": loop_with(
        "batch = jax.tree.map(lambda leaf: jnp.asarray(leaf) / 1.0, batch)\n"
        "        w, loss = train_step(w, batch['x'], batch['y'])",
        CONVERTED.replace("x, y in stream", "batch in stream.map(named)").replace(
            "jnp.asarray(x), jnp.asarray(y)", "x, y"
        ),
    ).replace("stream.map(named)", "dicts"),
    "read after the loop": CONVERTED + "seen += [float(tf.reduce_sum(x)), x.shape.as_list()[0]]\n",
}
WHOLE = {
    "a statement": CONVERTED + "        seen.append(float(np.sum(y)))\n",
    "a mean": loop_with(
        "x = jnp.asarray(x)\n        x = x - x.mean()\n        w, loss = "
        "train_step(w, x, jnp.asarray(y))"
    ),
}
"""Loops that need all rows of each batch."""

OTHERS = {
    "cached batches": f"stream = numbers.shuffle(20).map(decoded).batch({BATCH}).cache()\n"
    "for x, y in stream: pass",
    "map of batches": f"stream = numbers.map(decoded).batch({BATCH})"
    ".map(lambda x, y: (x - tf.reduce_mean(x), y))",
    "random map": f"stream = numbers.map(decoded).map(lambda x, y: (x + tf.random.normal([3]), y))"
    f".batch({BATCH})",
    "unknown shapes": "same = lambda x: x\nstream = numbers.map(decoded).map(lambda x, y: "
    f"(tf.numpy_function(same, [x], tf.float32, stateful=False), y)).batch({BATCH})",
}
"""Data sets of which each worker reads whole batches."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        yield running


RESULT = "\nresult = [np.asarray(w).tolist(), losses, seen, sorted(calls)]\n"


def run(cluster: nbdist.Cluster, *cells: str) -> list[Any]:
    """Run cells after the setup, and return the weights, losses, other values and calls by rank."""
    for cell in (SETUP, *cells, RESULT):
        cluster.run(cell, strategy="pjrt")
    return [objects["result"] for objects in cluster.pull(["result"]).values()]


def alone(*cells: str) -> Any:
    """Return the same values of a process without nbdist."""
    program = "\n".join((SETUP, *cells, RESULT, "outcome = result"))
    return plainly({"only": program}, "tensorflow", "keras", "jax")["only"]


def check(found: list[Any], expected: Any) -> None:
    """Compare the numbers of each rank with those of one process."""
    for values in found:
        for one, other in zip(values[:3], expected[:3], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def own_calls(ranks: int, last: int = LAST) -> int:
    """Return the number of samples that a rank maps: its rows, and the first batch.

    Batches that do not divide over the ranks are mapped as a whole. The last batch remains in
    global names, with all rows.
    """
    own = last // ranks if last % ranks == 0 else last
    after = BATCH if own < last or not last else 0
    return EPOCHS * (FULL * BATCH // ranks + own) + BATCH + after


@pytest.mark.parametrize("kind", STREAMS)
def test_a_worker_maps_its_own_samples(
    cluster: nbdist.Cluster, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, expected = run(cluster, STREAMS[kind], ITERATED), alone(STREAMS[kind], ITERATED)
    check(found, expected)
    assert f"samples a batch, {BATCH // len(found)} on each, {OWN}" in capsys.readouterr().out
    if "take" not in STREAMS[kind]:  # which leaves samples that are mapped ahead
        last = 0 if "drop_remainder" in STREAMS[kind] else LAST
        assert {len(values[3]) for values in found} == {own_calls(len(found), last)}
    assert max(len(values[3]) for values in found) < 0.8 * len(expected[3])


@pytest.mark.parametrize("name", LOOPS)
def test_forms_of_loops(
    cluster: nbdist.Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = STREAMS["shuffled by the global seed"] + "\ndicts = stream.map(named)"
    if name == "dicts":
        stream = f"dicts = numbers.shuffle(20).map(decoded).map(named).batch({BATCH})"
    found, expected = run(cluster, stream, LOOPS[name]), alone(stream, LOOPS[name])
    check(found, expected)
    assert OWN in capsys.readouterr().out
    assert {len(values[3]) for values in found} == {own_calls(len(found))}


@pytest.mark.parametrize("name", WHOLE)
def test_loops_that_need_all_rows(
    cluster: nbdist.Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = STREAMS["in order"]
    found, expected = run(cluster, stream, WHOLE[name]), alone(stream, WHOLE[name])
    check(found, expected)
    assert {len(values[3]) for values in found} == {len(expected[3])}
    assert OWN not in capsys.readouterr().out


@pytest.mark.parametrize("name", OTHERS)
def test_data_sets_that_are_read_as_a_whole(
    cluster: nbdist.Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random maps draw from generators that are equal on all ranks in the order of the draws."""
    found, expected = run(cluster, OTHERS[name], ITERATED), alone(OTHERS[name], ITERATED)
    assert {len(values[3]) for values in found} == {len(expected[3])}
    if name != "random map":
        check(found, expected)
    assert OWN not in capsys.readouterr().out


def test_batches_that_an_earlier_loop_has_left(cluster: nbdist.Cluster) -> None:
    """Each pass through a data set counts for its shuffle, also one that ends early."""
    cells = (
        STREAMS["shuffled by the global seed"],
        "for x, y in stream.take(1): seen.append(float(y[0]))",
        ITERATED.replace("        losses", "        if len(losses) == 3: break\n        losses"),
        "for x, y in stream: seen.append(float(y[0]))",
        CONVERTED,
        "seen.append(float(np.sum(x)))",
    )
    check(run(cluster, *cells), alone(*cells))


def test_data_that_differ_between_workers(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every worker computes the whole loop on its own data, as without nbdist."""
    stream = f"stream = numbers.map(lambda n: decoded(n + seed)).batch({BATCH})"
    for cell in (SETUP, "seed = rank", stream):
        cluster.run(cell, strategy="pjrt")
    with pytest.raises(CellError, match="values differ between ranks"):
        cluster.run(ITERATED, strategy="pjrt")
    assert "the first batch or the state differs between the workers" in capsys.readouterr().out
    cluster.run(RESULT, strategy="pjrt")
    for number, objects in enumerate(list(cluster.pull(["result"]).values())[:2]):
        check([objects["result"]], alone(f"seed = {number}", stream, ITERATED))


def test_resumed_loop(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = STREAMS["cached sources"]
    expected = alone(stream, ITERATED)
    for cell in (SETUP, stream):
        cluster.run(cell, strategy="pjrt")
    stopped = ITERATED + "        if len(losses) == 7: raise RuntimeError('stopped')\n"
    with pytest.raises(CellError, match="stopped"):
        cluster.run(stopped, strategy="pjrt", saving=Saving(str(tmp_path), every_steps=3))
    for cell in (SETUP, stream):
        cluster.run(cell, strategy="pjrt")
    cluster.run(ITERATED, strategy="pjrt", saving=Saving(str(tmp_path), every_steps=3, resume=True))
    cluster.run(RESULT, strategy="pjrt")
    for objects in cluster.pull(["result"]).values():
        np.testing.assert_allclose(objects["result"][0], expected[0], rtol=1e-5)
    assert OWN in capsys.readouterr().out
