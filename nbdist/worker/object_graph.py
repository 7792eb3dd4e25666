"""Mutable objects of the user's program: the walk through them, and their contents by slot.

A slot is a place that Python code can rebind: an attribute, an item of a dict or a list, a
variable of an enclosing function, a global name, an attribute of a class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import site
import sys
import sysconfig
from collections import OrderedDict, deque
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from nbdist.worker.code_names import globals_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Contents = dict[Any, Any]

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type(Ellipsis))
_CLOSED = (
    *_PLAIN,
    *(np.ndarray, np.generic, jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct),
    *(ModuleType, BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType, GeneratorType),
)
_OPEN_BUILTINS = (SimpleNamespace,)
_SKIPPED = {
    *sys.stdlib_module_names,
    *("jax", "jaxlib", "numpy", "tensorflow", "torch", "nbdist"),
    *("IPython", "ipykernel", "ipyparallel", "traitlets", "zmq", "tornado", "msgspec"),
}
"""Packages with objects that hold no state of a step, and lead far away."""

_INSTALLED = (*site.getsitepackages(), sysconfig.get_path("stdlib"))
_NOT_THE_USERS = {"In", "Out", "exit", "quit", "get_ipython", "strategy", "mesh"}
_EMPTY = CellType()


class Container(Protocol):
    """An object with slots.

    Attributes:
        value: the object.
    """

    value: Any

    def contents(self) -> Contents: ...

    def put(self, key: Any, item: Any) -> None: ...

    def remove(self, key: Any) -> None: ...

    def word(self, key: Any) -> str:
        """The slot as it is written behind the path of the object."""
        ...


class _Items:
    """A dict."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self.value = value
        self._kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict

    def contents(self) -> Contents:
        return dict.copy(self.value)  # at once: another thread may add to it

    def put(self, key: Any, item: Any) -> None:
        self._kind.__setitem__(self.value, key, item)

    def remove(self, key: Any) -> None:
        self._kind.__delitem__(self.value, key)

    def word(self, key: Any) -> str:
        return f"[{key!r}]"


class _Globals(_Items):
    """The global names of a module, or of the notebook."""

    def __init__(self, value: dict[Any, Any], module: str) -> None:
        super().__init__(value)
        self._before = f"{module}." if module else ""

    def contents(self) -> Contents:
        return {
            key: item
            for key, item in self.value.copy().items()
            if not key.startswith("_") and key not in _NOT_THE_USERS
        }

    def word(self, key: Any) -> str:
        return f"{self._before}{key}"


class _Elements:
    """A list or a deque."""

    def __init__(self, value: list[Any] | deque[Any]) -> None:
        self.value = value
        self._kind: Any = deque if isinstance(value, deque) else list

    def contents(self) -> Contents:
        return dict(enumerate(self._kind.copy(self.value)))

    def put(self, key: Any, item: Any) -> None:
        if key == len(self.value):
            self._kind.append(self.value, item)
        else:
            self._kind.__setitem__(self.value, key, item)

    def remove(self, key: Any) -> None:
        self._kind.__delitem__(self.value, key)

    def word(self, key: Any) -> str:
        return f"[{key}]"


class Attributes:
    """An object of a class, with a `__dict__` or with `__slots__`; properties are passed by."""

    def __init__(self, value: Any) -> None:
        kind: Any = type(value)
        self.value = value
        self._members: dict[str, Any] = _members(kind)
        self._own: dict[str, Any] = vars(value) if kind.__dictoffset__ else {}

    def contents(self) -> Contents:
        found = dict(self._own)
        for name, member in self._members.items():
            try:
                found[name] = member.__get__(self.value)
            except AttributeError:  # not set yet
                continue
        return found

    def put(self, key: Any, item: Any) -> None:
        if key in self._members:
            self._members[key].__set__(self.value, item)
        else:
            self._own[key] = item

    def remove(self, key: Any) -> None:
        if key in self._members:
            self._members[key].__delete__(self.value)
        else:
            del self._own[key]

    def word(self, key: Any) -> str:
        return f".{key}"


class _OfClass:
    """The attributes of a class of the user's."""

    def __init__(self, value: type) -> None:
        self.value = value

    def contents(self) -> Contents:
        return {key: item for key, item in vars(self.value).items() if not key.startswith("__")}

    def put(self, key: Any, item: Any) -> None:
        type.__setattr__(self.value, key, item)

    def remove(self, key: Any) -> None:
        type.__delattr__(self.value, key)

    def word(self, key: Any) -> str:
        return f".{key}"


class _Variable:
    """A variable of an enclosing function."""

    def __init__(self, value: CellType) -> None:
        self.value = value

    def contents(self) -> Contents:
        return {"": self.value.cell_contents} if self.value != _EMPTY else {}

    def put(self, key: Any, item: Any) -> None:
        del key
        self.value.cell_contents = item

    def remove(self, key: Any) -> None:
        del key
        del self.value.cell_contents

    def word(self, key: Any) -> str:
        del key
        return ""


@dataclasses.dataclass(frozen=True)
class Found:
    """A container that the walk came to.

    Attributes:
        path: leads to it, from a name of the namespace on; empty for the namespace itself.
        root: that name.
        origin: the name of the step that leads to it; None if none does.
    """

    container: Container
    path: str
    root: str
    origin: str | None


def walk(
    names: Iterable[str], namespace: dict[str, Any], apart: Iterable[Any] = ()
) -> Iterator[Found]:
    """All containers of the user's namespace, each once, by its shortest path.

    Args:
        names: those of the step. What they lead to comes first: what is in it, and what functions
            and methods take from their globals and from the functions around them.
        namespace: the user's.
        apart: values that are passed by.
    """
    yield Found(_Globals(namespace, ""), "", "", "")
    steps = _Walk(namespace, apart)
    yield from steps.go([(name, name, name, namespace[name]) for name in names])
    yield from steps.go([(name, name, None, namespace[name]) for name in _users(namespace)])


def _users(namespace: dict[str, Any]) -> list[str]:
    return list(_Globals(namespace, "").contents())


_Step = tuple[str, str, str | None, Any]
"""Path, root, origin and value."""


class _Walk:
    def __init__(self, namespace: dict[str, Any], apart: Iterable[Any]) -> None:
        self._namespace = namespace
        self._seen = {id(namespace), *map(id, apart)}
        self._alive: list[Any] = []  # made on the way, so that no id recurs

    def go(self, roots: Iterable[_Step]) -> Iterator[Found]:
        waiting = deque(roots)
        while waiting:
            path, root, origin, value = waiting.popleft()
            if isinstance(value, _CLOSED) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            container = container_of(value)
            if container is not None:
                yield Found(container, path, root, origin)
                inside = container.contents().items()
                words = [(container.word(key), item) for key, item in inside]
                waiting.extend((f"{path}{word}", root, origin, item) for word, item in words)
            waiting.extend((f"{path}{word}", root, origin, item) for word, item in _beyond(value))
            classes = (kind for kind in type(value).__mro__ if is_users(kind.__module__))
            waiting.extend((kind.__name__, root, origin, kind) for kind in classes)
            if isinstance(value, FunctionType):
                yield from self._outside(value, root, origin)
                waiting.extend(self._taken(value, root, origin))

    def _outside(self, function: FunctionType, root: str, origin: str | None) -> Iterator[Found]:
        """The globals of a function in another module of the user's."""
        names = function.__globals__
        if id(names) not in self._seen and is_users(function.__module__):
            self._seen.add(id(names))
            yield Found(_Globals(names, function.__module__), "", root, origin)

    def _taken(self, function: FunctionType, root: str, origin: str | None) -> Iterator[_Step]:
        """What a function of the user's reads from its globals."""
        names = function.__globals__
        if names is not self._namespace and not is_users(function.__module__):
            return
        for name in sorted(globals_of(function.__code__) & names.keys()):
            if names is self._namespace:
                yield name, name, origin, names[name]
            else:
                yield f"{function.__module__}.{name}", root, origin, names[name]


def container_of(value: Any) -> Container | None:
    """The value with its slots; None if nothing in it can be rebound, or nothing of a step's."""
    if isinstance(value, dict):
        return _Items(value)
    if isinstance(value, (list, deque)):
        return _Elements(value)
    if isinstance(value, CellType):
        return _Variable(value)
    if isinstance(value, type):
        return _OfClass(value) if is_users(value.__module__) else None
    return Attributes(value) if is_open(value) else None


def is_open(value: Any) -> bool:
    """Whether it is an object with attributes of its own, as those of the user's classes."""
    kind: Any = type(value)
    if isinstance(value, (*_CLOSED, dict, list, deque, type, FunctionType, MethodType, CellType)):
        return False
    if isinstance(value, (tuple, functools.partial)) or not (kind.__dictoffset__ or _members(kind)):
        return False
    if kind.__module__.partition(".")[0] in _SKIPPED and kind not in _OPEN_BUILTINS:
        return False
    return not _is_of_nnx(value)


def _is_of_nnx(value: Any) -> bool:
    """Objects of Flax NNX are carried by `nnx_objects`."""
    if "flax.nnx" not in sys.modules:
        return False
    from nbdist.worker import nnx_objects

    return nnx_objects.is_object(value)


def _beyond(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value leads to beside its slots, with words for the path."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", cell) for name, cell in cells)
        yield from (("", item) for item in value.__defaults__ or ())
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
    except ValueError:  # it is wrapped in itself
        return None


def _nodes(value: Any) -> Iterator[tuple[str, Any]]:
    """The children of a pytree of another kind."""
    children = jax.tree_util.default_registry.flatten_one_level(value)
    if children is not None:
        yield from ((f"[{i}]", item) for i, item in enumerate(children[0]))


@functools.cache
def is_users(module: str | None) -> bool:
    """Whether a module is the notebook, or a file of the user's that no package brought."""
    if module == "__main__":
        return True
    if module is None or module.partition(".")[0] in _SKIPPED or module not in sys.modules:
        return False
    file = sys.modules[module].__dict__.get("__file__") or _INSTALLED[0]
    return not file.startswith(_INSTALLED)


@functools.cache
def _members(kind: Any) -> dict[str, Any]:
    """The descriptors of `__slots__`."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }
