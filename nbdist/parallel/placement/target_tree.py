"""Targets for the leaves of a tree: one place for all, or a tree of places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec, Sharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.auto import Automatic
from nbdist.parallel.placement.targets import AUTO, USE_A_LIST, names_place, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax.sharding import Mesh

    from nbdist.parallel.placement.targets import Target

PLACES = (str, jax.Device, Sharding, PartitionSpec)
_ENTRY = "use an axis name, a tuple of axis names, or None"


class StructureError(UsageError):
    """A tree of places does not have the structure of the tree, or an entry is no place."""


def targets_of(tree: Any, count: int, where: Any, mesh: Mesh | None) -> list[Target]:
    """Return the target of each leaf, in order.

    Args:
        tree: Arrays.
        count: Number of leaves.
        where: One place for all leaves, or a tree of places with the structure of `tree` or its
            beginning. A tuple is a `PartitionSpec`; see `is_place`.
        mesh: Mesh for layouts and specs; None for the current one.

    Raises:
        UsageError: Places are invalid (each is reported), or the trees differ.
    """
    if is_place(where, tree):
        return [_target(as_spec(where, tree), tree, mesh)] * count
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


def spread_of(
    tree: Any,
    where: Any,
    of: Callable[[Any, Any], Any],
    names: tuple[str, str] = ("where", "tree"),
) -> list[Any]:
    """Call `of(place, part)` for each place, and return its result for each leaf of that part.

    Args:
        tree: Arrays.
        where: One place, or a tree of places.
        of: The function. A tuple reaches it as a `PartitionSpec`.
        names: Names of the arguments `where` and `tree` for errors.

    Raises:
        StructureError: The trees differ, or an entry of a tuple is invalid.
    """
    found: list[Any] = []
    for place, part in _pairs("", where, tree, names):
        found.extend([of(place, part)] * len(jax.tree.leaves(part)))
    return found


def is_place(where: Any, part: Any) -> bool:
    """Return True if `where` is one place, and False if it is a tree of places.

    A tuple is a `PartitionSpec`, unless `part` is a tuple of the same length and each entry is a
    place or a spec. An example of a tree is `place((w, b), ("model", "replicated"))`.

    Args:
        where: The argument, or a part of it.
        part: The arrays to be placed there.
    """
    if type(where) is tuple:
        return type(part) is not tuple or not _is_tree(where, part)
    return isinstance(where, PLACES) or jax.tree_util.all_leaves([where])


def as_spec(where: Any, part: Any, argument: str = "where") -> Any:
    """Return a tuple as a `PartitionSpec`, and any other place as it is.

    Raises:
        StructureError: An entry is neither an axis name, a tuple of axis names, nor None.
    """
    if type(where) is not tuple:
        return where
    wrong = [
        f"entry {index} is {_article(entry)}"
        for index, entry in enumerate(where)
        if not _is_entry(entry)
    ]
    if wrong:
        hint = f"; {USE_A_LIST}" if not jax.tree_util.all_leaves([part]) else ""
        raise StructureError(f"{argument}={where!r}: {', '.join(wrong)}: {_ENTRY}{hint}")
    return PartitionSpec(*where)


def _is_tree(where: tuple[Any, ...], part: tuple[Any, ...]) -> bool:
    if not all(map(_is_entry, where)):
        return True
    each = (names_place(entry) if isinstance(entry, str) else bool(entry) for entry in where)
    return len(where) == len(part) and all(each)


def _is_entry(entry: Any) -> bool:
    """Return True for an entry of a `PartitionSpec`."""
    several = isinstance(entry, tuple) and all(isinstance(name, str) for name in entry)
    return entry is None or isinstance(entry, str) or several


def _pairs(path: str, where: Any, part: Any, names: tuple[str, str]) -> Iterator[tuple[Any, Any]]:
    """Yield each place with its part of the tree, in the order of the tree's leaves."""
    places_name, parts_name = (f"{name}{path}" for name in names)
    if where is not None and is_place(where, part):
        yield as_spec(where, part, places_name), part
        return
    if not jax.tree.leaves(part):
        return
    if where is None:
        raise StructureError(f"{places_name} is None: give a place for {parts_name}")
    if jax.tree_util.all_leaves([part]):
        raise StructureError(
            f"{places_name} is {_article(where)}, and {parts_name} is one array: give one place"
        )
    places, parts = _children(where), _children(part)
    wrong = [
        f"{places_name}{key} has no counterpart: {parts_name} has {', '.join(parts)}"
        for key in places
        if key not in parts
    ]
    wrong += [
        f"{names[0]} has no place for {parts_name}{key}"
        for key, child in parts.items()
        if key not in places and jax.tree.leaves(child)
    ]
    if wrong:
        raise StructureError("\n".join(wrong))
    for key, child in parts.items():
        yield from _pairs(path + key, places.get(key), child, names)


def _children(node: Any) -> dict[str, Any]:
    """Return the direct children by their keys as Python writes them, such as `['w']`."""
    children, _ = jax.tree_util.flatten_one_level_with_keys(node)
    return {jax.tree_util.keystr((key,)): child for key, child in children}


def _article(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _target(where: object, part: Any, mesh: Mesh | None) -> Target:
    return Automatic(part) if where == AUTO else target_of(where, mesh)
