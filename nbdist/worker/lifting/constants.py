"""Values behind the functions of a step: a program that is compiled once contains them.

In Python, a loop that assigns `beta` or `self.metric` changes the next call of a function that
reads it. Functions that the user compiled with `tf.function` keep the first value, also in one
process, and are not followed.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from nbdist.worker.runtime.reachable import code_names
from nbdist.worker.runtime.user_modules import is_of_user, is_users

Read = Callable[[], Any]

PLAIN = (int, float, str)

CONTENTS = " in place"
"""End of the path of an array or a list whose contents are compared."""

_MISSING = object()

_SMALL = 1 << 16
"""Bytes of arrays whose contents are compared in each step, which takes 20 µs."""

_SAMPLED = 1 << 14
"""Number of elements of a large array that are compared in each step."""

MOST_ITEMS = 100
"""Length of lists whose items are compared. A longer one contains results or data."""


def is_same(value: Any, other: Any) -> bool:
    """Return True if a program that contains one of two values is right for the other too."""
    return value is other or (isinstance(value, (*PLAIN, bytes, tuple)) and _equal(value, other))


def _equal(value: Any, other: Any) -> bool:
    """Compare plain values, and tuples of them."""
    if isinstance(value, tuple):
        return (
            isinstance(other, tuple)
            and len(value) == len(other)
            and all(map(is_same, value, other))
        )
    return type(value) is type(other) and bool(value == other)


def contents(value: np.ndarray | list[Any]) -> Any:
    """Return a value that differs if an array or a list has been changed in place."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    if len(value) > MOST_ITEMS:
        return None
    return tuple(item if isinstance(item, PLAIN) else id(item) for item in value)


def _sample(value: np.ndarray | list[Any]) -> Any:
    """Return the contents of at most `_SAMPLED` elements of an array, at equal distances."""
    if isinstance(value, np.ndarray):
        return contents(value.reshape(-1)[:: -(-value.size // _SAMPLED) or 1])
    return contents(value)


class Constants:
    """Globals, closures, attributes and items of dicts that the functions of a step read.

    The search follows names: an attribute is read if any of the functions uses its name.

    Args:
        code: code of the step.
        values: values of the names that the step reads.

    Attributes:
        has_compiled: True if the step calls a function that `tf.function` has compiled.
    """

    def __init__(self, code: CodeType, values: Mapping[str, Any]) -> None:
        self._names = {*code_names(code), *_texts(code)}
        self.has_compiled = False
        self._seen: dict[int, Any] = {}
        self._reads: dict[str, Read] = {}
        self._filled: dict[str, np.ndarray | list[Any]] = {}
        known = -1
        while known != len(self._names):  # a function that is found later uses more names
            known = len(self._names)
            self._seen.clear()
            for name, value in values.items():
                self._follow(name, value)
        arrays = (v.nbytes for v in self._filled.values() if isinstance(v, np.ndarray))
        self._are_small = sum(arrays) <= _SMALL
        self._contents: dict[str, Any] = {}
        self._samples: list[Any] = []

    def __call__(self, *, begins: bool = True) -> dict[str, Any]:
        """Return the current values by path, such as `trainer.beta` or `train_step:beta`.

        Args:
            begins: True at the first step of a pass through the loop. In other steps, large
                arrays are read in full only if a sample of them has changed.
        """
        samples = [] if self._are_small else list(map(_sample, self._filled.values()))
        if begins or self._are_small or samples != self._samples:
            self._contents = {f"{path}{CONTENTS}": contents(v) for path, v in self._filled.items()}
            self._samples = samples
        return {path: read() for path, read in self._reads.items()} | self._contents

    def _follow(self, path: str, value: Any) -> None:
        if id(value) in self._seen or _is_fixed(value):
            return
        self._seen[id(value)] = value
        self.has_compiled |= inspect.getattr_static(value, "python_function", None) is not None
        if isinstance(value, MethodType):
            self._follow(path, value.__self__)
            self._follow(path, value.__func__)
        elif isinstance(value, FunctionType) and is_users(value.__module__):
            self._names |= {*code_names(value.__code__), *_texts(value.__code__)}
            for name, read in _of_function(value):
                self._found(f"{path}:{name}", read)
        elif isinstance(value, (np.ndarray, list)):
            self._filled[path] = value
        elif isinstance(value, dict):
            for key in self._names & {key for key in value if isinstance(key, str)}:
                self._found(f"{path}[{key!r}]", functools.partial(value.get, key, _MISSING))
        elif is_of_user(value) and type(value).__dictoffset__:
            self._follow_object(path, value)

    def _follow_object(self, path: str, value: Any) -> None:
        for name in self._names & vars(value).keys():
            self._found(f"{path}.{name}", functools.partial(vars(value).get, name, _MISSING))
        for name in set(self._names):
            shared = inspect.getattr_static(type(value), name, None)
            if isinstance(shared, PLAIN) and name not in vars(value):
                self._found(f"{path}.{name}", functools.partial(getattr, value, name))
            elif not isinstance(shared, property):
                self._follow(f"{path}.{name}", shared)

    def _found(self, path: str, read: Read) -> None:
        self._reads[path] = read
        self._follow(path, read())


def _is_fixed(value: Any) -> bool:
    """Return True for classes and packages: a notebook does not assign their attributes."""
    return isinstance(value, type) or (isinstance(value, ModuleType) and not is_of_user(value))


def _of_function(function: FunctionType) -> Iterator[tuple[str, Read]]:
    """Yield the globals and the closure of a function, with how to read them."""
    space = function.__globals__
    for name in code_names(function.__code__):
        if name in space and not _is_fixed(space[name]):
            yield name, functools.partial(space.get, name, _MISSING)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, functools.partial(_contents, cell)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return _MISSING


def _texts(code: CodeType) -> Iterable[str]:
    """Return the strings of code that may be keys of dicts."""
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)
