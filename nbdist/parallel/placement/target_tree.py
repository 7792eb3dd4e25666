"""What is wanted of each leaf of a tree: one place for all, or a tree of places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec, Sharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.auto import Automatic
from nbdist.parallel.placement.targets import AUTO, target_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from nbdist.parallel.placement.targets import Target

_PLACES = (str, jax.Device, Sharding, PartitionSpec)


def targets_of(tree: Any, count: int, where: Any, mesh: Mesh | None) -> list[Target]:
    """The target of each leaf, in order.

    Args:
        tree: of arrays.
        count: how many it has.
        where: a place for all, or a tree of places with the structure of the tree or its beginning.
        mesh: for layouts by name; the current one, where it is None.

    Raises:
        UsageError: places are none, each of them; or the trees differ.
    """
    if is_place(where):
        return [_target(where, tree, mesh)] * count
    wrong = dict[str, None]()

    def target(place: object, part: Any) -> Target | None:
        try:
            return _target(place, part, mesh)
        except UsageError as error:
            wrong[str(error)] = None
            return None

    targets = spread_of(tree, where, target)
    if wrong:
        raise UsageError("\n".join(wrong))
    return targets


def spread_of(tree: Any, where: Any, of: Callable[[Any, Any], Any]) -> list[Any]:
    """What is made of each place and its part of the tree, once for each leaf of that, in order.

    Raises:
        UsageError: the trees differ.
    """
    if is_place(where):
        return [of(where, tree)] * len(jax.tree.leaves(tree))
    found: list[Any] = []

    def take(place: object, part: Any) -> None:
        found.extend([of(place, part)] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(take, where, tree, is_leaf=is_place)
    except ValueError as error:
        raise UsageError(
            f"where has another structure than the tree: {' '.join(str(error).split())}"
        ) from None
    return found


def is_place(where: Any) -> bool:
    """Whether it is one, or nothing that could be a tree of them."""
    return isinstance(where, _PLACES) or jax.tree_util.all_leaves([where])


def _target(where: object, part: Any, mesh: Mesh | None) -> Target:
    return Automatic(part) if where == AUTO else target_of(where, mesh)
