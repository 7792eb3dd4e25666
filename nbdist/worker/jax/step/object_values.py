"""Values that contain objects of the user's classes, flattened for a step and rebuilt.

JAX treats an object of an unknown class as a leaf. Here its attributes are its parts, so a slot
with a plain dataclass or a SimpleNamespace is carried like a pytree.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.jax.step.object_slots import Attributes, is_open

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from nbdist.worker.jax.step.carried import Place, Values

_NUMBERS = (bool, int, float)
_CONTAINERS = (dict, list, tuple)


@dataclasses.dataclass(frozen=True)
class _Node:
    """Pytree with the objects among its leaves; None for a leaf that is not an object."""

    tree: Any
    objects: tuple[_Object | None, ...]


@dataclasses.dataclass(frozen=True)
class _Object:
    kind: type
    names: tuple[str, ...]
    attributes: tuple[_Node, ...]


class ObjectValues:
    """Form of carried values that are rebuilt in every step; see `carried.Form`.

    Args:
        kept: For each value, the identities of its objects that the step does not replace. They are
            constants.
    """

    def __init__(self, kept: tuple[Collection[int], ...] = ()) -> None:
        self._kept = kept

    def flatten(self, values: Values) -> tuple[list[Any], Any]:
        leaves: list[Any] = []
        nodes = []
        for index, value in enumerate(values):
            pairs, node = _flatten(value, self._kept_in(index))
            leaves += [leaf for _, leaf in pairs]
            nodes.append(node)
        return leaves, tuple(nodes)

    def unflatten(self, structure: Any, leaves: list[Any]) -> Values:
        rest = iter(leaves)
        return tuple(_rebuild(node, rest) for node in structure)

    def places(self, values: Values) -> list[Place]:
        return [
            (index, path)
            for index, value in enumerate(values)
            for path, _ in _flatten(value, self._kept_in(index))[0]
        ]

    def outline(self, values: Values) -> dict[Place, str]:
        return dict.fromkeys(self.places(values), "")

    def note(self, names: dict[str, int], before: Values, after: Values) -> None:
        """Do nothing: rebuilt values need no checks."""

    def put_back(self, originals: Values, finals: Values) -> Values:
        """Return the final values; Python numbers that became arrays are numbers again."""
        was, _ = self.flatten(originals)
        now, structure = self.flatten(finals)
        pairs = zip(was, now, strict=True)
        return self.unflatten(structure, [_as_before(old, new) for old, new in pairs])

    def _kept_in(self, index: int) -> Collection[int]:
        return self._kept[index] if self._kept else ()


def objects_in(value: Any) -> Iterator[Any]:
    """Yield a value, the containers in it, and the objects, from the outside in."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if is_open(part):
            waiting.extend(Attributes(part).contents().values())
        else:
            waiting.extend(_children(part))


def leaves_in(value: Any) -> list[Any]:
    """Return the parts of a value and of its objects that have no parts themselves."""
    return [part for part in objects_in(value) if not _has_parts(part)]


def _has_parts(part: Any) -> bool:
    return is_open(part) or isinstance(part, _CONTAINERS) or bool(_children(part))


def _children(part: Any) -> list[Any]:
    """Return the parts of a pytree; unlike in JAX, the keys of a dict need not be sortable."""
    if isinstance(part, dict):
        return list(part.values())
    children = jax.tree_util.default_registry.flatten_one_level(part)
    return [] if children is None else list(children[0])


def _flatten(
    value: Any, kept: Collection[int], above: tuple[int, ...] = ()
) -> tuple[list[tuple[str, Any]], _Node]:
    """Split a value into its leaves with their paths, and its structure."""

    def is_whole(part: Any) -> bool:
        return id(part) in kept and (part is not value or bool(above))

    found = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_whole)
    tree = jax.tree.structure(value, is_leaf=is_whole)
    pairs: list[tuple[str, Any]] = []
    objects: list[_Object | None] = []
    for path, leaf in found:
        word = jax.tree_util.keystr(path)
        if is_open(leaf) and not is_whole(leaf) and id(leaf) not in above:
            inner, node = _flatten_object(leaf, kept, (*above, id(leaf)))
            pairs += [(f"{word}{path}", part) for path, part in inner]
            objects.append(node)
        else:
            pairs.append((word, leaf))
            objects.append(None)
    return pairs, _Node(tree, tuple(objects))


def _flatten_object(
    value: Any, kept: Collection[int], above: tuple[int, ...]
) -> tuple[list[tuple[str, Any]], _Object]:
    contents = dict(sorted(Attributes(value).contents().items()))
    pairs: list[tuple[str, Any]] = []
    nodes = []
    for name, item in contents.items():
        inner, node = _flatten(item, kept, above)
        pairs += [(f".{name}{path}", leaf) for path, leaf in inner]
        nodes.append(node)
    return pairs, _Object(type(value), tuple(contents), tuple(nodes))


def _rebuild(node: _Node, rest: Iterator[Any]) -> Any:
    leaves = [
        next(rest) if inner is None else _rebuild_object(inner, rest) for inner in node.objects
    ]
    return jax.tree.unflatten(node.tree, leaves)


def _rebuild_object(inner: _Object, rest: Iterator[Any]) -> Any:
    value: Any = object.__new__(inner.kind)
    attributes = Attributes(value)
    for name, node in zip(inner.names, inner.attributes, strict=True):
        attributes.put(name, _rebuild(node, rest))
    return value


def _as_before(old: Any, new: Any) -> Any:
    """Convert an array to a number if it was one; does not wait for a failed step."""
    if not isinstance(old, _NUMBERS) or not isinstance(new, jax.Array) or not new.is_ready():
        return new
    try:
        return new.addressable_data(0).item()
    except jax.errors.JaxRuntimeError:  # from the failed step
        return new
