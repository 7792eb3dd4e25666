"""Rows of memory maps that workers read in training loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

ROWS, COLUMNS, BATCH = 128, 1 << 18, 16
MIB = ROWS * COLUMNS * 4 / 2**20

OPEN = """
import numpy as np
rows = np.load({path!r}, mmap_mode="r")

def resident(name):
    "Return the size of the pages of a mapped file that this process has read, in MiB."
    kib, is_inside = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ")[0]:
            is_inside = name in line
        elif is_inside and line.startswith("Rss:"):
            kib += int(line.split()[1])
    return kib / 1024

losses = []
"""
LOOPS = {
    "pjrt": f"""
import jax, jax.numpy as jnp
w = jnp.full(({COLUMNS},), 1e-3)
def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)
for i in range(0, {ROWS}, {BATCH}):
    x = rows[i : i + {BATCH}]
    loss, gradient = jax.value_and_grad(loss_fn)(w, x)
    w = w - 1e-6 * gradient
    losses.append(float(loss))
""",
    "mirrored": f"""
import tensorflow as tf
w = tf.Variable(tf.fill(({COLUMNS}, 1), 1e-3))
for i in range(0, {ROWS}, {BATCH}):
    x = rows[i : i + {BATCH}]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w) ** 2)
    w.assign_sub(1e-6 * tape.gradient(loss, w))
    losses.append(float(loss))
""",
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        yield running


def losses_of(rows: np.ndarray) -> list[float]:
    """Return the losses of the loops in this process."""
    weights, losses = np.full(COLUMNS, 1e-3), []
    for x in np.split(rows.astype(np.float64), ROWS // BATCH):
        predicted = x @ weights
        losses.append(float(np.mean(predicted**2)))
        weights -= 1e-6 * 2 / BATCH * (x.T @ predicted)
    return losses


@pytest.mark.parametrize("strategy", LOOPS)
def test_slices_of_a_memory_map_are_read_by_row(
    cluster: nbdist.Cluster, strategy: str, tmp_path: Path
) -> None:
    """Workers also read whole batches: the first one, and under TensorFlow those of trials."""
    path = tmp_path / f"{strategy}.npy"
    rows = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    np.save(path, rows)
    pages = f"pages = resident({path.name!r})"  # in this cell: at its end, workers compare samples
    cluster.run(OPEN.format(path=str(path)) + LOOPS[strategy] + pages, strategy=strategy)
    found = cluster.pull(["losses", "pages"]).values()
    for objects in found:
        np.testing.assert_allclose(objects["losses"], losses_of(rows), rtol=1e-4)
    read = [objects["pages"] for objects in found]
    own, batch = MIB / len(read), MIB * BATCH / ROWS
    whole = {"pjrt": 1, "mirrored": 4}[strategy]
    mapped = MIB / 6  # the kernel maps pages around those that are read
    assert max(read) <= own + whole * (batch - batch / len(read)) + mapped < MIB
