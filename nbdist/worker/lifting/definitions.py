"""Code of functions and classes that exist already, replaced by code with lifted loops."""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable, Iterator


def replace_code(definitions: Iterable[Any], code: CodeType) -> None:
    """Replace the code of functions, and of the methods of classes.

    Args:
        definitions: functions and classes at the top of a file, also with decorators.
        code: code of the file, or of a part of it.
    """
    codes = {part.co_qualname: part for part in _parts(code)}
    for definition in definitions:
        for function in functions_of(definition):
            found = codes.get(function.__qualname__)
            if found is not None and found.co_freevars == function.__code__.co_freevars:
                function.__code__ = found


def _parts(code: CodeType) -> Iterator[CodeType]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _parts(part)


def functions_of(definition: Any) -> Iterator[FunctionType]:
    """Yield a function, or the methods, properties and static methods of a class."""
    found = list(vars(definition).values()) if isinstance(definition, type) else [definition]
    for value in found:
        plain = getattr(value, "__func__", value)  # of class and static methods
        plain = getattr(plain, "fget", plain)  # of properties
        plain = getattr(plain, "python_function", plain)  # of tf.function
        plain = inspect.unwrap(plain) if callable(plain) else plain
        if isinstance(plain, FunctionType):
            yield plain


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Return the first line of a definition, with its decorators."""
    return min(part.lineno for part in (node, *node.decorator_list))
