"""Modules of the user: the notebook, and files outside of the installed packages."""

from __future__ import annotations

import sys
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from nbdist.utils.installed import is_users_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NOTEBOOK = "__main__"
"""Module of the functions and classes of cells."""


def is_users(module: str | None) -> bool:
    """Return True if a module is the notebook, or a file of the user outside any package."""
    if module == NOTEBOOK:
        return True
    loaded = sys.modules.get(module or "")
    file = None if loaded is None else vars(loaded).get("__file__")
    return isinstance(file, str) and is_users_file(str(module), file)


def is_of_user(value: Any) -> bool:
    """Return True if the user's code defines a function, class or module, or an object's class."""
    if isinstance(value, ModuleType):
        return is_users(value.__name__)
    if isinstance(value, (FunctionType, MethodType, type)):
        return is_users(value.__module__)
    return is_users(type(value).__module__)


def behind(values: Iterable[Any]) -> Iterator[ModuleType]:
    """Yield the user's modules that define values, and those that these modules use in turn.

    The notebook itself is left out.
    """
    waiting, seen = list(values), {NOTEBOOK}
    while waiting:
        value = waiting.pop()
        for name in _modules_of(value):
            if name not in seen and is_users(name):
                seen.add(name)
                yield sys.modules[name]
                waiting.extend(vars(sys.modules[name]).values())


def _modules_of(value: Any) -> Iterator[str]:
    """Yield the names of the modules that a value is, is defined in, or has its class from."""
    value = getattr(value, "python_function", value) if callable(value) else value
    if isinstance(value, ModuleType):
        yield value.__name__
    elif isinstance(value, type) or callable(value):
        yield str(getattr(value, "__module__", ""))
    yield type(value).__module__
