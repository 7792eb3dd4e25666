"""Names in the code of a function: the names that it uses, and those that it changes later."""

from __future__ import annotations

import ast
import dis
from types import CodeType

_CHANGES = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"),
    *("clear", "pop", "popleft", "popitem", "remove", "discard"),
}
"""Methods that change lists, dicts, sets and deques."""

_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def globals_of(code: CodeType) -> set[str]:
    """Return the global names that the code, or a function in it, reads."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in _READS}
    nested = (part for part in code.co_consts if isinstance(part, CodeType))
    return own.union(*map(globals_of, nested))


def changed_later(source: str) -> set[str]:
    """Return names of containers that inner functions change, at whatever time they are called.

    Args:
        source: Source of the outer function.
    """
    (outer,) = ast.parse(source).body
    inner = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(outer) if node is not outer and isinstance(node, inner)]
    nodes = [node for function in functions for node in ast.walk(function)]
    return {name for node in nodes for name in _changed_by(node)}


def _changed_by(node: ast.AST) -> list[str]:
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=method) if method in _CHANGES:
            return [name]
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return [name]
    return []
