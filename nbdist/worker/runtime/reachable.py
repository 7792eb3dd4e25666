"""What a step can lay hands on: the objects behind the names that it reads."""

from __future__ import annotations

import sys
from collections import deque
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

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
    """Every object behind `names`, with the words that lead to it.

    Followed are tuples, lists and dicts, and the names that functions of the user's take from the
    namespace.

    Args:
        names: of the user's.
        namespace: the user's.
        more: gives further objects behind a value, each with the end of its path.
        most: the number of items above which a tuple, list or dict is not followed.
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
        elif isinstance(value, FunctionType) and value.__globals__ is namespace:
            used = code_names(value.__code__)
            waiting.extend((name, namespace[name]) for name in used if name in namespace)


def of_kinds(
    names: Iterable[str], namespace: dict[str, Any], kinds: tuple[type, ...]
) -> dict[str, Any]:
    """Of the objects behind `names`, those of these classes, by the words that lead there."""
    return {path: value for path, value in reachable(names, namespace) if isinstance(value, kinds)}


def names_in(paths: Iterable[str]) -> tuple[str, ...]:
    """The names that paths such as `losses['a']` begin with; words of our own are none."""
    names = dict.fromkeys(path.partition("[")[0] for path in paths)
    return tuple(name for name in names if name.isidentifier())


def code_names(code: CodeType) -> list[str]:
    """Return all names in the code, or in a function in it: of globals and of attributes."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return [*code.co_names, *(name for part in inner for name in code_names(part))]
