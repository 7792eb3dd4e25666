"""Values that a step reads by name: which ones it may change, and arrays in objects."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

from nbdist.worker.lifting.callees import tree_of
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def updated_in_place(step: Sequence[ast.stmt], read: dict[str, Any]) -> set[str]:
    """Return the names of arguments that a called function updates in place, as in `w -= g`."""
    found: set[str] = set()
    for call in (n for part in step for n in ast.walk(part) if isinstance(n, ast.Call)):
        function = read.get(call.func.id) if isinstance(call.func, ast.Name) else None
        for node in tree_of(function):
            updates = (n for n in ast.walk(node) if isinstance(n, ast.AugAssign))
            targets = {ast.unparse(n.target) for n in updates}
            names = [a.arg for a in node.args.args] if isinstance(node, ast.FunctionDef) else []
            pairs = zip(names, call.args, strict=False)
            found |= {ast.unparse(value) for name, value in pairs if name in targets}
    return found


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
        value = _attribute(node, read)
        if is_array(value) and value.ndim and ast.unparse(node) not in assigned:
            return ast.unparse(node)
    return ""


def _attribute(node: ast.expr, read: dict[str, Any]) -> Any:
    """Return the value of a name, or of an attribute that is no property; otherwise None."""
    if isinstance(node, ast.Name):
        return read.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _attribute(node.value, read)
    of = getattr if isinstance(owner, tuple) else inspect.getattr_static
    return of(owner, node.attr, None)
