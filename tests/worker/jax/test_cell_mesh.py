"""Cells that need nbdist's mesh as context mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nbdist
from nbdist.worker.jax.cell_mesh import ContextMesh

OURS = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
OWN = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))


def uses_mesh(source: str, names: dict[str, Any]) -> bool:
    return ContextMesh().is_needed(source, names, OURS)


def namespace(**names: Any) -> dict[str, Any]:
    module = {"__name__": "__main__", "jax": jax, "jnp": jnp, "np": np, "mesh": OURS, "P": jax.P}
    return {**module, "strategy": object(), **names}


def defined(code: str, **names: Any) -> dict[str, Any]:
    """Return a namespace after a cell."""
    made = namespace(**names)
    exec(code, made)
    return made


@pytest.mark.parametrize(
    "source",
    [
        "strategy.run(f)",
        "jnp.ones(mesh.size)",
        "x = jax.device_put(np.ones(4), jax.NamedSharding(mesh, P('data')))",
        "jax.jit(f, out_shardings=jax.P('data'))(1.0)",
        "jax.lax.with_sharding_constraint(x, P(None))",
        "import nbdist\nx = nbdist.place(x, 'batch')",
        "from nbdist import place",
        "nbdist.place(x, 'batch')",
        "helper(3)",
        "rows",
        "if True:\n    y = strategy",
    ],
)
def test_cell_uses_the_mesh(source: str) -> None:
    names = defined(
        "def helper(n):\n    return jax.jit(lambda: jnp.ones(n), out_shardings=jax.P('data'))()",
        nbdist=nbdist,
        rows=jax.NamedSharding(OURS, jax.P("data")),
    )
    assert uses_mesh(source, names)


@pytest.mark.parametrize(
    "source",
    [
        "jnp.sin(jnp.arange(8.0)).sum()",
        "from jax.sharding import NamedSharding, PartitionSpec as P",
        "m = jax.make_mesh((1,), ('i',))\na = jax.device_put(x, jax.NamedSharding(m, P('i')))",
        "mesh = jax.make_mesh((1,), ('data',))\nprint(mesh)",
        "jax.set_mesh(own)",
        "jax.device_put(x, jax.NamedSharding(own, P('i')))",
        "with jax.set_mesh(own):\n    f(P('i'))",
        "f(P('i'))",
        "fit(params)",
        "strategy = 'adam'\nprint(strategy)",
        "jax.NamedSharding(sharding.mesh, P('i'))",
        "report(loss=1.0)",
        "1 +",
        "",
    ],
)
def test_cell_does_not_use_the_mesh(source: str) -> None:
    names = defined("def fit(params):\n    return jax.tree.map(jnp.sin, params)", own=OWN)
    assert not uses_mesh(source, names)


def test_a_mesh_in_force_is_that_of_bare_specs() -> None:
    source = "jax.jit(f, out_shardings=jax.P('i'))(1.0)"
    with jax.set_mesh(OWN):
        assert not uses_mesh(source, namespace())
    assert uses_mesh(source, namespace())


def test_function_of_an_earlier_cell_may_contain_a_spec() -> None:
    context, names = ContextMesh(), namespace()
    assert not context.is_needed("jnp.ones(3)", names, OURS)
    assert context.is_needed("total = jax.jit(jnp.sum, out_shardings=jax.P())", names, OURS)
    assert context.is_needed("total(jnp.ones(3))", names, OURS)
    assert not context.is_needed("jax.set_mesh(own)", namespace(own=OWN), OURS)
    assert not context.is_needed("total(jnp.ones(3))", namespace(own=OWN), OURS)
