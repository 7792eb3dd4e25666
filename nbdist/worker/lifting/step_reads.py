"""Values that a step reads by name: which ones it may change, and arrays in objects."""

from __future__ import annotations

import ast
import inspect
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from nbdist.cells.effects import root_name
from nbdist.worker.lifting.callees import tree_of, value_of
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def updated_in_place(
    statements: Sequence[ast.stmt], namespace: Mapping[str, Any], depth: int = 4
) -> set[str]:
    """Return the names of values that called functions of the user update, as in `w -= g`.

    This changes an array of NumPy in place. An array of JAX in its place would stay as it is.

    Args:
        statements: code with the calls.
        namespace: values of the names that it reads.
        depth: number of functions that call each other. Deeper ones are not searched.
    """
    found: set[str] = set()
    calls = (n for part in statements for n in ast.walk(part) if isinstance(n, ast.Call))
    for call in calls if depth else ():
        function, is_bound = _called(call.func, namespace)
        for node in tree_of(function):
            if isinstance(node, ast.FunctionDef):
                updates = (n for n in ast.walk(node) if isinstance(n, ast.AugAssign))
                updated = {ast.unparse(n.target) for n in updates}
                updated |= updated_in_place(node.body, function.__globals__, depth - 1)
                given = _given(call, node.args, is_bound=is_bound)
                found |= {root_name(value) for name, value in given if name in updated}
    return found - {""}


def _called(node: ast.expr, namespace: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return a function of Python that a call runs as it is, and whether it is bound to an object.

    A compiled or transformed function is None: it receives tracers.
    """
    function, is_bound = value_of(node, namespace), False
    if isinstance(node, ast.Attribute) and isinstance(function, FunctionType):
        owner = value_of(node.value, namespace)
        is_bound = not isinstance(owner, (ModuleType, type)) and _is_of_class(owner, function)
    elif isinstance(function, (staticmethod, classmethod)):
        function, is_bound = function.__func__, isinstance(function, classmethod)
    elif isinstance(function, MethodType):
        function, is_bound = function.__func__, True
    elif callable(function) and not isinstance(function, (FunctionType, type)):
        function, is_bound = inspect.getattr_static(type(function), "__call__"), True
    is_plain = isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")
    return (function, is_bound) if is_plain else (None, False)


def _is_of_class(owner: Any, function: FunctionType) -> bool:
    return any(function in vars(kind).values() for kind in type(owner).__mro__)


def _given(
    call: ast.Call, parameters: ast.arguments, *, is_bound: bool
) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function with their values in a call."""
    names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    yield from zip(names[1:] if is_bound else names, call.args, strict=False)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def may_change(value: Any) -> bool:
    """Return True for an object of a class of the user whose attributes can be assigned."""
    kind: Any = type(value)
    return is_users(kind.__module__) and kind.__setattr__ is object.__setattr__


def array_of_object(
    step: Sequence[ast.stmt], read: dict[str, Any], is_array: Callable[[Any], bool]
) -> str:
    """Return the first array that a step reads, but not assigns, as an attribute; or empty."""
    nodes = [node for part in step for node in ast.walk(part) if isinstance(node, ast.Attribute)]
    assigned = {ast.unparse(node) for node in nodes if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        value = value_of(node, read)
        if is_array(value) and value.ndim and ast.unparse(node) not in assigned:
            return ast.unparse(node)
    return ""
