"""Flax NNX objects in a step: read by name, changed in place, carried.

All objects of a step are split together, so shared parts stay shared. Imported only if the user's
program has imported Flax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from nbdist.errors import StepError
from nbdist.worker.jax.step.carried import place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.jax.step.carried import Place, Values

    Path = tuple[int, ...]
    """Positions of children in a pytree, from the outside in."""

_SHARED = "a part of another value (use nnx.clone in an earlier cell to make it separate)"
"""Description of a variable that an earlier value contains too."""


class Objects:
    """Form of NNX object graphs: after the run the same objects contain the new state."""

    def __init__(self) -> None:
        self._kept: set[Path] = set()

    def flatten(self, values: Values) -> tuple[list[Any], Any]:
        graph, state = nnx.split(values, graph=True)
        leaves, structure = jax.tree.flatten(state)
        return leaves, (graph, structure)

    def unflatten(self, structure: Any, leaves: list[Any]) -> Values:
        graph, tree = structure
        values: Values = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return values

    def places(self, values: Values) -> list[Place]:
        _, state = nnx.split(values, graph=True)
        return [place_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]

    def outline(self, values: Values) -> dict[Place, str]:
        found = {
            (path[0], _written(path[1:])): _described(part)
            for path, part in nnx.iter_graph(values, graph=True)
            if path and not str(path[-1]).startswith("_pytree__")
        }
        for index, value in enumerate(values):
            for path, part in nnx.iter_graph((value,), graph=True):
                if isinstance(part, nnx.Variable):
                    found.setdefault((index, _written(path[1:])), _SHARED)
        return found

    def note(self, names: dict[str, int], before: Values, after: Values) -> None:
        self._kept = set(_kept(before, after))
        kept: list[tuple[Path, Any]] = []
        new: list[tuple[Path, Any]] = []
        for path, part in _parts_of(after):
            if nnx.graph.is_graph_node(part):
                (kept if path in self._kept else new).append((path, part))
        shared = {id(part) for part in variables(tuple(part for _, part in kept))}
        for path, part in new:
            if shared & {id(variable) for variable in variables((part,))}:
                name, line = list(names.items())[path[0]]
                raise StepError(
                    f"`{name}` (line {line}) is created in every step and shares parts with an "
                    "object that is not: create it in an earlier cell, and change it in place"
                )

    def put_back(self, originals: Values, finals: Values) -> Values:
        """Update what the step changed in place, and return new values for the rest."""
        pairs = zip(originals, finals, strict=True)
        return tuple(self._restored(old, new, (index,)) for index, (old, new) in enumerate(pairs))

    def _restored(self, old: Any, new: Any, path: Path) -> Any:
        """Return the final value of a part: the old object if the step kept it."""
        kept = path in self._kept
        if nnx.graph.is_graph_node(new):
            if kept:
                _, state = nnx.split((new,), graph=True)
                nnx.update((old,), state)
            return old if kept else new
        olds, news = _children(old), _children(new)
        if not news:
            return new
        items = [
            self._restored(one, other, (*path, index))
            for index, (one, other) in enumerate(zip(olds, news, strict=True))
        ]
        if not kept:
            return _with_children(new, items)
        if isinstance(old, (dict, list, nnx.State)):
            for key, item in zip(_keys(old), items, strict=True):
                old[key] = item
            return old
        unchanged = all(one is item for one, item in zip(olds, items, strict=True))
        return old if unchanged else _with_children(old, items)


def _kept(before: Any, after: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of the containers and NNX objects that a step did not replace."""
    if before is after:
        yield path
    if nnx.graph.is_graph_node(after):
        return
    pairs = zip(_children(before), _children(after), strict=True)
    for index, (old, new) in enumerate(pairs):
        yield from _kept(old, new, (*path, index))


def _parts_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the parts of a pytree with their paths; NNX objects are not entered."""
    yield path, value
    if not nnx.graph.is_graph_node(value):
        for index, part in enumerate(_children(value)):
            yield from _parts_of(part, (*path, index))


def _children(value: Any) -> list[Any]:
    children = jax.tree_util.default_registry.flatten_one_level(value)
    return [] if children is None else list(children[0])


def _keys(value: Any) -> list[Any]:
    """Return the keys of a mutable container, in the order of its children."""
    children = jax.tree_util.default_registry.flatten_one_level_with_keys(value)
    keys = [key for key, _ in children[0]]
    return [key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key for key in keys]


def _with_children(value: Any, children: list[Any]) -> Any:
    """Return a copy of a pytree with other children."""
    structure = jax.tree.structure(value, is_leaf=lambda part: part is not value)
    return jax.tree.unflatten(structure, children)


def holds_objects(value: Any) -> bool:
    """Return True if a pytree contains an NNX object or variable."""
    leaves = jax.tree.leaves(value, is_leaf=nnx.graph.is_graph_node)
    return any(nnx.graph.is_graph_node(leaf) for leaf in leaves)


def is_object(value: Any) -> bool:
    """Return True if a value is an NNX object or variable."""
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def parts(value: Any) -> Iterator[Any]:
    """Yield the arrays of a pytree, and the variables and arrays of its objects."""
    for leaf in jax.tree.leaves(value, is_leaf=nnx.graph.is_graph_node):
        if not nnx.graph.is_graph_node(leaf):
            yield leaf
            continue
        for _, part in nnx.iter_graph(leaf, graph=True):
            if isinstance(part, (nnx.Variable, jax.Array)):
                yield part


def check_places(names: dict[str, int], values: Values) -> None:
    """Check that objects can be changed in place.

    Raises:
        StepError: An object has arrays that cannot be updated in place.
    """
    for (name, line), value in zip(names.items(), values, strict=True):
        objects = tuple(part for _, part in _parts_of(value) if nnx.graph.is_graph_node(part))
        _, own = nnx.split(objects, graph=True)
        try:
            nnx.update(objects, own)
        except ValueError as error:
            raise StepError(
                f"`{name}` (line {line}) contains arrays that nnx.update cannot restore "
                f"({error}): put each of them into an nnx.Variable"
            ) from None


def variables(values: Values) -> list[nnx.Variable[Any]]:
    """Return all variables of the objects in the values."""
    return [
        part for _, part in nnx.iter_graph(values, graph=True) if isinstance(part, nnx.Variable)
    ]


def _written(path: tuple[Any, ...]) -> str:
    return "".join(f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in path)


def _described(part: Any) -> str:
    """Describe a plain value by its `repr`, and an object by its type."""
    plain = isinstance(part, (bool, int, float, complex, str, bytes, type(None)))
    return repr(part) if plain else type(part).__name__
