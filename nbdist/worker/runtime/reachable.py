"""Objects that a step can reach through the names that it reads."""

from __future__ import annotations

import sys
from collections import deque
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from nbdist.worker.runtime.user_modules import NOTEBOOK, is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    More = Callable[[Any], Iterable[tuple[str, Any]]]


def reachable(
    names: Iterable[str],
    namespace: dict[str, Any],
    *,
    more: More = lambda _value: (),
    most: int = sys.maxsize,
) -> Iterator[tuple[str, Any]]:
    """Yield every object behind `names`, with the path to it.

    The search follows tuples, lists and dicts, the global names that functions of the user read,
    and the names of the user's modules. The paths of these contain the module: `helpers.model`.

    Args:
        names: names in the user's namespace.
        namespace: the user's namespace.
        more: returns further objects behind a value, each with the end of its path.
        most: largest number of items of a tuple, list or dict that is followed.
    """
    waiting = deque((name, namespace[name]) for name in names if name in namespace)
    seen = set()
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        waiting.extend((f"{path}{end}", part) for end, part in more(value))
        if isinstance(value, (dict, tuple, list)) and len(value) > most:
            continue
        if isinstance(value, dict):
            waiting.extend((f"{path}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, (tuple, list)):
            waiting.extend((f"{path}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, MethodType):
            waiting.append((path, value.__self__))
        elif isinstance(value, FunctionType):
            waiting.extend(_read_by(value, namespace))
        elif isinstance(value, ModuleType) and is_users(value.__name__):
            own = vars(value).items()
            waiting.extend((f"{path}.{name}", part) for name, part in own if name[:2] != "__")


def _read_by(function: FunctionType, namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function of the user reads."""
    module, own = function.__module__, function.__globals__
    is_in_notebook = own is namespace or module == NOTEBOOK
    if is_in_notebook or is_users(module):
        start = "" if is_in_notebook else f"{module}."
        for name in code_names(function.__code__):
            if name in own:
                yield f"{start}{name}", own[name]


def of_kinds(
    names: Iterable[str], namespace: dict[str, Any], kinds: tuple[type, ...]
) -> dict[str, Any]:
    """Return the objects behind `names` that are instances of `kinds`, by path."""
    return {path: value for path, value in reachable(names, namespace) if isinstance(value, kinds)}


def names_in(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the names at the start of paths such as `losses['a']`; other words are skipped."""
    names = dict.fromkeys(path.partition("[")[0] for path in paths)
    return tuple(name for name in names if name.isidentifier())


def code_names(code: CodeType) -> list[str]:
    """Return all names in the code and its nested functions: globals and attributes."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return [*code.co_names, *(name for part in inner for name in code_names(part))]
