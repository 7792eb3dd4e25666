"""Arguments of a call: traced leaves, static values, and the kind of each leaf."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.errors import UsageError
from nbdist.parallel.placement.leaves import leaves_of
from nbdist.private_api.jax import trace_state_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["KINDS", "Given", "Statics", "UnsupportedLeaf", "refusal", "trace_state_clean"]

_NUMBERS = (bool, int, float, complex, np.generic)


class UnsupportedLeaf(Exception):  # noqa: N818 - it never leaves a call: `refusal` makes the error
    """A leaf is not an array, or was deleted."""


@dataclass(frozen=True)
class Given:
    """The arguments of one call.

    Attributes:
        leaves: arrays and numbers.
        tree: structure of the arguments by position and name, with `None` for static ones.
        statics: values of static arguments, by position and name.
    """

    leaves: list[Any]
    tree: jax.tree_util.PyTreeDef
    statics: tuple[tuple[int | str, Hashable], ...]

    @property
    def arguments(self) -> list[int]:
        """Number of the argument that each leaf belongs to; arguments by name come last."""
        each = [child for part in self.tree.children() for child in part.children()]
        return [number for number, child in enumerate(each) for _ in range(child.num_leaves)]

    def with_leaves(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments by position and by name, with other leaves."""
        by_position, by_name = jax.tree_util.tree_unflatten(self.tree, leaves)
        positions = list(by_position)
        for place, value in self.statics:
            if isinstance(place, int):
                positions[place] = value
            else:
                by_name[place] = value
        return positions, by_name


class Statics:
    """The static arguments of a jitted function.

    Args:
        positions: their positions, as in `jax.jit`.
        names: their names.
    """

    def __init__(self, positions: Sequence[int], names: Sequence[str]) -> None:
        self._positions = tuple(positions)
        self._names = frozenset(names)
        self._are_none = not self._positions and not self._names

    def given(self, args: tuple[Any, ...], named: dict[str, Any]) -> Given:
        """Return the arguments of a call.

        Raises:
            UsageError: a static value cannot be hashed.
        """
        if self._are_none:
            leaves, tree = jax.tree_util.tree_flatten((args, named))
            return Given(leaves, tree, ())
        found = {i: args[i] for i in self._positions if -len(args) <= i < len(args)}
        by_position = {i % len(args): value for i, value in found.items()}
        by_name = {name: value for name, value in named.items() if name in self._names}
        statics: tuple[tuple[int | str, Any], ...] = (
            *sorted(by_position.items(), key=lambda item: item[0]),
            *sorted(by_name.items(), key=lambda item: item[0]),
        )
        _hashable(statics)
        traced = tuple(None if i in by_position else value for i, value in enumerate(args))
        others = {name: None if name in by_name else value for name, value in named.items()}
        leaves, tree = jax.tree_util.tree_flatten((traced, others))
        return Given(leaves, tree, statics)


def _hashable(statics: Sequence[tuple[int | str, Any]]) -> None:
    for place, value in statics:
        try:
            hash(value)
        except TypeError:
            raise UsageError(
                f"static argument {place!r} has type {type(value).__name__}, which cannot be "
                "hashed: use a tuple or another immutable value, or make it an array"
            ) from None


class _Kinds(dict[type, "Callable[[Any], Hashable]"]):
    """Functions that return the kind of a leaf, by type; each type is inspected once."""

    def __missing__(self, kind: type) -> Callable[[Any], Hashable]:
        self[kind] = function = _kind_function(kind)
        return function


def _kind_function(kind: type) -> Callable[[Any], Hashable]:
    if issubclass(kind, jax.core.Tracer):
        return _none
    if issubclass(kind, jax.Array) or kind is type(jax.random.key(0)):  # a key is not an Array
        return _array
    if issubclass(kind, np.ndarray):
        return _numpy
    if issubclass(kind, _NUMBERS):
        return type
    return _none


def _array(array: Any) -> Hashable:
    if array.is_deleted():
        raise UnsupportedLeaf
    return array.aval, array.sharding, array.committed


def _numpy(array: np.ndarray) -> Hashable:
    if array.dtype.kind in "OSUMm":
        raise UnsupportedLeaf
    return array.shape, array.dtype


def _none(leaf: object) -> Hashable:
    raise UnsupportedLeaf


KINDS = _Kinds()
"""Functions for shape, dtype, weak type and place of a leaf, or the type of a number. They raise
`UnsupportedLeaf`."""


def refusal(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], name: str
) -> UsageError:
    """Return the error for a call with unfit leaves, which names their arguments."""
    try:
        given = inspect.signature(function).bind(*args, **named).arguments
    except (TypeError, ValueError):  # the call itself reports another error
        given = {str(i): value for i, value in enumerate(args)} | dict(named)
    try:
        leaves_of(given, name)
    except UsageError as error:
        return error
    return UsageError(
        f"another thread deleted arrays that {name} received: call it with existing arrays"
    )
