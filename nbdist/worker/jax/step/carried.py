"""What a step carries from step to step, name by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax

from nbdist.errors import StepError
from nbdist.worker.jax.arrays.leaves import Leaves

if TYPE_CHECKING:
    from collections.abc import Callable

Values = tuple[Any, ...]
"""Of several names, in their order."""

Place = tuple[int, str]
"""In `Values`: the name's index, and the path within its value."""


class Form(Protocol):
    """How values are taken apart and put together again."""

    def flatten(self, values: Values) -> tuple[list[Any], Any]:
        """The leaves, and all else: a structure that can be compared."""
        ...

    def unflatten(self, structure: Any, leaves: list[Any]) -> Values: ...

    def places(self, values: Values) -> list[Place]:
        """Where each leaf stands."""
        ...

    def outline(self, values: Values) -> dict[Place, str]:
        """What the structure consists of, for the message that it has changed."""
        ...

    def note(self, names: dict[str, int], before: Values, after: Values) -> None:
        """See, while a step is traced, what becomes of the values themselves.

        Raises:
            StepError: they cannot be put back afterwards.
        """
        ...

    def put_back(self, originals: Values, finals: Values) -> Values:
        """What the names mean after the run."""
        ...


class Trees:
    """Pytrees: after the run their names mean new values."""

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
        """Values that are made anew need no care."""

    def put_back(self, originals: Values, finals: Values) -> Values:
        del originals
        return finals


class Carried:
    """Names whose values go from step to step, on the devices.

    Args:
        names: each with its first line in the cell.
        values: of the names, before the first step.
        form: how they are taken apart.
    """

    def __init__(self, names: dict[str, int], values: Values, form: Form) -> None:
        self.names = names
        self._originals = values
        self._form = form
        leaves, self._structure = form.flatten(values)
        self._leaves = Leaves(leaves, self._refuse_leaf)

    @property
    def arrays(self) -> list[jax.Array]:
        """What the devices hold."""
        return self._leaves.arrays

    @arrays.setter
    def arrays(self, arrays: list[jax.Array]) -> None:
        self._leaves.arrays = arrays

    def place(self, place: Callable[[str, Any], jax.Array]) -> None:
        """Put every array where `place`, given its name and path, has it."""
        self.arrays = [place(name, array) for name, array in self.named(self.arrays).items()]

    def named(self, arrays: list[Any]) -> dict[str, Any]:
        """These arrays by name and path."""
        words = list(self.names)
        places = [f"{words[index]}{path}" for index, path in self._form.places(self._originals)]
        return dict(zip(self._leaves.of_arrays(places), arrays, strict=True))

    def values(self, arrays: list[Any]) -> dict[str, Any]:
        """The names' values, made anew of these arrays."""
        return dict(zip(self.names, self._made(arrays), strict=True))

    def collect(
        self, arrays: list[Any], before: dict[str, Any], after: dict[str, Any]
    ) -> list[Any]:
        """The arrays after a step, with the types that they had before it.

        Raises:
            StepError: the structure of a value, or a leaf's shape or type, is another.
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
        """Whether the last step that was traced changed no number."""
        return self._leaves.is_settled

    def settle(self) -> bool:
        """Make arrays of the numbers that were seen to change; False once there are none."""
        return self._leaves.settle()

    def finals(self) -> dict[str, Any]:
        """What the names mean after the run."""
        finals = self._form.put_back(self._originals, self._made(self.arrays))
        return dict(zip(self.names, finals, strict=True))

    def _made(self, arrays: list[Any]) -> Values:
        return self._form.unflatten(self._structure, self._leaves.filled(arrays))

    def _refuse_leaf(self, leaf: int, how: str) -> StepError:
        index, path = self._form.places(self._originals)[leaf]
        return self._refuse(index, f"{path or 'it'} {how}")

    def _refuse_structure(self, old: Values, new: Values) -> StepError:
        was, now = self._form.outline(old), self._form.outline(new)
        for place in sorted({*was, *now}):
            index, path = place
            if was.get(place) == now.get(place):
                continue
            if place not in now:
                return self._refuse(index, f"its structure is another ({path or 'it'} is gone)")
            if place not in was:
                return self._refuse(index, f"its structure is another ({path or 'it'} is new)")
            return self._refuse(index, f"{path or 'it'} was {was[place]} and is {now[place]}")
        return self._refuse(0, "its structure is another (something is shared that was not)")

    def _refuse(self, index: int, how: str) -> StepError:
        name = list(self.names)[index]
        return StepError(
            f"`{name}` (line {self.names[name]}) is carried to the next step and changes: {how}"
        )


def place_of(path: tuple[Any, ...]) -> Place:
    """A path of JAX's in a tuple of values as a place."""
    first = path[0]
    index = first.idx if isinstance(first, jax.tree_util.SequenceKey) else first.key
    return index, jax.tree_util.keystr(path[1:])
