"""Statements of a loop: which may change places, and which have a part in its step."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.cells.effects import CHANGES, SHOWS, root_name, within
from nbdist.cells.names import Names, leaves_loop

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from nbdist.cells.loops import Callees


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
    return not (set(changed_objects(statement)) & set(changed_objects(host)))


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


def changed_objects(code: ast.AST) -> Iterator[str]:
    """Yield the names of the objects that code changes by a method, or takes an item of.

    For example `losses.append(...)`, `next(batches)`, `np.random.rand()` for the generator, and
    `print(...)` for the output.
    """
    for node in within(code):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in SHOWS:
                yield "print"
            case ast.Call(func=ast.Name(id="next"), args=[iterator, *_]):
                yield root_name(iterator) or "next"
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="random") as owner)) if (
                root_name(owner) != "jax"  # its draws change no generator
            ):
                yield ast.unparse(owner)
            case ast.Call(func=ast.Attribute()):
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


def drawn(statement: ast.stmt, callees: Callees, given: Container[int] = ()) -> str:
    """Return the code of a call that draws on the host; or empty.

    Args:
        statement: a statement of the loop.
        callees: knowledge about the objects that it calls.
        given: ids of nodes that do not count.
    """
    calls = (n for n in within(statement) if isinstance(n, ast.Call) and id(n) not in given)
    return next((ast.unparse(call) for call in calls if callees.draws(call)), "")


def belongs(statement: ast.stmt, step: Sequence[ast.stmt], callees: Callees) -> bool:
    """Return True if a statement after the last gradient is part of the step.

    It updates a metric, or computes with the framework from values of the step.
    """
    calls = [node for node in within(statement) if isinstance(node, ast.Call)]
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and callees.is_metric(statement.value)
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not calls:
        return False
    made = Names()
    made.scan(step)
    names = Names()
    names.visit(statement)
    return bool(names.read.keys() & made.bound.keys()) and all(map(callees.computes, calls))
