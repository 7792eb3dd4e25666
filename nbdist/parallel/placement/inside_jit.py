"""`place` in traced code, in `jax.jit` and in step cells: sharding constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.errors import ConcretizationTypeError
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.leaves import Leaf
from nbdist.parallel.placement.named_layouts import LAYOUTS
from nbdist.parallel.placement.target_tree import spread_of
from nbdist.parallel.placement.targets import checked, layout_sharding, spec_over
from nbdist.private_api.jax import concrete_or_error, trace_state_clean
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


def is_traced() -> bool:
    """Return True if JAX is tracing a program here."""
    return not trace_state_clean()


def constrained(tree: Any, where: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """Constrain the layouts of arrays in the program that is traced.

    Args:
        tree: arrays, some of them traced.
        where: a layout's name, a `PartitionSpec` or a `NamedSharding`, or a tree of them; a device
            as well if only gradients are traced.
        mesh: for layouts and specs; by default the set mesh, or the strategy's.

    Raises:
        UsageError: a program cannot move arrays to this place, or sizes do not divide; all leaves
            are listed.
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
        return layout_sharding(leaf, where, mesh or _mesh())
    if isinstance(where, PartitionSpec):
        where = spec_over(where, mesh or _mesh())
    if isinstance(where, NamedSharding):
        checked(leaf, where)
        return where
    raise UsageError(
        f"where={where!r} within jax.jit or a step cell: a program runs on the "
        f"devices of its arguments. To shard its values, use {', '.join(LAYOUTS)}, "
        "a PartitionSpec or a NamedSharding; to move data, call place outside"
    )


def _has_value(value: Any) -> bool:
    """Return True if it has a value, and is traced only for its gradient."""
    try:
        concrete_or_error(None, value)
    except ConcretizationTypeError:
        return False
    return True


def _mesh() -> Mesh | AbstractMesh:
    """Return the current mesh; `jax.sharding.get_mesh` raises in traced code."""
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
