"""Names from outside that functions of the user read when they are called."""

from __future__ import annotations

import ast
import dis
import functools
from types import CodeType
from typing import TYPE_CHECKING, Any

from nbdist.cells.names import Names
from nbdist.worker.lifting.definitions import functions_of
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)
_READS = {"LOAD_GLOBAL", "LOAD_NAME"}


def read_by(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that functions, lambdas and generators read from outside.

    Args:
        nodes: their definitions, each before those inside of it; other nodes do not count.
    """
    found: set[str] = set()
    inner: set[int] = set()
    for node in nodes:
        if isinstance(node, _LATER) and id(node) not in inner:
            names = Names()
            names.visit(node)
            found |= names.read.keys() | _read_as_global(node)
            inner.update(map(id, ast.walk(node)))
    return found


def _read_as_global(function: ast.AST) -> set[str]:
    """Return the names that a function declares as global and reads, itself or in inner ones."""
    nodes = [*ast.walk(function)]
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    augmented = {
        n.target.id
        for n in nodes
        if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
    }
    return declared & (read | augmented)


def read_in(namespace: dict[str, Any], skipped: Container[tuple[str, int]] = ()) -> set[str]:
    """Return the global names that the user's functions and classes in a namespace read.

    Args:
        namespace: the namespace.
        skipped: functions that do not count, as name and first line.
    """
    found: set[str] = set()
    for given in list(namespace.values()):
        value = given.func if isinstance(given, functools.partial) else given
        if not callable(value) or (isinstance(value, type) and not is_users(value.__module__)):
            continue
        for function in functions_of(value):
            code = function.__code__
            known = (code.co_name, code.co_firstlineno) in skipped
            if function.__globals__ is namespace and not known:
                found |= _global_names(code)
    return found


@functools.cache
def _global_names(code: CodeType) -> frozenset[str]:
    """Return the global names that code and its nested functions read."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname in _READS)
    inner = (_global_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(own).union(*inner)
