"""Inputs that a step only reads: their arrays become arguments instead of program constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.jax.arrays.leaves import Leaves, is_array

if TYPE_CHECKING:
    from collections.abc import Callable


class Arguments:
    """Names that the step reads and does not assign.

    Args:
        names: Names, each with its first line in the cell.
        values: Values of the names.
    """

    def __init__(self, names: dict[str, int], values: tuple[Any, ...]) -> None:
        self.names = names
        self._structures = [jax.tree.structure(value) for value in values]
        self._leaves = [Leaves(jax.tree.leaves(value)) for value in values]
        self._paths = [_paths(value) for value in values]

    @property
    def arrays(self) -> list[list[jax.Array]]:
        """Arrays on the devices, by name."""
        return [leaves.arrays for leaves in self._leaves]

    @property
    def paths(self) -> list[list[str]]:
        """Path of each array, by name."""
        return [
            [f"{name}{path}" for path in leaves.of_arrays(paths)]
            for name, leaves, paths in zip(self.names, self._leaves, self._paths, strict=True)
        ]

    def place(self, place: Callable[[str, Any], jax.Array]) -> None:
        """Place every array by `place`, a function of its path and the array."""
        for leaves, paths in zip(self._leaves, self.paths, strict=True):
            leaves.arrays = list(map(place, paths, leaves.arrays))

    def values(self, arrays: list[list[Any]]) -> dict[str, Any]:
        """Return the values of the names, rebuilt from arrays."""
        made = [
            jax.tree.unflatten(structure, leaves.filled(own))
            for structure, leaves, own in zip(self._structures, self._leaves, arrays, strict=True)
        ]
        return dict(zip(self.names, made, strict=True))

    def changed(self, arrays: list[list[Any]], values: dict[str, Any]) -> set[str]:
        """Return the names whose values the step changed in place: changes of copies are lost."""
        changed = set()
        for name, untouched in self.values(arrays).items():
            was, now = jax.tree.flatten(untouched), jax.tree.flatten(values[name])
            if was[1] != now[1] or any(a is not b for a, b in zip(was[0], now[0], strict=True)):
                changed.add(name)
        return changed


def is_argument(value: Any, *, planned: bool) -> bool:
    """Return True if a value contains arrays; a value of numbers only is a constant.

    Args:
        value: Value of a name.
        planned: True if shapes without data count as arrays: a dry run has no data. In a real step,
            they are result shapes for `jax.pure_callback`.
    """
    arrays = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
    return any(planned or not isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)


def _paths(value: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
