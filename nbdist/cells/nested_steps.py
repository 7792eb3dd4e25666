"""Steps inside of statements for the host, such as `losses.append(float(train_step(x)))`."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from nbdist.cells.effects import FORMATTED_STRINGS, acts_outside, within
from nbdist.cells.loops import takes_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.cells.loops import Callees

PREFIX = "_nbdist_"
"""Beginning of the names that nbdist adds to a cell."""

_STATEMENTS = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CONDITIONAL = (ast.Lambda, ast.IfExp, ast.BoolOp)
_NOT_ALWAYS: tuple[type[ast.expr], ...] = (*_CONDITIONAL, *_COMPREHENSIONS, *FORMATTED_STRINGS)
"""Expressions whose parts may run several times or not at all, or have no columns (f-strings)."""


def separated(statement: ast.stmt, callees: Callees) -> tuple[ast.Assign, ast.stmt] | None:
    """Separate the call that takes a gradient from what the host does with its result.

    Args:
        statement: a statement of a training loop.
        callees: knowledge about the objects that it calls.

    Returns:
        The call, with a name for its result, and the rest of the statement, which reads that name.
        None if the whole statement can be a step, or if the order of evaluation would change.
    """
    if not isinstance(statement, _STATEMENTS):
        return None
    calls = list(_steps(statement, callees, is_for_host=False))
    if len(calls) != 1 or not calls[0][1]:
        return None
    call = calls[0][0]
    name = _result_name(call)
    rest = copy.deepcopy(statement, {id(call): ast.copy_location(ast.Name(name, ast.Load()), call)})
    if any(callees.draws(node) for node in within(rest) if isinstance(node, ast.Call)):
        return None
    assign = ast.Assign([ast.Name(name, ast.Store())], call)
    return ast.fix_missing_locations(ast.copy_location(assign, statement)), rest


def _steps(
    node: ast.AST, callees: Callees, *, is_for_host: bool
) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the outermost calls that take a gradient, and whether the host uses their results."""
    for part in ast.iter_child_nodes(node):
        is_step = isinstance(part, ast.Call) and _is_step(part, callees)
        if isinstance(part, ast.Call) and is_step:
            yield part, is_for_host
        elif isinstance(part, _NOT_ALWAYS):
            yield from ((call, False) for call, _ in _steps(part, callees, is_for_host=False))
        else:
            uses = is_for_host or (isinstance(part, ast.Call) and acts_outside(part))
            yield from _steps(part, callees, is_for_host=uses)


def _is_step(call: ast.Call, callees: Callees) -> bool:
    """Return True if a call itself takes a gradient, and not a part of it."""
    alone = ast.Call(call.func, [], [])
    inner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if inner is not None and takes_gradient([ast.Expr(inner)], callees):
        return False
    return callees.updates(alone) or callees.takes_gradient(alone)


def _result_name(call: ast.Call) -> str:
    function = ast.unparse(call.func).split(".")[-1]
    return (
        f"{PREFIX}{call.lineno}_{call.col_offset}_{function if function.isidentifier() else 'step'}"
    )


def shown_name(name: str) -> str:
    """Return the name of an output as messages and views show it: `train_step` for its result."""
    return name.split("_", 4)[-1] if name.startswith(PREFIX) else name
