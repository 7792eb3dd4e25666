"""Functions of users that make a batch of samples, as `collate_fn` of a loader of PyTorch.

A rank can call one with its own samples if row `i` of each array depends on sample `i` only. The
analysis accepts functions that stack samples or parts of them, and convert the results.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["sample", "samples", "columns", "array", "tree", ""]
"""Value in such a function: a part of a sample, one of each sample, tuples of those, an array with
a row for each sample, arrays in lists, tuples and dicts, or anything else.
"""


def stacks(function: Any) -> bool:
    """Return True if a function stacks samples, and no row depends on other samples."""
    if not isinstance(function, FunctionType) or function.__code__.co_argcount != 1:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        enclosed = inspect.getclosurevars(function).nonlocals
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    kinds = (ast.FunctionDef, ast.Lambda)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    is_named = bool(nodes) and isinstance(nodes[0], ast.FunctionDef)
    if not nodes or not (is_named or len(nodes) == 1):
        return False
    names = {**vars(builtins), **function.__globals__, **enclosed}
    return _Collation(function, names).accepts(nodes[0])


class _Collation:
    """Analysis of one function.

    Args:
        function: the function.
        names: values of the names that it reads from outside.
    """

    def __init__(self, function: FunctionType, names: dict[str, Any]) -> None:
        self._function = function
        self._names = names
        self._kinds: dict[str, Kind] = {}

    def accepts(self, node: ast.AST) -> bool:
        assert isinstance(node, (ast.FunctionDef, ast.Lambda))
        self._kinds[node.args.args[0].arg] = "samples"
        if isinstance(node, ast.Lambda):
            return self._is_batch(node.body)
        return not node.decorator_list and self._returns(node.body)

    def _returns(self, statements: list[ast.stmt]) -> bool:
        """Return True if statements are known, and return batches only."""
        return all(map(self._is_known, statements))

    def _is_known(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Return(value=ast.expr() as value):
                return self._is_batch(value)
            case ast.If(test=ast.Call(func=ast.Name(id="isinstance"), args=[value, _])):
                branches = (statement.body, statement.orelse)
                return self._kind(value) == "sample" and all(map(self._returns, branches))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._kinds[name] = self._kind(value)
                return bool(self._kinds[name])
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                self._kinds |= dict.fromkeys(names, "samples")
                return len(names) == len(targets) and self._kind(value) == "columns"
        return False

    def _is_batch(self, value: ast.expr) -> bool:
        return self._kind(value) in ("array", "tree")

    def _kind(self, value: ast.expr) -> Kind:
        match value:
            case ast.Name(id=name):
                return self._kinds.get(name, "")
            case ast.Subscript(value=inner, slice=ast.Constant()):
                of: dict[Kind, Kind] = {"sample": "sample", "samples": "sample"}
                return (of | {"columns": "samples"}).get(self._kind(inner), "")
            case ast.Tuple(elts=[_, *_] as parts) | ast.List(elts=[_, *_] as parts):
                return "tree" if all(map(self._is_batch, parts)) else ""
            case ast.Dict(values=parts):
                return "tree" if all(map(self._is_batch, parts)) else ""
            case ast.ListComp() | ast.GeneratorExp():
                return self._kind_of_each(value)
            case ast.Call(func=ast.Attribute(value=inner, attr="numpy"), args=[], keywords=[]):
                result: dict[Kind, Kind] = {"sample": "sample", "array": "array", "tree": "array"}
                return result.get(self._kind(inner), "")
            case ast.Call():
                return self._kind_of_call(value)
        return ""

    def _kind_of_each(self, value: ast.ListComp | ast.GeneratorExp) -> Kind:
        match value.generators:
            case [ast.comprehension(target=ast.Name(id=name), iter=source, ifs=[], is_async=0)]:
                item: dict[Kind, Kind] = {"samples": "sample", "columns": "samples"}
                before = dict(self._kinds)
                self._kinds[name] = item.get(self._kind(source), "")
                found, kind = self._kind(value.elt), self._kinds[name]
                self._kinds = before
                if kind == "samples":
                    return "tree" if found in ("array", "tree") else ""
                return "samples" if kind == found == "sample" else ""
        return ""

    def _kind_of_call(self, call: ast.Call) -> Kind:
        function = self._value(call.func)
        if not all(word.arg == "dtype" for word in call.keywords):
            return ""
        match call.args:
            case [ast.Starred(value=inner)]:
                return "columns" if function is zip and self._kind(inner) == "samples" else ""
            case [ast.expr() as convert, tree] if function in _maps():
                is_known = self._value(convert) in _conversions() or self._converts(convert)
                return "tree" if is_known and self._is_batch(tree) else ""
            case [one]:
                return self._kind_of_result(function, self._kind(one))
        return ""

    def _kind_of_result(self, function: Any, given: Kind) -> Kind:
        if function in (list, tuple):
            return given if given in ("samples", "columns", "tree") else ""
        if function in _conversions() and given in ("sample", "array"):
            return given
        if given != "samples":
            return ""
        if function in (*_conversions(), *_stacks()):
            return "array"
        return "tree" if function is self._function or function in _collations() else ""

    def _converts(self, value: ast.expr) -> bool:
        """Return True for a lambda that converts an array."""
        match value:
            case ast.Lambda(args=ast.arguments(args=[one]), body=body):
                before = dict(self._kinds)
                self._kinds[one.arg] = "array"
                found = self._kind(body)
                self._kinds = before
                return found == "array"
        return False

    def _value(self, node: ast.expr) -> Any:
        """Return the object behind a name, or an attribute of a module; None if it is unknown."""
        if isinstance(node, ast.Name):
            return None if node.id in self._kinds else self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None


def _of_jax(*names: str) -> Iterator[Any]:
    jax = sys.modules.get("jax")
    if jax is not None:
        yield from (getattr(jax.numpy, name) for name in names)


def _conversions() -> list[Any]:
    return [np.array, np.asarray, *_of_jax("array", "asarray")]


def _stacks() -> list[Any]:
    torch = sys.modules.get("torch")
    return [np.stack, *_of_jax("stack"), *([] if torch is None else [torch.stack])]


def _maps() -> list[Any]:
    jax = sys.modules.get("jax")
    return [] if jax is None else [jax.tree.map, jax.tree_util.tree_map]


def _collations() -> list[Any]:
    torch = sys.modules.get("torch")
    return [] if torch is None else [torch.utils.data.default_collate]
