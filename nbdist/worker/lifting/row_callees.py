"""Functions of the user that convert rows of a batch, such as `def normalize(x): ...`.

A rank calls them with its own rows. They contain assignments and a `return` with the expressions of
`row_conversions.py`. Their calls are those of the loop: a call that needs all rows receives them.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from nbdist.worker.data import row_functions
from nbdist.worker.data.batch_array import has_rows
from nbdist.worker.data.row_functions import RowFunction
from nbdist.worker.lifting.batch_aliases import Aliases
from nbdist.worker.lifting.callees import tree_of
from nbdist.worker.lifting.row_conversions import (
    OPERATORS,
    RowCalls,
    Scope,
    converts,
    is_free,
    unpacks,
)
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.cells.loops import Callees

_CALLS = "nbdist_calls"
"""Name of the object with the method `call`, in the code of a function that converts rows."""


def bound_by(target: ast.AST | None) -> list[str]:
    """Return the names in a target or a statement; empty if it contains anything else."""
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Assign(targets=[inner]) | ast.AugAssign(target=inner):
            return bound_by(inner)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            found = [bound_by(part) for part in parts]
            return [name for names in found for name in names] if all(found) else []
    return []


def is_conversion(statement: ast.AST, scope: Scope, aliases: Aliases) -> bool:
    """Return True for a statement that only names and converts parts of a batch.

    Args:
        statement: the statement.
        scope: its names.
        aliases: values of the names. Assigned ones are noted.
    """
    bound = bound_by(statement)
    match statement:
        case ast.Assign(targets=[target], value=value) if bound and (
            converts(value, scope) or (len(bound) > 1 and unpacks(value, scope))
        ):
            aliases.assign(target, value)
            return True
        case ast.AugAssign(target=ast.Name(id=name), op=operator, value=value):
            is_known = name in scope.batches and isinstance(operator, OPERATORS)
            return is_known and is_free(value, scope) and aliases.are_free_of(name)
    return False


class RowCallees:
    """Functions of the user that convert rows, found by name before the cell runs.

    Args:
        callees: knowledge about the objects that the cell calls.
    """

    def __init__(self, callees: Callees) -> None:
        self._callees = callees
        self._visited: set[str] = set()

    def __call__(self, call: ast.Call, are_batches: Sequence[bool]) -> bool:
        """Return True if the called function converts rows; see `Scope.converts`."""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        found = self._callees.definitions(name)
        if len(found) != 1 or name in self._visited:
            return False
        names = _batches_of(found[0], call, are_batches)
        self._visited.add(name)
        try:
            return names is not None and _converts_rows(found[0], Scope(names, self))
        finally:
            self._visited.remove(name)


def _batches_of(function: ast.AST, call: ast.Call, are_batches: Sequence[bool]) -> set[str] | None:
    """Return the parameters of a function that receive batches; None for other forms."""
    if not isinstance(function, ast.FunctionDef) or not _is_simple(function):
        return None
    names = [parameter.arg for parameter in function.args.args]
    keywords = [word.arg or "" for word in call.keywords]
    if any(isinstance(value, ast.Starred) for value in call.args) or len(call.args) > len(names):
        return None
    given = [*names[: len(call.args)], *keywords]
    found = {name for name, is_batch in zip(given, are_batches, strict=True) if is_batch}
    return found if {*given} <= {*names} else None


def _is_simple(function: ast.FunctionDef) -> bool:
    given = function.args
    others = given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg
    return not others and not function.decorator_list


def _converts_rows(function: ast.AST, scope: Scope) -> bool:
    """Return True if a function only converts the rows of some parameters, and returns them."""
    assert isinstance(function, ast.FunctionDef)
    first = int(ast.get_docstring(function) is not None)
    *statements, last = function.body[first:] or function.body
    names = {*scope.batches}
    scope, aliases = scope._replace(batches=names), Aliases(names, are_shared=True)
    for statement in statements:
        if is_conversion(statement, scope, aliases):
            names.update(bound_by(statement))
        elif not _is_apart(statement, scope):
            return False
    value = last.value if isinstance(last, ast.Return) else None
    return value is not None and converts(value, scope)


def _is_apart(statement: ast.stmt, scope: Scope) -> bool:
    """Return True for an assignment of other values, such as `scale = 1 / 255`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name not in scope.batches and is_free(value, scope)
    return False


def call(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the result of a call in a conversion, computed from a rank's own rows if possible."""
    if any(map(has_rows, (*arguments, *options.values()))):
        function = _of_rows(function, arguments, options)
        if getattr(function, "__name__", "") in row_functions.MAPS and len(arguments) == 2:
            first, tree = arguments
            arguments = _of_rows(first, (_leaf(tree),), {}), tree
    return row_functions.call(function, *arguments, **options)


def _leaf(tree: Any) -> Any:
    """Return the first batch array of a tree."""
    while type(tree) in (dict, list, tuple):
        parts = tree.values() if isinstance(tree, dict) else tree
        tree = next(part for part in parts if has_rows(part))
    return tree


def _of_rows(function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return a function of the user that computes with rows; others as they are.

    A compiled function may compute in other types than its code outside of `jax.jit`.
    """
    if type(function) is not FunctionType or not is_users(function.__module__):
        return function
    try:
        given = inspect.signature(function).bind(*arguments, **options).arguments
    except TypeError:
        return function  # whose call raises it
    names = frozenset(name for name, value in given.items() if has_rows(value))
    version = _row_version(function, function.__code__, names)
    if version is None:
        return function
    version.__defaults__ = function.__defaults__
    return RowFunction(version)


@functools.lru_cache(maxsize=64)
def _row_version(
    function: FunctionType, code: CodeType, names: frozenset[str]
) -> FunctionType | None:
    """Return a function whose calls are those of this module; None if it may use rows otherwise.

    Args:
        function: a function of the user.
        code: its code, which a reload of its module may replace.
        names: parameters that are batches.
    """
    definition = next(iter(tree_of(function)), None)
    if function.__closure__ or not isinstance(definition, ast.FunctionDef):
        return None
    if not _is_simple(definition) or not _is_code_of(definition, code):
        return None
    if not _converts_rows(definition, Scope(names, _may_convert)):
        return None
    given = definition.args
    definition.decorator_list, definition.returns, given.defaults = [], None, []
    for parameter in given.args:
        parameter.annotation = None
    definition.body = [RowCalls(_CALLS).visit(statement) for statement in definition.body]
    module = ast.parse(f"def make({_CALLS}): return {definition.name}")
    assert isinstance(module.body[0], ast.FunctionDef)
    module.body[0].body.insert(0, definition)
    ast.increment_lineno(module, function.__code__.co_firstlineno - 1)
    own: dict[str, Any] = {}
    program = compile(ast.fix_missing_locations(module), code.co_filename, "exec")
    exec(program, function.__globals__, own)  # noqa: S102
    made: FunctionType = own["make"](_Calls)
    return made


def _is_code_of(definition: ast.FunctionDef, code: CodeType) -> bool:
    """Return True if a definition has this code: the file of a module may have changed since."""
    module = compile(ast.Module([definition], []), code.co_filename, "exec")
    return any(isinstance(c, CodeType) and _content(c) == _content(code) for c in module.co_consts)


def _content(code: CodeType) -> tuple[Any, ...]:
    """Return what code does, without its lines.

    Python calls `np.sqrt` with other instructions if the same module contains `import numpy as np`.
    """
    found = []
    for one in dis.get_instructions(code):
        if one.opname not in ("CACHE", "PUSH_NULL"):
            value = _content(one.argval) if isinstance(one.argval, CodeType) else one.argval
            name = "LOAD_ATTR" if one.opname == "LOAD_METHOD" else one.opname
            found.append((name, type(value), repr(value)))
    return code.co_name, code.co_varnames, code.co_argcount, *found


def _may_convert(_call: ast.Call, _are_batches: Sequence[bool]) -> bool:
    """Return True: a call of another function gets its own rows, or all."""
    return True


class _Calls:
    """The calls of a function that converts rows; see `RowCalls`."""

    call = staticmethod(call)
    row_function = RowFunction
