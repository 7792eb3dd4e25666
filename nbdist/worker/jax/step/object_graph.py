"""Traversal of the mutable objects of the user's program."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import deque
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.jax.step.code_names import globals_of
from nbdist.worker.jax.step.object_slots import Globals, container_of, leads_on
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.worker.jax.step.object_slots import Container


@dataclasses.dataclass(frozen=True)
class Found:
    """Container that the traversal found.

    Attributes:
        path: Path from a name of the namespace; empty for the namespace itself.
        root: That name.
        origin: Name of the step that leads to the container; None if none does.
    """

    container: Container
    path: str
    root: str
    origin: str | None


def walk(
    names: Iterable[str], namespace: dict[str, Any], apart: Iterable[Any] = ()
) -> Iterator[Found]:
    """Yield all containers of the user's namespace, each once, with its shortest path.

    Args:
        names: Names of the step. Containers that they lead to come first, including those that
            functions and methods use from their globals and enclosing functions.
        namespace: Namespace of the user.
        apart: Values that are skipped.
    """
    users = Globals(namespace, "")
    yield Found(users, "", "", "")
    steps = _Walk(namespace, apart)
    yield from steps.go([(name, name, name, namespace[name]) for name in names])
    yield from steps.go([(name, name, None, namespace[name]) for name in [*users.contents()]])


_Step = tuple[str, str, str | None, Any]
"""Path, root, origin and value."""


class _Walk:
    def __init__(self, namespace: dict[str, Any], apart: Iterable[Any]) -> None:
        self._namespace = namespace
        self._seen = {id(namespace), *map(id, apart)}
        self._alive: list[Any] = []  # keeps values alive: ids stay unique

    def go(self, roots: Iterable[_Step]) -> Iterator[Found]:
        waiting = deque(roots)
        while waiting:
            path, root, origin, value = waiting.popleft()
            if not leads_on(value) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            container = container_of(value)
            if container is not None:
                yield Found(container, path, root, origin)
                for key, item in container.contents().items():
                    if leads_on(item):
                        waiting.append((f"{path}{container.word(key)}", root, origin, item))
            waiting.extend((f"{path}{word}", root, origin, item) for word, item in _beyond(value))
            classes = (kind for kind in type(value).__mro__ if is_users(kind.__module__))
            waiting.extend((kind.__name__, root, origin, kind) for kind in classes)
            if isinstance(value, FunctionType):
                yield from self._outside(value, root, origin)
                waiting.extend(self._taken(value, root, origin))

    def _outside(self, function: FunctionType, root: str, origin: str | None) -> Iterator[Found]:
        """Yield the globals of a function in another module of the user."""
        names = function.__globals__
        if id(names) not in self._seen and is_users(function.__module__):
            self._seen.add(id(names))
            yield Found(Globals(names, function.__module__), "", root, origin)

    def _taken(self, function: FunctionType, root: str, origin: str | None) -> Iterator[_Step]:
        """Yield the global names that a function of the user reads."""
        names = function.__globals__
        if names is not self._namespace and not is_users(function.__module__):
            return
        for name in sorted(globals_of(function.__code__) & names.keys()):
            if names is self._namespace:
                yield name, name, origin, names[name]
            else:
                yield f"{function.__module__}.{name}", root, origin, names[name]


def _beyond(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a value leads to besides its slots, with path suffixes."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", cell) for name, cell in cells)
        yield from (("", item) for item in value.__defaults__ or ())
        yield from (("", item) for item in (value.__kwdefaults__ or {}).values())
        yield from ((f".{key}", item) for key, item in vars(value).items())
    elif isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f".{key}", item) for key, item in value.keywords.items())
        yield from ((f".args[{i}]", item) for i, item in enumerate(value.args))
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
    elif isinstance(value, property):
        yield from (("", accessor) for accessor in (value.fget, value.fset))
    elif isinstance(value, (tuple, set, frozenset)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif callable(value) and not isinstance(value, type):
        yield "", _unwrapped(value)
    elif not isinstance(value, (dict, list, deque, CellType, type)):
        yield from _nodes(value)


def _unwrapped(value: Any) -> Any:
    try:
        return inspect.unwrap(value)
    except ValueError:  # it wraps itself
        return None


def _nodes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the children of any other pytree node."""
    children = jax.tree_util.default_registry.flatten_one_level(value)
    if children is not None:
        yield from ((f"[{i}]", item) for i, item in enumerate(children[0]))
