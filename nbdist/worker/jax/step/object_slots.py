"""Mutable objects of the user's program, and their contents by slot.

A slot is a place that Python code can rebind: an attribute, an item of a dict or a list, a
variable of an enclosing function, a global name, an attribute of a class.
"""

from __future__ import annotations

import functools
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
)
from typing import Any, Protocol

import jax
import numpy as np

Contents = dict[Any, Any]

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type(Ellipsis))
_CLOSED = (
    *_PLAIN,
    *(np.ndarray, np.generic, jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct),
    *(ModuleType, BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType, GeneratorType),
)
_DATA = {str, bytes, int, float, bool, complex, type(None), np.ndarray}
_OPEN_MODULES = ("types", "collections", "argparse")
"""Of Python's own, with `SimpleNamespace`, `UserDict` and the like."""

_SKIPPED = {
    *sys.stdlib_module_names,
    *("jax", "jaxlib", "numpy", "tensorflow", "torch", "nbdist", "wrapt"),
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


class Globals(_Items):
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


def is_data(value: Any) -> bool:
    """Whether it is a number, a text, an array of NumPy, or a tuple of those, as in data sets."""
    if type(value) is tuple:
        return all(map(is_data, value))
    return type(value) in _DATA


def leads_on(value: Any) -> bool:
    """Whether a container may be reached from it."""
    return not is_data(value) and not isinstance(value, _CLOSED)


def container_of(value: Any) -> Container | None:
    """The value with its slots; None if nothing in it can be rebound, or nothing of a step's.

    Its own type counts: a proxy, as TensorFlow has for dicts, gives itself out for another.
    """
    kind = type(value)
    if issubclass(kind, dict):
        return _Items(value)
    if issubclass(kind, (list, deque)):
        return _Elements(value)
    if issubclass(kind, CellType):
        return _Variable(value)
    if issubclass(kind, type):
        return _OfClass(value) if is_users(value.__module__) else None
    return Attributes(value) if is_open(value) else None


def is_open(value: Any) -> bool:
    """Whether it is an object with attributes of its own, as those of the user's classes."""
    kind: Any = type(value)
    if issubclass(kind, (*_CLOSED, dict, list, deque, type, FunctionType, MethodType, CellType)):
        return False
    if issubclass(kind, (tuple, functools.partial)) or not (kind.__dictoffset__ or _members(kind)):
        return False
    root = kind.__module__.partition(".")[0]
    if root in _SKIPPED and root not in _OPEN_MODULES:
        return False
    return not _is_of_nnx(value)


def _is_of_nnx(value: Any) -> bool:
    """Objects of Flax NNX are carried by `nnx_objects`."""
    if "flax.nnx" not in sys.modules:
        return False
    from nbdist.worker.jax.step import nnx

    return nnx.is_object(value)


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
