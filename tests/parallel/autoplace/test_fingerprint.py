"""Fingerprints of a function with its inputs, for which a decision holds."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.parallel.autoplace.fingerprint import described, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from nbdist.parallel.autoplace.fingerprint import fingerprint
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
@jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
def total(x):
    return jax.lax.psum(x.sum(), "data")
def f(x):
    y = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return total(x) + y.sum()
x = jnp.ones((8, 8))
traced = jax.jit(f).trace(x)
print(fingerprint(traced.jaxpr, traced.in_tree, [x], mesh))
"""


def fingerprint_of(function: Callable[..., Any], *args: Any, mesh: Any = None) -> str:
    leaves, tree = jax.tree_util.tree_flatten((args, {}))
    return fingerprint(jax.jit(function).trace(*args).jaxpr, tree, leaves, mesh)


def double(x: Any) -> Any:
    return x * 2


def test_each_relevant_difference_changes_the_fingerprint() -> None:
    x = jnp.ones((8, 4))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
    prints = [
        fingerprint_of(double, x),
        fingerprint_of(lambda x: x * 3, x),
        fingerprint_of(double, jnp.ones((4, 8))),
        fingerprint_of(double, x.astype(jnp.bfloat16)),
        fingerprint_of(double, np.ones((8, 4), "f")),
        fingerprint_of(double, jax.device_put(x, jax.devices()[0])),
        fingerprint_of(double, jax.device_put(x, jax.devices()[3])),
        fingerprint_of(double, sharded),
        fingerprint_of(double, jax.device_put(x, jax.NamedSharding(mesh, jax.P(None)))),
        fingerprint_of(double, x, mesh=mesh),
        fingerprint_of(double, 1.0),
        fingerprint_of(double, np.float32(1)),
        fingerprint_of(lambda x: x["a"] * 2, {"a": x}),
    ]
    assert len(set(prints)) == len(prints)


def test_names_and_values_do_not_change_the_fingerprint() -> None:
    x = jnp.ones((8, 4))
    assert fingerprint_of(double, x) == fingerprint_of(lambda other: other * 2, x + 1)
    ones, twos = jnp.ones((4, 4)), jnp.full((4, 4), 2.0)
    assert fingerprint_of(lambda x: x @ ones, x) == fingerprint_of(lambda x: x @ twos, x)


@pytest.mark.full  # test_decorator.py uses a choice in a second process
def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """The order of sets of strings and the addresses of functions differ between processes."""
    command = [sys.executable, "-c", PROGRAM]
    found = {
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        for seed in range(3)
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def test_inputs_are_described_in_words() -> None:
    assert described([]) == "nothing"
    assert described([np.ones(3, "f"), 1.0, *[jnp.ones(2)] * 4]) == (
        "float32[3] from the host, float32[]* from the host, float32[2] free on cpu 0, "
        "float32[2] free on cpu 0, and 2 more"
    )
