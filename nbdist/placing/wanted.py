"""What is wanted of each leaf of a tree: one place for all, or a tree of places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec, Sharding

from nbdist.errors import UsageError
from nbdist.placing.automatic import Automatic
from nbdist.placing.targets import AUTO, target_of

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from nbdist.placing.targets import Target

_PLACES = (str, jax.Device, Sharding, PartitionSpec)


def targets_of(tree: Any, count: int, where: Any, mesh: Mesh | None) -> list[Target]:
    """The target of each leaf, in order.

    Args:
        tree: of arrays.
        count: how many it has.
        where: a place for all, or a tree of places with the structure of the tree or its beginning.
        mesh: for layouts by name; the current one, where it is None.

    Raises:
        UsageError: a place is none; or the trees differ.
    """
    if _is_place(where):
        return [_target(where, tree, mesh)] * count
    try:
        spread = jax.tree.map(
            lambda place, part: [_target(place, part, mesh)] * len(jax.tree.leaves(part)),
            where,
            tree,
            is_leaf=_is_place,
        )
    except ValueError as error:
        raise UsageError(f"where has another structure than the tree: {error}") from None
    targets: list[Target] = jax.tree.leaves(spread)
    return targets


def _is_place(where: Any) -> bool:
    return isinstance(where, _PLACES) or not isinstance(where, (dict, list, tuple))


def _target(where: object, part: Any, mesh: Mesh | None) -> Target:
    return Automatic(part) if where == AUTO else target_of(where, mesh)
