"""Layouts within traced code: what `place` does in `jax.jit`, and in step cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from nbdist.errors import UsageError
from nbdist.placing.layouts import LAYOUTS, named
from nbdist.worker import state

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


def is_traced(tree: Any) -> bool:
    """Whether it is part of a program that JAX is tracing."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def constrained(tree: Any, where: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """The same arrays, which the program being traced is to have laid out so.

    Args:
        tree: of arrays, traced ones among them.
        where: a layout's name, a `PartitionSpec` or a `NamedSharding`, or a tree of them.
        mesh: for layouts and specs; the one that is set or the strategy's, where it is None.

    Raises:
        UsageError: another place, which a program cannot change; or sizes do not divide.
    """
    spread = jax.tree.map(
        lambda place, part: jax.tree.map(lambda leaf: _constrained(leaf, place, mesh), part),
        where,
        tree,
        is_leaf=lambda place: not isinstance(place, (dict, list, tuple)),
    )
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(spread))


def _constrained(leaf: Any, where: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    if isinstance(where, str) and where in LAYOUTS:
        sharding = named(where, jax.numpy.shape(leaf), mesh or _mesh())
    elif isinstance(where, PartitionSpec):
        sharding = NamedSharding(mesh or _mesh(), where)
    elif isinstance(where, NamedSharding):
        sharding = where
    else:
        raise UsageError(
            f"where={where!r} within jax.jit or a step cell: a program runs where its arguments "
            f"are. It can be told how to cut what it makes: {', '.join(LAYOUTS)}, a PartitionSpec "
            "or a NamedSharding; to move data elsewhere, call place outside"
        )
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _mesh() -> Mesh | AbstractMesh:
    """`jax.sharding.get_mesh` refuses to tell in traced code."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    strategy = state.strategies().get("pjrt")
    if strategy is None:
        raise UsageError(
            "no mesh is set: give one, mesh=nbdist.meshes({...}), or jax.set_mesh(...)"
        )
    own: Mesh = strategy.mesh
    return own
