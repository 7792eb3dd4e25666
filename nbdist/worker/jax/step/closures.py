"""Other references to the state that a step carries: names and functions of earlier cells.

Carried arrays are donated, so an array with another name is copied first. A function that captures
an array makes a constant of it, as in any `jax.jit`. This is refused if the step carries the array:
the constant would be stale.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import jax

from nbdist.errors import StepError
from nbdist.worker.jax.step.code_names import globals_of
from nbdist.worker.runtime.reachable import code_names
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_EMPTY = CellType()


def holds_objects(value: Any) -> bool:
    """Return True if a value is or contains an object of Flax NNX."""
    if "flax.nnx" not in sys.modules:
        return False
    from nbdist.worker.jax.step import nnx

    return nnx.holds_objects(value)


class FunctionalNames(Protocol):
    """Names with functional state of Flax NNX, which a step uses as pytrees."""

    names: frozenset[str]

    def shared(self, values: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the name, the variable and its value, for variables of several names."""
        ...

    def check(self, before: list[tuple[str, Any, Any]]) -> None:
        """Check that a step changed no variable of several names in place.

        Raises:
            StepError: A variable changed.
        """
        ...


class NoFunctionalNames:
    """Names with functional state, of a program that does not use Flax NNX."""

    names: frozenset[str] = frozenset()

    def shared(self, values: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        del values
        return []

    def check(self, before: list[tuple[str, Any, Any]]) -> None:
        del before


def functional_names(
    assigned: dict[str, Any], read: dict[str, Any], lines: dict[str, int]
) -> FunctionalNames:
    """Return the names with functional state of Flax NNX.

    Args:
        assigned: Values by name that the step assigns.
        read: Values by name that the step only reads.
        lines: First line of each name.
    """
    objects = {n: value for n, value in {**assigned, **read}.items() if holds_objects(value)}
    if not objects:
        return NoFunctionalNames()
    from nbdist.worker.jax.step.nnx_state import FunctionalState

    return FunctionalState(
        {name: value for name, value in objects.items() if name in assigned},
        {name: value for name, value in objects.items() if name not in assigned},
        lines,
    )


def _is_functional(value: Any) -> bool:
    from nbdist.worker.jax.step import nnx_state

    return nnx_state.is_functional(value)


def parts(value: Any) -> Iterator[Any]:
    """Yield the arrays of a value, and its NNX variables: their identity matters."""
    if "flax.nnx" not in sys.modules:
        yield from jax.tree.leaves(value)
        return
    from nbdist.worker.jax.step import nnx

    yield from nnx.parts(value)


def held_elsewhere(
    namespace: dict[str, Any], carried: set[str], objects: Iterable[Any]
) -> set[int]:
    """Return the identities of arrays that other names refer to.

    Args:
        namespace: Namespace of the user.
        carried: Names that the step carries.
        objects: Values that the step changes in place; other names see the change.
    """
    shared = {id(part) for value in objects for part in parts(value)}
    held: set[int] = set()
    for name, value in namespace.items():
        if name in carried or isinstance(value, (ModuleType, FunctionType, type)):
            continue
        for part in _parts_of_any(value):
            if id(part) not in shared:
                held.update(id(array) for array in jax.tree.leaves(part))
    return held


def _parts_of_any(value: Any) -> list[Any]:
    try:
        return list(parts(value))
    except (TypeError, ValueError):  # unsortable keys, or a state that is exhausted
        return []


def check_captures(
    closed: dict[str, int],
    carried: set[str],
    namespace: dict[str, Any],
    objects: Iterable[Any],
    words: set[str],
) -> None:
    """Refuse functions that capture carried values instead of receiving them as arguments.

    Args:
        closed: Names that the step reads but does not receive as arguments, with their lines.
        carried: Names that the step assigns.
        namespace: Namespace of the user.
        objects: Values that the step changes in place.
        words: All names in the step's code, including those of called methods.

    Raises:
        StepError: A function captures carried or sharded values, or an object contains NNX objects.
    """
    shared = {id(part) for value in objects for part in parts(value)}
    for name, line in closed.items():
        takers = [namespace[name], *_methods(namespace[name], words)]
        seen: set[int] = set()
        taken_by = [_taken(taker, namespace, seen) for taker in takers]
        for taken, value, is_global in itertools.chain(*taken_by):
            stale = is_global and taken in carried
            if stale or (holds_objects(value) and shared & {id(part) for part in parts(value)}):
                raise StepError(
                    f"`{name}` (line {line}) reads `{taken}` from outside, but the step carries "
                    f"it: pass it to `{name}` as an argument"
                )
            if any(_is_split(part) for part in _parts_of_any(value)):
                raise StepError(
                    f"`{name}` (line {line}) reads `{taken}` from outside, but it is sharded over "
                    f"the workers: pass it to `{name}` as an argument"
                )
        for attribute, value in _attributes(namespace[name]):
            if holds_objects(value) and not _is_functional(value):
                raise StepError(
                    f"`{name}` (line {line}) contains NNX objects (.{attribute}) but is not one: "
                    f"use their names in the step, or make its class an nnx.Module"
                )


def _methods(value: Any, words: set[str]) -> list[FunctionType]:
    """Return the methods of the user's classes that code with these names may call."""
    kinds = [kind for kind in type(value).__mro__ if is_users(kind.__module__)]
    waiting = [(name, item) for kind in kinds for name, item in vars(kind).items()]
    reached, found = {*words, "__call__"}, []
    while used := [pair for pair in waiting if pair[0] in reached]:
        waiting = [pair for pair in waiting if pair[0] not in reached]
        for _, item in used:
            function = item.fget if isinstance(item, property) else _unwrapped(item)
            if isinstance(function, FunctionType):
                found.append(function)
                reached.update(code_names(function.__code__))
    return found


def _unwrapped(item: Any) -> Any:
    if isinstance(item, (staticmethod, classmethod)):
        item = item.__func__
    return inspect.unwrap(item) if callable(item) else item


def _taken(
    value: Any, namespace: dict[str, Any], seen: set[int]
) -> Iterator[tuple[str, Any, bool]]:
    """Yield the values that a function and its callees capture, with their names.

    The flag is True for names of the namespace.
    """
    if isinstance(value, functools.partial):
        given = *enumerate(value.args), *value.keywords.items()
        yield from ((str(key), item, False) for key, item in given)
        value = value.func
    function = inspect.unwrap(value) if callable(value) else value
    if isinstance(function, MethodType):
        yield "self", function.__self__, False
        function = function.__func__
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    outside = [(*item, False) for item in _closure(function)]
    if function.__globals__ is namespace:
        names = sorted(globals_of(function.__code__))
        outside += [(name, namespace[name], True) for name in names if name in namespace]
    for name, inner, is_global in outside:
        yield name, inner, is_global
        yield from _taken(inner, namespace, seen)


def _closure(function: FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell.cell_contents) for name, cell in cells if cell != _EMPTY]


def _is_split(part: Any) -> bool:
    """Return True if no rank has all of an array: JAX cannot make a constant of it."""
    return isinstance(part, jax.Array) and not (
        part.is_fully_addressable or part.is_fully_replicated
    )


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object of the user's own class."""
    if isinstance(value, (ModuleType, FunctionType, type)):
        return []
    try:
        return list(vars(value).items())
    except TypeError:  # it has slots, or is built in
        return []
