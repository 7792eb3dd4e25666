"""What a step only reads: arrays become arguments, so that none is baked into the program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.jax.arrays.leaves import Leaves, is_array

if TYPE_CHECKING:
    from collections.abc import Callable


class Arguments:
    """Names that the step reads and does not assign.

    Args:
        names: each with its first line in the cell.
        values: of the names.
    """

    def __init__(self, names: dict[str, int], values: tuple[Any, ...]) -> None:
        self.names = names
        self._structures = [jax.tree.structure(value) for value in values]
        self._leaves = [Leaves(jax.tree.leaves(value)) for value in values]
        self._paths = [_paths(value) for value in values]

    @property
    def arrays(self) -> list[list[jax.Array]]:
        """What the devices hold, name by name."""
        return [leaves.arrays for leaves in self._leaves]

    @property
    def paths(self) -> list[list[str]]:
        """What leads to each of the arrays, name by name."""
        return [
            [f"{name}{path}" for path in leaves.of_arrays(paths)]
            for name, leaves, paths in zip(self.names, self._leaves, self._paths, strict=True)
        ]

    def place(self, place: Callable[[str, Any], jax.Array]) -> None:
        """Put every array where `place`, given its name and path, has it."""
        for leaves, paths in zip(self._leaves, self.paths, strict=True):
            leaves.arrays = list(map(place, paths, leaves.arrays))

    def values(self, arrays: list[list[Any]]) -> dict[str, Any]:
        """The names' values, made of these arrays."""
        made = [
            jax.tree.unflatten(structure, leaves.filled(own))
            for structure, leaves, own in zip(self._structures, self._leaves, arrays, strict=True)
        ]
        return dict(zip(self.names, made, strict=True))

    def changed(self, arrays: list[list[Any]], values: dict[str, Any]) -> set[str]:
        """Names whose values the step has changed in place: copies, of which nobody would know."""
        changed = set()
        for name, untouched in self.values(arrays).items():
            was, now = jax.tree.flatten(untouched), jax.tree.flatten(values[name])
            if was[1] != now[1] or any(a is not b for a, b in zip(was[0], now[0], strict=True)):
                changed.add(name)
        return changed


def is_argument(value: Any, *, planned: bool) -> bool:
    """Whether it is an array, or a pytree with arrays; one of numbers alone is a constant.

    Args:
        value: of a name.
        planned: whether shapes without data stand for arrays, as no step is made. In a step they
            are what `jax.pure_callback` wants to know of a result.
    """
    arrays = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
    return any(planned or not isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)


def _paths(value: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
