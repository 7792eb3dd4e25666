"""Updates of the state by arithmetic after the gradient, such as `w = w - lr * g`.

A statement is an update if it only computes, from values of the step, what the step reads in its
next pass, or what another update reads. Counters, learning rates that change in each pass, and
accumulators such as `total += loss` do not count.
"""

from __future__ import annotations

import ast
import builtins
from typing import TYPE_CHECKING

from nbdist.cells.effects import HOST_METHODS, root_name, within
from nbdist.cells.names import Names
from nbdist.cells.statement_order import names_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Set

    from nbdist.cells.loops import Callees

_FUNCTIONS = {
    *("zip", "enumerate", "range", "reversed", "tuple", "list", "dict", "len"),
    *("sum", "abs", "min", "max", "pow"),
}
_METHODS = {
    *("items", "keys", "values", "copy", "sum", "mean", "max", "min", "dot", "reshape", "ravel"),
    *("flatten", "squeeze", "transpose", "astype"),
}
"""Built-in functions, and methods of dicts and arrays, that have no effect."""

_EXCLUDED = (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def updates(
    tail: Sequence[ast.stmt],
    step: Sequence[ast.stmt],
    early: set[str],
    callees: Callees,
) -> list[ast.stmt]:
    """Return the updates among the statements after the last gradient.

    Args:
        tail: these statements.
        step: statements of the step, and those of the tail that belong to it anyway.
        early: names that the loop binds before the step in each pass.
        callees: knowledge about the objects that the statements call.
    """
    named = early.union(*(names_in(statement).bound for statement in (*step, *tail)))
    waiting = [
        statement
        for statement in tail
        if statement not in step
        and only_computes(statement, callees)
        and not roots(statement) & early
        and items_of(statement) <= _loaded(statement) - named
    ]
    needed = set().union(*map(_loaded, step))
    found: list[ast.stmt] = []
    while more := [s for s in waiting if s not in found and _places(s) & needed]:
        found += more
        needed |= set().union(*map(_loaded, more))
    known = set().union(*(names_in(statement).bound for statement in step))
    chosen: list[ast.stmt] = []
    while more := [s for s in found if s not in chosen and _loaded(s) & known]:
        chosen += more
        known |= set().union(*map(_places, more))
    return chosen


def only_computes(statement: ast.stmt, callees: Callees) -> bool:
    """Return True for an assignment to names, attributes or items that only computes its value.

    Not with a condition: `v = g if i == 0 else 0.9 * v + g` reads `v` from the second pass on only.
    """
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        return False
    if statement.value is None or not all(map(_base, _targets(statement))):
        return False
    for node in within(statement):
        if isinstance(node, _EXCLUDED):
            return False
        if isinstance(node, ast.Call) and not (callees.computes(node) or _is_pure(node, callees)):
            return False
    return True


def roots(statement: ast.stmt) -> set[str]:
    """Return the names that an assignment binds, or whose objects it changes."""
    return {root_name(target) for target in _targets(statement)}


def items_of(statement: ast.stmt) -> set[str]:
    """Return the names of dicts, lists and arrays whose items an assignment replaces."""
    return {
        _base(target)
        for target in _targets(statement)
        if isinstance(target, ast.Subscript) and "." not in _base(target)
    }


def may_read(host: ast.stmt, statement: ast.stmt, by_functions: Set[str], callees: Callees) -> bool:
    """Return True if functions or methods that a host calls may read what a statement assigns.

    `self.losses.append(loss)` does not read `self.w`, but `self.evaluate()` may.

    Args:
        host: a statement of the loop.
        statement: an assignment.
        by_functions: names from outside that functions of the user read.
        callees: knowledge about the objects that the host calls.
    """
    calls = [node for node in ast.walk(host) if isinstance(node, ast.Call)]
    if roots(statement) & by_functions and any(_may_be_of_user(call, callees) for call in calls):
        return True
    owners = {root_name(target) for target in _targets(statement) if "." in _base(target)}
    called = {id(call.func) for call in calls}
    harmless = {
        id(node.value)
        for node in ast.walk(host)
        if isinstance(node, ast.Attribute) and id(node) not in called
    }
    return any(
        isinstance(node, ast.Name) and node.id in owners and id(node) not in harmless
        for node in ast.walk(host)
    )


def _may_be_of_user(call: ast.Call, callees: Callees) -> bool:
    match call.func:
        case ast.Name(id=name):
            return name not in vars(builtins) or name in callees.namespace
        case ast.Attribute(attr=name) if name in HOST_METHODS | _METHODS:
            return False
    return not callees.computes(call)


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, without tuples around them."""
    match statement:
        case ast.Assign(targets=targets):
            waiting = list(targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            waiting = [target]
        case _:
            waiting = []
    while waiting:
        match waiting.pop():
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                waiting += parts
            case ast.Starred(value=part):
                waiting.append(part)
            case other:
                yield other


def _base(target: ast.expr) -> str:
    """Return `w` for `w` and `w["a"][0]`, `self.w` for `self.w` and its items; empty for others."""
    while isinstance(target, ast.Subscript):
        target = target.value
    match target:
        case ast.Name() | ast.Attribute(value=ast.Name()):
            return ast.unparse(target)
    return ""


def _places(statement: ast.stmt) -> set[str]:
    return set(map(_base, _targets(statement)))


def _loaded(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement reads.

    A target such as `w`, `self.w` or `w["a"]` counts only in an augmented assignment.
    """
    read: list[ast.AST] = [statement]
    found: set[str] = set()
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = list(_targets(statement))
        read = [node.slice for target in targets for node in _subscripts(target)]
        read += [] if statement.value is None else [statement.value]
        if isinstance(statement, ast.AugAssign):
            found = _places(statement)
    for part in read:
        names = Names()
        names.visit(part)
        found |= names.read.keys()
        found |= {ast.unparse(n) for n in within(part) if isinstance(n, ast.Attribute)}
    return found


def _subscripts(target: ast.expr) -> Iterator[ast.Subscript]:
    while isinstance(target, ast.Subscript):
        yield target
        target = target.value


def _is_pure(call: ast.Call, callees: Callees) -> bool:
    match call.func:
        case ast.Name(id=name):
            return name in _FUNCTIONS and name not in callees.namespace
        case ast.Attribute(attr=name):
            return name in _METHODS
    return False
