"""The guard compares replicated arrays over the ranks after a plain cell under pjrt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """
import time
import numpy as np, jax, jax.numpy as jnp, equinox as eqx
from flax import nnx
def drawn(*shape):
    return np.random.default_rng(rank).normal(size=shape).astype("float32")
class Trainer:
    def __init__(self):
        self.params = {"w": jnp.zeros(2)}
    def step(self):
        self.params = {"w": self.params["w"] + drawn(2)}
trainer, model = Trainer(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
params, v, history = {"w": jnp.zeros(2)}, jnp.zeros(2), []
@nnx.jit
def update(model, by):
    model.bias[...] += by
    return by
"""
SHARDED = """
on = jax.NamedSharding(mesh, jax.P("data"))
sharded = jax.make_array_from_process_local_data(on, drawn(1))
"""
UNFLATTENABLE = """
@jax.tree_util.register_pytree_node_class
class Strange:
    def tree_flatten(self):
        raise ValueError("not now")
    def tree_unflatten(*_):
        raise ValueError("not now")
strange = Strange()
"""
CLOCK = "jax.random.key(2 * time.time_ns() + rank)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax", seed=3) as running:
        running.run(SETUP)
        yield running


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (f"key = {CLOCK}", ["`key` (line 2)"]),
        (f"\nkey = {CLOCK}\nw = jax.random.normal(key, (3,))", ["`key` (line 3)", "`w` (line 4)"]),
        ("w = jnp.asarray(drawn(3))", ["`w` (line 2)"]),
        ("large = jnp.asarray(drawn(1 << 20)) if rank else jnp.zeros(1 << 20)", ["`large`"]),
        ("tree = {'a': [jnp.ones(2), jnp.asarray(drawn(3))]}", ["`tree['a'][1]` (line 2)"]),
        (f"net = nnx.Linear(2, 2, rngs=nnx.Rngs({CLOCK}))", ["`net.kernel`"]),
        (f"layer = eqx.nn.Linear(2, 2, key={CLOCK})", ["`layer.weight`", "`layer.bias`"]),
        ("trainer.step()", ["`trainer.params['w']`"]),
        ("params['w'] = params['w'] + drawn(2)", ["`params['w']`"]),
        ("history.append(jnp.asarray(drawn(1)))", ["`history[0]`"]),
        ("kept = update(model, drawn(2).mean())", ["`kept` (line 2)", "`model.bias`"]),
        ("if rank == 0:\n    v = v + 1", ["`v` (line 3)"]),
        ("import asyncio\nawait asyncio.sleep(0)\nw = jnp.asarray(drawn(3))", ["`w` (line 4)"]),
    ],
)
def test_differing_array_is_named(cluster: nbdist.Cluster, source: str, names: list[str]) -> None:
    with pytest.raises(nbdist.CellError) as caught:
        cluster.run(source, strategy="pjrt", header="%%dist_run")
    error = caught.value
    assert (error.rank, error.ename) == (1, "StepError")
    for name in names:
        assert name in error.evalue
    assert "Rank 1 differs from rank 0" in error.evalue
    assert "the generators of NumPy" in error.evalue
    assert "--guard 0" in error.evalue


@pytest.mark.parametrize(
    "source",
    [
        "a = drawn(3)\nb = rank\nc = [time.time_ns(), {'d': drawn(2)}]",
        "local = jax.device_put(drawn(3), jax.local_devices()[0])",
        SHARDED,
        "w = jnp.asarray(np.random.rand(3))",
        "key = jax.random.key(0)\nw = jax.random.normal(key, (1 << 19,))",
        UNFLATTENABLE,
    ],
    ids=[
        "no JAX arrays",
        "local device",
        "sharded",
        "equal seeds",
        "large and equal",
        "unflattenable pytree",
    ],
)
def test_local_or_equal_arrays_pass(cluster: nbdist.Cluster, source: str) -> None:
    cluster.run(source, strategy="pjrt")


def test_guard_0_disables_the_comparison(cluster: nbdist.Cluster) -> None:
    cluster.run("w = jnp.asarray(drawn(3))", strategy="pjrt", guard=0)
    cluster.run("print(w.shape)", strategy="pjrt")


def test_refused_array_is_reported_again_only_in_derived_arrays(
    cluster: nbdist.Cluster,
) -> None:
    with pytest.raises(nbdist.CellError):
        cluster.run("old = jnp.asarray(drawn(3))", strategy="pjrt")
    cluster.run("print(old.shape)", strategy="pjrt")
    with pytest.raises(nbdist.CellError, match="`new`"):
        cluster.run("new = old + 1", strategy="pjrt")


def test_sample_is_equal_on_host_and_device(cluster: nbdist.Cluster) -> None:
    """The host reads CPU arrays without a copy and copies only the sample from other devices."""
    source = """
from nbdist.worker.checkpoint import digest
from nbdist.worker.inspection import replicated
big = jnp.asarray(np.random.rand(1 << 18, 2).astype("float32"))
other = big.at[0].set(2)
sample = replicated.sampled(big)
assert sample.nbytes == digest.WHOLE_BYTES < big.nbytes
of_device = digest.of_array(np.asarray(sample.addressable_data(0)))
of_device == replicated._number(big), of_device == replicated._number(other)
"""
    assert set(cluster.run(source, strategy="pjrt").results.values()) == {"(True, False)"}
