"""Order of the statements of a loop: which may change places without another result."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.cells.effects import CHANGES, root_name, within
from nbdist.cells.names import Names, leaves_loop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_CREATED = {"trainable_variables", "trainable_weights"}
"""Attributes of models whose variables the first step may create."""


def independent(host: ast.stmt, statement: ast.stmt) -> bool:
    """Return True if `statement` may run before `host`, which is written before it."""
    if _ends_pass(host) or _ends_pass(statement):
        return False
    one, other = names_in(host), names_in(statement)
    if one.bound.keys() & (other.read.keys() | other.bound.keys()):
        return False
    if other.bound.keys() & one.read.keys():
        return False
    if _changed(host) & _loaded(statement) or _changed(statement) & _loaded(host):
        return False
    return not (set(_roots(statement)) & set(_roots(host)))


def names_in(statement: ast.stmt) -> Names:
    names = Names()
    names.visit(statement)
    return names


def _ends_pass(statement: ast.stmt) -> bool:
    """Return True if a statement may end the pass through the loop, as `if loss < 1e-3: break`."""
    returns = (isinstance(node, ast.Return) for node in within(statement))
    return leaves_loop([statement]) or any(returns)


def _changed(statement: ast.stmt) -> set[str]:
    """Return the attributes that a statement assigns, and the lists, sets and dicts it changes."""
    found = set()
    for node in within(statement):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                found.add(ast.unparse(node))
            case ast.Subscript(value=changed, ctx=ast.Store() | ast.Del()):
                found.add(ast.unparse(changed))
            case ast.Call(func=ast.Attribute(attr=method, value=changed)) if method in CHANGES:
                found.add(ast.unparse(changed))
    return found


def _loaded(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement reads, such as `self.count`."""
    return {
        ast.unparse(node)
        for node in within(statement)
        if isinstance(node, (ast.Name, ast.Attribute))
    }


def _roots(statement: ast.stmt) -> Iterator[str]:
    """Yield the names whose objects a statement changes by a method, as `losses.append(...)`."""
    for node in within(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = root_name(node.func)
            if name and name not in ("tf", "np", "jnp", "jax", "lax"):
                yield name


def counts(statement: ast.stmt, step: Sequence[ast.stmt]) -> bool:
    """Return True for an assignment without calls that has no part in the step, as `count += 1`.

    `weights = model.trainable_variables` has one: the step may create them, also in a function that
    calls the model.
    """
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        return False
    if any(isinstance(node, ast.Call) for node in within(statement)):
        return False
    called = {
        ast.unparse(node.func) for s in step for node in within(s) if isinstance(node, ast.Call)
    }
    attributes = [node for node in within(statement) if isinstance(node, ast.Attribute)]
    if any(n.attr in _CREATED or ast.unparse(n.value) in called for n in attributes):
        return False
    made, names = Names(), names_in(statement)
    made.scan(step)
    return not (names.bound.keys() | names.read.keys()) & made.bound.keys()
