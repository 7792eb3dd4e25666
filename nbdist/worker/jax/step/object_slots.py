"""Mutable objects of the user's program, and their contents by slot.

A slot is a binding that Python code can change. It is an attribute of an object or a class, or an
item of a dict or a list. It can also be a variable of an enclosing function, or a global name.
"""

from __future__ import annotations

import functools
import sys
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
)
from typing import Any, Protocol

import jax
import numpy as np

from nbdist.worker.runtime.user_modules import is_users

Contents = dict[Any, Any]

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type(Ellipsis))
_CLOSED = (
    *_PLAIN,
    *(np.ndarray, np.generic, jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct),
    *(ModuleType, BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType, GeneratorType),
)
_DATA = {str, bytes, int, float, bool, complex, type(None), np.ndarray}
_OPEN_MODULES = ("types", "collections", "argparse")
"""Standard modules with open classes such as `SimpleNamespace` and `UserDict`."""

_SKIPPED = {
    *sys.stdlib_module_names,
    *("jax", "jaxlib", "numpy", "tensorflow", "torch", "nbdist", "wrapt"),
    *("IPython", "ipykernel", "ipyparallel", "traitlets", "zmq", "tornado", "msgspec"),
}
"""Packages whose objects contain no state of a step and refer to many other objects."""

_NOT_THE_USERS = {"In", "Out", "exit", "quit", "get_ipython", "strategy", "mesh"}
_EMPTY = CellType()


class Container(Protocol):
    """Object with slots.

    Attributes:
        value: The object.
    """

    value: Any

    def contents(self) -> Contents: ...

    def put(self, key: Any, item: Any) -> None: ...

    def remove(self, key: Any) -> None: ...

    def word(self, key: Any) -> str:
        """Return the slot as a suffix of the object's path."""
        ...


class _Items:
    """Items of a dict."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self.value = value
        self._kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict

    def contents(self) -> Contents:
        return dict.copy(self.value)  # atomic: another thread may add an item

    def put(self, key: Any, item: Any) -> None:
        self._kind.__setitem__(self.value, key, item)

    def remove(self, key: Any) -> None:
        self._kind.__delitem__(self.value, key)

    def word(self, key: Any) -> str:
        return f"[{key!r}]"


class Globals(_Items):
    """Global names of a module or of the notebook."""

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
    """Elements of a list or a deque."""

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
    """Attributes in `__dict__` or `__slots__` of an object; properties are skipped."""

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


class _ClassAttributes:
    """Attributes of a class of the user."""

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
    """Variable of an enclosing function."""

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


def is_data(value: Any) -> bool:
    """Return True if a value is a number, a string, a NumPy array, or a tuple of those."""
    if type(value) is tuple:
        return all(map(is_data, value))
    return type(value) in _DATA


def leads_on(value: Any) -> bool:
    """Return True if a container may be reachable from a value."""
    return not is_data(value) and not isinstance(value, _CLOSED)


def container_of(value: Any) -> Container | None:
    """Return the value with its slots; None if it has none that a step may rebind.

    Uses the value's own type: a proxy, such as TensorFlow's for dicts, pretends to be another.
    """
    kind = type(value)
    if issubclass(kind, dict):
        return _Items(value)
    if issubclass(kind, (list, deque)):
        return _Elements(value)
    if issubclass(kind, CellType):
        return _Variable(value)
    if issubclass(kind, type):
        return _ClassAttributes(value) if is_users(value.__module__) else None
    return Attributes(value) if is_open(value) else None


def is_open(value: Any) -> bool:
    """Return True if a value is an object with its own attributes, as of the user's classes."""
    kind: Any = type(value)
    if issubclass(kind, (*_CLOSED, dict, list, deque, type, FunctionType, MethodType, CellType)):
        return False
    if issubclass(kind, (tuple, functools.partial)) or not (kind.__dictoffset__ or _members(kind)):
        return False
    root = kind.__module__.partition(".")[0]
    if root in _SKIPPED and root not in _OPEN_MODULES:
        return False
    return not is_of_nnx(value)


def is_of_nnx(value: Any) -> bool:
    """Return True if a value is an object of Flax NNX; `nnx.Objects` carries these."""
    if "flax.nnx" not in sys.modules:
        return False
    from nbdist.worker.jax.step import nnx

    return nnx.is_object(value)


@functools.cache
def _members(kind: Any) -> dict[str, Any]:
    """Return the descriptors of `__slots__`."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }
