"""Effects of statements outside of the names that they assign: prints, files, lists, attributes."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMATTED_STRINGS: tuple[type[ast.expr], ...] = (ast.JoinedStr,)
if sys.version_info >= (3, 14):
    FORMATTED_STRINGS += (ast.TemplateStr,)

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

GROWS = {"append", "extend", "insert"}
CHANGES = GROWS | {
    "add",
    "clear",
    "discard",
    "pop",
    "popleft",
    "appendleft",
    "remove",
    "setdefault",
}
"""Methods that change lists, sets and dicts."""
SHOWS = {"print", "display", "input", "open"}
_READS = {"float", "int", "str", "repr", "format", "len", "list", "round", "bool"}
HOST_METHODS = {
    *("append", "extend", "insert", "numpy", "item", "tolist", "format", "join", "write"),
    *("set_description", "set_postfix", "set_postfix_str", "update", "add", "info", "debug"),
    *("warning", "log", "flush", "scalar", "savefig", "plot", "add_scalar"),
}
"""Methods whose effect is outside of a step: lists, progress bars, logs and files."""

_OF_MATH = {"add", "log"}
_MODULES = {
    "tf",
    "tensorflow",
    "tfp",
    "keras",
    "K",
    "ops",
    "jnp",
    "jax",
    "lax",
    "np",
    "numpy",
    "math",
}
"""Functions of mathematics that have the name of such a method, and usual names of modules."""


def is_host(statement: ast.stmt) -> bool:
    """Return True if a statement has an effect outside of the step, such as `print`."""
    return any(map(acts_outside, within(statement)))


def acts_outside(node: ast.AST) -> bool:
    """Return True if a node itself has such an effect, by its form and name."""
    if isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)):
        return True
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return not isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in SHOWS or node.func.id in _READS
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in HOST_METHODS:
        return False
    return node.func.attr not in _OF_MATH or root_name(node.func) not in _MODULES


def effect_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST | None:
    """Return the first statement of a function that changes or shows something outside of it.

    None if the function has no such statement, or if `tf.function` compiles it. TensorFlow then
    runs it only during a trace, also without nbdist.
    """
    if is_compiled(function):
        return None
    own = own_names(function.body)
    for node in (node for statement in function.body for node in within(statement)):
        if isinstance(node, (ast.Global, ast.Nonlocal)) or assigns(node, own):
            return node
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in SHOWS:
                return node
            case ast.Call(func=ast.Attribute(attr=method)) if method in GROWS:
                if root_name(node.func) not in own:
                    return node
    return None


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if a decorator such as `@tf.function` compiles the function."""
    return any("function" in ast.unparse(decorator) for decorator in function.decorator_list)


def own_names(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements assign, without those in functions."""
    nodes = (node for statement in statements for node in within(statement))
    return {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def assigns(node: ast.AST, own: set[str]) -> bool:
    """Return True for a target such as `self.count`, or `log["loss"]` unless `log` is in `own`."""
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or isinstance(node.ctx, ast.Load):
        return False
    return isinstance(node, ast.Attribute) or root_name(node) not in own


def assigned_items(statement: ast.stmt) -> set[str]:
    """Return the names of the dicts, lists and arrays whose items a statement assigns."""
    return {
        root_name(node)
        for node in within(statement)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }


def root_name(node: ast.expr) -> str:
    """Return the name at the start of `a.b[c]`; empty if it starts with another expression."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the nodes below it, without the contents of functions and classes."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from within(child)
