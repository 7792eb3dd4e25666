"""Who else holds what a step carries: other names, and functions of earlier cells.

What is carried is donated: an array that another name still means is copied first. A function that
takes an array from elsewhere than its arguments makes a constant of it, as in any `jax.jit`: right
for a table, and refused for what the step changes, which would be stale there.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import jax

from nbdist.errors import StepError
from nbdist.worker.jax.step.code_names import globals_of
from nbdist.worker.jax.step.object_slots import is_users
from nbdist.worker.runtime.reachable import code_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_EMPTY = CellType()


def holds_objects(value: Any) -> bool:
    """Whether a value is, or has in it, an object of Flax NNX."""
    if "flax.nnx" not in sys.modules:
        return False
    from nbdist.worker.jax.step import nnx

    return nnx.holds_objects(value)


def parts(value: Any) -> Iterator[Any]:
    """The arrays of a value, and its NNX variables, whose identity counts."""
    if "flax.nnx" not in sys.modules:
        yield from jax.tree.leaves(value)
        return
    from nbdist.worker.jax.step import nnx

    yield from nnx.parts(value)


def held_elsewhere(
    namespace: dict[str, Any], carried: set[str], objects: Iterable[Any]
) -> set[int]:
    """The identities of arrays that other names mean.

    Args:
        namespace: the user's.
        carried: names that the step carries.
        objects: values that are changed in place, so that other names see the change.
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
    except (TypeError, ValueError):  # keys that cannot be sorted, a state that is used up
        return []


def check_captures(
    closed: dict[str, int],
    carried: set[str],
    namespace: dict[str, Any],
    objects: Iterable[Any],
    words: set[str],
) -> None:
    """Refuse functions that take what the step carries from elsewhere than their arguments.

    Args:
        closed: names that the step reads and that are no arguments of it, with their lines.
        carried: names that the step assigns.
        namespace: the user's.
        objects: values that are changed in place.
        words: all names in the step's code, among them those of the methods that it calls.

    Raises:
        StepError: which name takes what.
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
                    f"`{name}` (line {line}) takes `{taken}` from outside, and the step carries "
                    f"it: give it to `{name}` as an argument"
                )
            if any(_is_split(part) for part in _parts_of_any(value)):
                raise StepError(
                    f"`{name}` (line {line}) takes `{taken}` from outside, and it is split over "
                    f"the workers: give it to `{name}` as an argument"
                )
        for attribute, value in _attributes(namespace[name]):
            if holds_objects(value):
                raise StepError(
                    f"`{name}` (line {line}) holds NNX objects (.{attribute}) and is none itself: "
                    f"name them in the step, or make its class an nnx.Module"
                )


def _methods(value: Any, words: set[str]) -> list[FunctionType]:
    """Of an object of the user's classes, the methods that code with these words may call."""
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
    """What a function, and the functions that it calls, take from outside: names and values.

    The flag says whether it is a name of the namespace.
    """
    if isinstance(value, functools.partial):
        yield from ((str(key), given, False) for key, given in _given(value))
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


def _given(partial: functools.partial[Any]) -> Iterator[tuple[object, Any]]:
    yield from enumerate(partial.args)
    yield from partial.keywords.items()


def _closure(function: FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell.cell_contents) for name, cell in cells if cell != _EMPTY]


def _is_split(part: Any) -> bool:
    """Whether no rank has all of an array: JAX cannot make a constant of it."""
    return isinstance(part, jax.Array) and not (
        part.is_fully_addressable or part.is_fully_replicated
    )


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Those of an object of the user's own class."""
    if isinstance(value, (ModuleType, FunctionType, type)):
        return []
    try:
        return list(vars(value).items())
    except TypeError:  # it has slots, or is built in
        return []
