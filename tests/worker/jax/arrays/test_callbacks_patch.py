"""JAX callbacks on every rank, compared with one device."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.records import StepOptions
from tests import clusters, references

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """
import numpy as np, jax, jax.numpy as jnp
from jax.experimental import io_callback
train = np.arange(32, dtype=np.float32).reshape(32, 1)
seen, rows, calls, order = [], [], [], []
one = jax.ShapeDtypeStruct((), np.float32)
x = jnp.arange(4, dtype=jnp.float32)
def double(x):
    return np.asarray(x) * 2
def on_jax(x):
    return jnp.sin(x).sum()
def count(x):
    calls.append(float(np.sum(x)))
    return np.float32(len(calls))
def three():
    return np.float32(3)
def note(v):
    seen.append(np.asarray(v).tolist())
def noted(x, **options):
    jax.debug.callback(note, x, **options)
    return x
def listed(array):
    return np.asarray(array).tolist()
"""

PLAIN = {
    "pure": "listed(jax.pure_callback(double, x, x))",
    "pure in jit": "listed(jax.jit(lambda x: jax.pure_callback(double, x, x) + 1)(x))",
    "pure, without operands": "float(jax.jit(lambda: jax.pure_callback(three, one))())",
    "pure in vmap": (
        "listed(jax.vmap(lambda x: jax.pure_callback(double, one, x, vmap_method='sequential'))(x))"
    ),
    "operations of JAX": "float(jax.jit(lambda x: jax.pure_callback(on_jax, one, x))(x))",
    "io": "[float(io_callback(count, one, x)), float(io_callback(count, one, x + 1)), calls]",
    "io without a result": "[io_callback(note, None, x), jax.effects_barrier(), seen]",
    "ordered io": (
        "[float(jax.jit(lambda x: io_callback(count, one, x, ordered=True)"
        " * 10 + io_callback(count, one, x * 2, ordered=True))(x)), calls]"
    ),
    "debug": "[jax.debug.callback(note, x), jax.effects_barrier(), seen]",
    "debug in jit": "[listed(jax.jit(noted)(x)), jax.effects_barrier(), seen]",
    "debug in a loop": (
        "[listed(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: noted(x, ordered=True) + i,"
        " x))(x)), jax.effects_barrier(), seen]"
    ),
    "debug in a branch": (
        "[listed(jax.jit(lambda x: jax.lax.cond(x.sum() > 0, noted, lambda x: -x, x))(x)),"
        " jax.effects_barrier(), seen]"
    ),
    "debug in a gradient": (
        "[float(jax.jit(jax.grad(lambda y: noted(y) ** 2))(3.0)), jax.effects_barrier(), seen]"
    ),
}

STEP = """
loss = jnp.mean(batch)
jax.debug.callback(lambda v: seen.append(float(v)), loss)
jax.debug.callback(lambda v, **more: rows.append([v.ravel().tolist(), sorted(more)]), batch, n=loss)
number = io_callback(count, one, loss, ordered=True)
twice = jax.pure_callback(double, one, loss)
def body(carry, row):
    jax.debug.callback(lambda v: order.append(float(v)), row, ordered=True)
    return carry + row, None
total, _ = jax.lax.scan(body, 0.0, batch[:3, 0])
jax.debug.print("loss {}", loss, ordered=True)
{"loss": loss, "number": number, "twice": twice, "total": total}
"""
KINDS = {
    "2 x 1": {"hosts": 2},
    "2 x 2": {"hosts": 2, "devices_per_host": 2},
    "4 x 1": {"hosts": 4},
}


@pytest.fixture(
    scope="module",
    params=["2 x 2", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("2 x 1", "4 x 1"))],
)
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(**KINDS[request.param], framework="jax") as running:
        yield running


@cache
def reference_results() -> dict[str, Any]:
    batches = "".join(
        f"batch = train[{start}:{start + 8}]\n{STEP}jax.effects_barrier()\n"
        for start in (*range(0, 32, 8), *range(0, 32, 8))
    )
    programs = {name: f"{SETUP}outcome = {cell}" for name, cell in PLAIN.items()}
    programs["step"] = f"{SETUP}{batches}outcome = [seen, rows, calls, order]"
    return references.plainly(programs, "jax", "optax")


def common_value(cluster: nbdist.Cluster, expression: str) -> Any:
    """Return the value of an expression; check that all ranks have the same."""
    cluster.run(f"outcome = {expression}", strategy="pjrt")
    first, *others = [objects["outcome"] for objects in cluster.pull(["outcome"]).values()]
    assert all(other == first for other in others)
    return first


def test_callbacks_in_a_plain_cell(cluster: nbdist.Cluster) -> None:
    found = {}
    for name, cell in PLAIN.items():
        cluster.run(SETUP, strategy="pjrt")
        found[name] = common_value(cluster, cell)
    wanted = reference_results()
    assert found == {
        name: pytest.approx(wanted[name]) if name == "operations of JAX" else wanted[name]
        for name in PLAIN
    }


def test_callback_receives_whole_sharded_operand(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP, strategy="pjrt")
    sharded = "jax.device_put(x, jax.NamedSharding(mesh, jax.P('data')))"
    assert common_value(cluster, f"listed(jax.pure_callback(double, x, {sharded}))") == [0, 2, 4, 6]
    called = f"jax.debug.callback(note, {sharded})"
    both = f"[{called}, jax.jit(lambda x: jax.debug.callback(note, x))({sharded})]"
    assert common_value(cluster, f"[{both}, jax.effects_barrier(), seen][-1]") == [[0, 1, 2, 3]] * 2


def test_callbacks_in_a_step_cell(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank runs the callback once per step, with the whole batch, also in a second run."""
    cluster.run(SETUP, strategy="pjrt")
    for _ in range(2):
        cluster.run(STEP, step=StepOptions(data="train", batch=8), strategy="pjrt")
    assert common_value(cluster, "[seen, rows, calls, order]") == reference_results()["step"]
    assert capsys.readouterr().out.count("] loss 3.5") == 2  # one line for all ranks


def test_check_of_a_step_runs_no_callback(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP, strategy="pjrt")
    options = StepOptions(data="train", batch=8, check=True)
    cell = "loss = jnp.mean(batch)\njax.debug.callback(lambda v: seen.append(float(v)), loss)"
    cluster.run(cell, step=options, strategy="pjrt")
    assert common_value(cluster, "seen") == [3.5, 11.5, 19.5, 27.5]
    with pytest.raises(nbdist.CellError, match=r"--check runs the first step several times"):
        cluster.run(STEP, step=options, strategy="pjrt")
    assert common_value(cluster, "calls") == []


UPSTREAM = """
from jax._src import callback as callbacks
from jax._src.interpreters import mlir
from nbdist.worker.jax.arrays import callbacks_patch
mlir.register_lowering(callbacks.pure_callback_p, callbacks_patch._pure_lowering, cacheable=False)
x = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
outcome = listed(jax.jit(lambda x: jax.pure_callback(double, x, x + 0))(x))
callbacks_patch.apply()
"""


@pytest.mark.full
def test_upstream_runs_callbacks_only_on_rank_0(cluster: nbdist.Cluster) -> None:
    """If this fails, JAX has fixed the issue: remove the patch."""
    cluster.run(SETUP, strategy="pjrt")
    cluster.run(UPSTREAM, strategy="pjrt")
    found = [objects["outcome"] for _, objects in sorted(cluster.pull(["outcome"]).items())]
    assert found == [[0, 2, 4, 6], *[[0, 0, 0, 0]] * (len(found) - 1)]
