"""State that a step carries to the next step, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax

from nbdist.errors import StepError
from nbdist.worker.jax.arrays.leaves import Leaves

if TYPE_CHECKING:
    from collections.abc import Callable

Values = tuple[Any, ...]
"""Values of several names, in their order."""

Place = tuple[int, str]
"""Position in `Values`: the index of the name, and the path within its value."""


class Form(Protocol):
    """Method that flattens values to leaves and restores them."""

    def flatten(self, values: Values) -> tuple[list[Any], Any]:
        """Return the leaves and a comparable structure."""
        ...

    def unflatten(self, structure: Any, leaves: list[Any]) -> Values: ...

    def places(self, values: Values) -> list[Place]:
        """Return the position of each leaf."""
        ...

    def outline(self, values: Values) -> dict[Place, str]:
        """Describe the parts of the structure, for the error that it changed."""
        ...

    def note(self, names: dict[str, int], before: Values, after: Values) -> None:
        """Compare the values before and after a traced step.

        Raises:
            StepError: The values cannot be restored after the run.
        """
        ...

    def put_back(self, originals: Values, finals: Values) -> Values:
        """Return the values of the names after the run."""
        ...


class Trees:
    """Form of pytrees: after the run, their names refer to new values."""

    def flatten(self, values: Values) -> tuple[list[Any], Any]:
        leaves, structure = jax.tree.flatten(values)
        return leaves, structure

    def unflatten(self, structure: Any, leaves: list[Any]) -> Values:
        values: Values = jax.tree.unflatten(structure, leaves)
        return values

    def places(self, values: Values) -> list[Place]:
        return [place_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(values)]

    def outline(self, values: Values) -> dict[Place, str]:
        return dict.fromkeys(self.places(values), "")

    def note(self, names: dict[str, int], before: Values, after: Values) -> None:
        """Do nothing: new values need no checks."""

    def put_back(self, originals: Values, finals: Values) -> Values:
        del originals
        return finals


class Carried:
    """Names whose values are carried from step to step on the devices.

    Args:
        names: Names, each with its first line in the cell.
        values: Values of the names before the first step.
        form: Form of the values.
    """

    def __init__(self, names: dict[str, int], values: Values, form: Form) -> None:
        self.names = names
        self._originals = values
        self._form = form
        leaves, self._structure = form.flatten(values)
        self._leaves = Leaves(leaves, self._refuse_leaf)

    @property
    def arrays(self) -> list[jax.Array]:
        """Arrays on the devices."""
        return self._leaves.arrays

    @arrays.setter
    def arrays(self, arrays: list[jax.Array]) -> None:
        self._leaves.arrays = arrays

    def place(self, place: Callable[[str, Any], jax.Array]) -> None:
        """Place every array by `place`, a function of its path and the array."""
        self.arrays = [place(name, array) for name, array in self.named(self.arrays).items()]

    def named(self, arrays: list[Any]) -> dict[str, Any]:
        """Return the given arrays by name and path."""
        words = list(self.names)
        places = [f"{words[index]}{path}" for index, path in self._form.places(self._originals)]
        return dict(zip(self._leaves.of_arrays(places), arrays, strict=True))

    def values(self, arrays: list[Any]) -> dict[str, Any]:
        """Return the values of the names, rebuilt from arrays."""
        return dict(zip(self.names, self._made(arrays), strict=True))

    def collect(
        self, arrays: list[Any], before: dict[str, Any], after: dict[str, Any]
    ) -> list[Any]:
        """Return the arrays after a step, with the dtypes from before it.

        Raises:
            StepError: The structure of a value, or the shape or type of a leaf, changed.
        """
        olds = tuple(before[name] for name in self.names)
        news = tuple(after[name] for name in self.names)
        leaves, structure = self._form.flatten(news)
        if structure != self._structure:
            raise self._refuse_structure(self._made(arrays), news)
        self._form.note(self.names, olds, news)
        return self._leaves.collect(arrays, leaves)

    @property
    def is_settled(self) -> bool:
        """True if the last traced step changed no number."""
        return self._leaves.is_settled

    def settle(self) -> bool:
        """Convert the numbers that changed to arrays; returns False if none changed."""
        return self._leaves.settle()

    def finals(self) -> dict[str, Any]:
        """Return the values of the names after the run."""
        finals = self._form.put_back(self._originals, self._made(self.arrays))
        return dict(zip(self.names, finals, strict=True))

    def _made(self, arrays: list[Any]) -> Values:
        return self._form.unflatten(self._structure, self._leaves.filled(arrays))

    def _refuse_leaf(self, leaf: int, how: str) -> StepError:
        index, path = self._form.places(self._originals)[leaf]
        return self._refuse(index, f"{path or 'the value'} {how}")

    def _refuse_structure(self, old: Values, new: Values) -> StepError:
        was, now = self._form.outline(old), self._form.outline(new)
        for place in sorted({*was, *now}):
            index, path = place
            if was.get(place) == now.get(place):
                continue
            if place not in now:
                return self._refuse(
                    index, f"its structure changes ({path or 'the value'} is missing)"
                )
            if place not in was:
                return self._refuse(index, f"its structure changes ({path or 'the value'} is new)")
            return self._refuse(
                index, f"{path or 'the value'} changes from {was[place]} to {now[place]}"
            )
        return self._refuse(0, "its structure changes (a part is shared that was not before)")

    def _refuse(self, index: int, how: str) -> StepError:
        name = list(self.names)[index]
        return StepError(
            f"`{name}` (line {self.names[name]}) is carried to the next step and must keep its "
            f"structure and types: {how}"
        )


def place_of(path: tuple[Any, ...]) -> Place:
    """Convert a JAX path in a tuple of values to a position."""
    first = path[0]
    index = first.idx if isinstance(first, jax.tree_util.SequenceKey) else first.key
    return index, jax.tree_util.keystr(path[1:])
