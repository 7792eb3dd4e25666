"""Plans of steps with Pallas kernels, which each device runs on its own rows and heads."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.records import DATA, MODEL, Planning, StepOptions
from tests import clusters, references

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

BATCH, STEPS = 8, 3

SETUP = f"""
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
rng = np.random.default_rng(0)
def normal(*shape):
    return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)
params = dict(q=normal(32, 4, 8), k=normal(32, 4, 8), v=normal(32, 4, 8), out=normal(4, 8, 32))
train = rng.normal(size=({BATCH * STEPS}, 16, 32)).astype("f4")

def scores_of(q, k):
    return jax.nn.softmax(q @ k.T * 8 ** -0.5)

def forward(q_ref, k_ref, v_ref, o_ref):
    o_ref[...] = scores_of(q_ref[...], k_ref[...]) @ v_ref[...]

def backward(q_ref, k_ref, v_ref, slope_ref, *out_refs):
    def attended(q, k, v):
        return scores_of(q, k) @ v
    given = q_ref[...], k_ref[...], v_ref[...]
    for ref, slope in zip(out_refs, jax.vjp(attended, *given)[1](slope_ref[...])):
        ref[...] = slope

def call(kernel, outs, *arrays):
    rows, length, heads, width = arrays[0].shape
    spec = pl.BlockSpec((None, length, None, width), lambda row, head: (row, 0, head, 0))
    like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    return pl.pallas_call(kernel, grid=(rows, heads), in_specs=[spec] * len(arrays),
                          out_specs=[spec] * outs, out_shape=[like] * outs,
                          interpret=True)(*arrays)

@jax.custom_vjp
def attention(q, k, v):
    return call(forward, 1, q, k, v)[0]

attention.defvjp(lambda q, k, v: (attention(q, k, v), (q, k, v)),
                 lambda kept, slope: tuple(call(backward, 3, *kept, slope)))
"""

STEP = """
def loss_of(params):
    q, k, v = (jnp.einsum("bsf,fhd->bshd", batch, params[name]) for name in "qkv")
    mixed = jnp.einsum("bshd,hdf->bsf", attention(q, k, v), params["out"])
    return ((mixed - batch) ** 2).mean()
loss, grads = jax.value_and_grad(loss_of)(params)
params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
"""


@cache
def plain_losses() -> list[float]:
    """Return the losses of one device."""
    step = "\n".join(f"    {line}" for line in STEP.splitlines())
    text = (
        f"{SETUP}\n@jax.jit\ndef train_step(params, batch):\n{step}\n    return loss, params\n"
        f"outcome = []\nfor start in range(0, {BATCH * STEPS}, {BATCH}):\n"
        f"    loss, params = train_step(params, train[start:start + {BATCH}])\n"
        "    outcome.append(float(loss))"
    )
    return references.plainly({"kernels": text}, "jax")["kernels"]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    workers = request.param
    per_host = 4 // workers
    with clusters.cluster(hosts=workers, framework="jax", devices_per_host=per_host) as running:
        yield running


@pytest.mark.parametrize(
    "cluster",
    [pytest.param(n, marks=pytest.mark.full if n > 2 else ()) for n in (2, 4)],
    indirect=True,
)
@pytest.mark.parametrize(
    ("data", "model", "zero", "micro"), [(4, 1, 0, 1), (2, 2, 0, 1), (4, 1, 3, 2), (1, 4, 0, 1)]
)
def test_kernels_train_as_on_one_device(
    cluster: nbdist.Cluster, data: int, model: int, zero: int, micro: int
) -> None:
    cluster.run(SETUP, strategy="pjrt")
    planning = Planning(fixed={DATA: data, MODEL: model, "zero": zero, "micro": micro}, remat="")
    options = StepOptions(data="train", batch=BATCH, planning=planning)
    run = cluster.run(STEP, strategy="pjrt", step=options)
    np.testing.assert_allclose(references.reported(run)["loss"], plain_losses(), rtol=1e-5)
    assert run.plan is not None
    assert run.plan.axes == {DATA: data, MODEL: model}
    assert not any("Pallas" in note for note in run.plan.notes)
    assert not any("computing time is unknown" in text for text in run.plan.warnings)
