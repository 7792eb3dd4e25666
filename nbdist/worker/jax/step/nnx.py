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


class Objects:
    """Form of NNX object graphs: after the run the same objects contain the new state."""

    def __init__(self) -> None:
        self._kept: tuple[bool, ...] = ()

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
        return {
            (path[0], _written(path[1:])): _described(part)
            for path, part in nnx.iter_graph(values, graph=True)
            if path and not str(path[-1]).startswith("_pytree__")
        }

    def note(self, names: dict[str, int], before: Values, after: Values) -> None:
        self._kept = tuple(old is new for old, new in zip(before, after, strict=True))
        kept = {id(part) for part in variables(self._pick(after, kept=True))}
        for index, (name, line) in enumerate(names.items()):
            if not self._kept[index] and kept & {id(part) for part in variables((after[index],))}:
                raise StepError(
                    f"`{name}` (line {line}) is created in every step and shares parts with an "
                    "object that is not: create it in an earlier cell, and change it in place"
                )

    def put_back(self, originals: Values, finals: Values) -> Values:
        """Update the objects that the step changed in place, and return new ones for the others."""
        _, state = nnx.split(self._pick(finals, kept=True), graph=True)
        nnx.update(self._pick(originals, kept=True), state)
        return tuple(
            old if kept else new
            for old, new, kept in zip(originals, finals, self._kept, strict=True)
        )

    def _pick(self, values: Values, *, kept: bool) -> Values:
        return tuple(v for v, was_kept in zip(values, self._kept, strict=True) if was_kept == kept)


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
        StepError: A value mixes NNX objects with arrays and cannot be updated in place.
    """
    for (name, line), value in zip(names.items(), values, strict=True):
        _, own = nnx.split((value,), graph=True)
        try:
            nnx.update((value,), own)
        except ValueError as error:
            raise StepError(
                f"`{name}` (line {line}) mixes NNX objects with arrays that cannot be restored "
                f"({error}): give the arrays a separate name"
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
