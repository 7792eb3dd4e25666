"""Cells on workers whose libraries lack private names or have versions that are not tested."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.errors import CellError
from nbdist.records import StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

MEAN = """
import jax, jax.numpy as jnp, numpy as np
numbers = np.arange(8.0, dtype="float32")
rows = jax.NamedSharding(mesh, jax.P("data"))
x = jax.device_put(jnp.arange(4.0), rows)
float(jax.jit(jnp.mean, out_shardings=jax.P())(x))
"""
STEP = "loss = jnp.mean(batch)"
LOOP = """
w = jnp.zeros(())
for batch in (numbers[:4], numbers[4:]):
    w = w - 0.1 * jax.grad(lambda w: jnp.mean((w - batch) ** 2))(w)
float(w)
"""
REMOVAL = """
from jax._src import callback
kept = callback.OrderedIOEffect
del callback.OrderedIOEffect
"""
UNTESTED = """
from nbdist.private_api.tested_versions import TESTED
tested = dict(TESTED)
TESTED.update(dict.fromkeys(("TensorFlow", "Keras", "JAX"), ("98.1.", "98.2.")))
"""
TESTED_AGAIN = "TESTED.update(tested)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        yield running


def step(*, check: bool = False) -> StepOptions:
    return StepOptions(data="numbers", batch=4, check=check)


@pytest.mark.processes
def test_a_missing_name_of_jax_refuses_step_cells_only(cluster: nbdist.Cluster) -> None:
    cluster.run(REMOVAL, strategy="pjrt")
    cluster.run(MEAN, strategy="pjrt")
    missing = r"has no jax\._src\.callback\.OrderedIOEffect, which nbdist needs for step cells"
    try:
        with pytest.raises(CellError, match=missing):
            cluster.run(STEP, step=step(), strategy="pjrt")
        assert set(cluster.run(MEAN, strategy="pjrt").results.values()) == {"1.5"}
    finally:
        cluster.run("callback.OrderedIOEffect = kept", strategy="pjrt")
    cluster.run(STEP, step=step(), strategy="pjrt")


@pytest.mark.processes
def test_an_untested_jax_runs_what_can_be_checked(cluster: nbdist.Cluster) -> None:
    cluster.run(MEAN, strategy="pjrt")
    cluster.run(UNTESTED, strategy="pjrt")
    try:
        assert set(cluster.run(MEAN, strategy="pjrt").results.values()) == {"1.5"}
        with pytest.raises(
            CellError, match=r"nbdist supports step cells under the pjrt .* --check"
        ):
            cluster.run(STEP, step=step(), strategy="pjrt")
        run = cluster.run(STEP, step=step(check=True), strategy="pjrt")
        assert run.checked is not None
        assert all(each.passes for each in run.checked.differences)
        with pytest.raises(CellError, match=r"nbdist supports training loops under .* --no-lift"):
            cluster.run(LOOP, strategy="pjrt")
        alone = cluster.run(LOOP, strategy="pjrt", no_lift=True)
    finally:
        cluster.run(TESTED_AGAIN, strategy="pjrt")
    assert alone.results == cluster.run(LOOP, strategy="pjrt", no_lift=True).results
    cluster.run(LOOP, strategy="pjrt")


SUM = """
import numpy as np, tensorflow as tf
numbers = tf.data.Dataset.from_tensor_slices(np.arange(8.0, dtype="float32"))
count = tf.Variable(0.0)
float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(3.0)), axis=None))
"""
MIRRORED_LOOP = """
for batch in numbers.batch(4):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((batch - count) ** 2)
    count.assign_sub(0.1 * tape.gradient(loss, count))
"""


@pytest.mark.processes
@pytest.mark.parametrize("library", ["TensorFlow", "Keras"])
def test_an_untested_library_runs_plain_cells_under_mirrored(
    cluster: nbdist.Cluster, library: str
) -> None:
    cluster.run(SUM)
    cluster.run(f"{UNTESTED}for name in set(tested) - {{{library!r}}}: TESTED[name] = tested[name]")
    try:
        assert set(cluster.run(SUM).results.values()) == {"6.0"}
        with pytest.raises(
            CellError, match=rf"under the mirrored strategy with {library} 98\.1\.x"
        ):
            cluster.run("loss = tf.reduce_mean(batch)", step=step())
        with pytest.raises(CellError, match=rf"with {library} 98\.1\.x.* --no-lift"):
            cluster.run(MIRRORED_LOOP)
    finally:
        cluster.run(TESTED_AGAIN)
    cluster.run(MIRRORED_LOOP)
    cluster.run("loss = tf.reduce_mean(batch)", step=step())
