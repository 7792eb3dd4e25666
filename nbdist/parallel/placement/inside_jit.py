"""Layouts within traced code: what `place` does in `jax.jit`, and in step cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src.core import trace_state_clean
from jax.errors import ConcretizationTypeError
from jax.extend.core import concrete_or_error
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.leaves import Leaf
from nbdist.parallel.placement.named_layouts import LAYOUTS
from nbdist.parallel.placement.target_tree import spread_of
from nbdist.parallel.placement.targets import checked, laid_out, spec_over
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


def is_traced() -> bool:
    """Whether JAX is tracing a program here."""
    return not trace_state_clean()


def constrained(tree: Any, where: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """The same arrays, which the program being traced is to have laid out so.

    Args:
        tree: of arrays, traced ones among them.
        where: a layout's name, a `PartitionSpec` or a `NamedSharding`, or a tree of them. Where
            only gradients are traced, a device as well.
        mesh: for layouts and specs; the one that is set or the strategy's, where it is None.

    Raises:
        UsageError: another place, which a program cannot change, or sizes do not divide; each leaf.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    places = spread_of(tree, where, lambda place, _: place)
    found, wrong = [], dict[str, None]()
    for (path, value), place in zip(leaves, places, strict=True):
        leaf = Leaf(path, value, np.shape(value), 0)
        try:
            found.append(_constrained(leaf, place, mesh))
        except UsageError as error:
            wrong[str(error)] = None
    if wrong:
        raise UsageError("\n".join(wrong))
    return jax.tree.unflatten(structure, found)


def _constrained(leaf: Leaf, where: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    if isinstance(where, (jax.Device, SingleDeviceSharding)) and _has_value(leaf.value):
        return jax.device_put(leaf.value, where)
    sharding = _sharding(leaf, where, mesh)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(leaf.value, sharding)
    return jax.lax.with_sharding_constraint(leaf.value, sharding)


def _sharding(leaf: Leaf, where: Any, mesh: Mesh | AbstractMesh | None) -> NamedSharding:
    if isinstance(where, str) and where in LAYOUTS:
        return laid_out(leaf, where, mesh or _mesh())
    if isinstance(where, PartitionSpec):
        where = spec_over(where, mesh or _mesh())
    if isinstance(where, NamedSharding):
        checked(leaf, where)
        return where
    raise UsageError(
        f"where={where!r} within jax.jit or a step cell: a program runs where its arguments are. "
        f"It can be told how to cut what it makes: {', '.join(LAYOUTS)}, a PartitionSpec or a "
        "NamedSharding; to move data elsewhere, call place outside"
    )


def _has_value(value: Any) -> bool:
    """Whether it is only traced for its gradient."""
    try:
        concrete_or_error(None, value)
    except ConcretizationTypeError:
        return False
    return True


def _mesh() -> Mesh | AbstractMesh:
    """`jax.sharding.get_mesh` refuses to tell in traced code."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    strategy = context.strategies().get("pjrt")
    if strategy is None:
        raise UsageError(
            "no mesh is set: give one, mesh=nbdist.meshes({...}), or set it by jax.set_mesh"
        )
    own: Mesh = strategy.mesh
    return own
