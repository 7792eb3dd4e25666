"""Names of the batches of a training loop whose rows only the step reads.

A rank can then read its own rows of each batch. Other statements may use sizes, such as
`x.shape[0]` and `len(x)`. Before the step, they may name parts of a batch, as in `x, y = batch`,
and convert it row by row (`row_conversions.py`).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cells.effects import root_name
from nbdist.cells.names import Names
from nbdist.worker.lifting.batch_aliases import Aliases
from nbdist.worker.lifting.row_callees import RowCallees, bound_by, is_conversion
from nbdist.worker.lifting.row_conversions import Scope, converts, is_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set

    from nbdist.cells.loop_division import TrainingLoop
    from nbdist.cells.loops import Callees

_WRAPPERS = ("enumerate", "tqdm")
_REFLECTIVE = {"eval", "exec", "locals", "globals", "vars", "dir"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class BatchNames(NamedTuple):
    """Names of a loop's batches and of their parts.

    Attributes:
        every: all of them; empty if something besides the step reads rows.
        read_later: those that statements around the loop read.
        conversions: statements before the step, and expressions in its call, that convert batches.
    """

    every: tuple[str, ...] = ()
    read_later: tuple[str, ...] = ()
    conversions: tuple[ast.AST, ...] = ()


def batch_names(loop: TrainingLoop, tree: ast.AST, callees: Callees) -> BatchNames:
    """Return the names of the batches of a loop.

    Args:
        loop: the loop.
        tree: the cell or module that contains it.
        callees: knowledge about the objects that it calls.
    """
    node = loop.node
    scope = _scope_of(node, tree)
    if not isinstance(node, ast.For) or isinstance(scope, ast.ClassDef):
        return BatchNames()
    if loop.scan or "rank" in loop.reads:
        return BatchNames()
    names = set(bound_by(_element(node.iter, node.target)))
    earlier = {*loop.kept_outside} - names  # of the last pass: checkpoints contain them
    known = Scope(names, RowCallees(callees))
    conversions = _conversions(loop, known, names)
    given = [value for value in loop.given.values() if not isinstance(value, ast.Name)]
    conversions += [value for value in given if converts(value, known)]
    elsewhere = callees.read_by_functions(node) | earlier
    if not names or names & elsewhere or _uses_rows(loop, conversions, known):
        return BatchNames()
    outside = [part for part in _walk(scope, node) if part is not node]
    functions = [part for part in outside if isinstance(part, _FUNCTIONS)]
    if any(names & _free(function) for function in functions) or any(
        isinstance(part, (ast.Global, ast.Nonlocal)) and names & {*part.names} for part in outside
    ):
        return BatchNames()
    read = names & {
        part.id for part in outside if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    if read and any(isinstance(p, (ast.Try, ast.With)) and _contains(p, node) for p in outside):
        return BatchNames()  # a batch may be read after an error in the loop
    return BatchNames(tuple(sorted(names)), tuple(sorted(read)), tuple(conversions))


def with_data(iterable: ast.expr, replace: Callable[[ast.expr], ast.expr]) -> ast.expr:
    """Return an iterable with other data, also inside of `enumerate` and `tqdm`."""
    match iterable:
        case ast.Call(args=[first, *rest]) if _is_wrapper(iterable):
            changed = ast.Call(iterable.func, [with_data(first, replace), *rest], iterable.keywords)
            return ast.copy_location(changed, iterable)
    return replace(iterable)


def _is_wrapper(call: ast.Call) -> bool:
    return ast.unparse(call.func).split(".")[-1] in _WRAPPERS


def _element(iterable: ast.expr, target: ast.expr) -> ast.expr | None:
    """Return the part of a loop's target that a batch is assigned to; None for other forms."""
    match iterable:
        case ast.Call(func=function, args=[first, *_]) if _is_wrapper(iterable):
            if ast.unparse(function) != "enumerate":
                return _element(first, target)
            match target:
                case ast.Tuple(elts=[_, element]):
                    return _element(first, element)
            return None
    return target


def _conversions(loop: TrainingLoop, scope: Scope, names: set[str]) -> list[ast.AST]:
    """Return the statements before the step that only name and convert parts of a batch.

    Args:
        loop: the loop.
        scope: its names.
        names: names of batches. Those of their parts are added.
    """
    found: list[ast.AST] = []
    if loop.block is not loop.node.body:
        return found
    aliases = Aliases(names)
    for statement in loop.before:
        if statement in loop.block and is_conversion(statement, scope, aliases):
            names.update(bound_by(statement))
            found.append(statement)
    return found


def _uses_rows(loop: TrainingLoop, conversions: Sequence[ast.AST], scope: Scope) -> bool:
    """Return True if something besides the step reads rows of a batch, or changes it."""
    names = scope.batches
    body = [*loop.node.body, *loop.node.orelse]
    statements = [statement for statement in body if statement not in conversions]
    bound = Names()
    bound.scan(statements)
    if names & {*bound.bound, *bound.deleted}:
        return True
    nodes = [node for statement in statements for node in ast.walk(statement)]
    given = {id(part) for value in loop.given.values() for part in ast.walk(value)}
    known = {id(part) for statement in loop.step for part in ast.walk(statement)} - given
    known |= {id(part) for value in conversions for part in ast.walk(value)}
    known |= {id(part) for node in nodes if is_size(node, scope) for part in ast.walk(node)}
    return any(
        node.id in _REFLECTIVE or (node.id in names and id(node) not in known)
        if isinstance(node, ast.Name)
        else isinstance(node, (ast.Subscript, ast.Attribute))
        and not isinstance(node.ctx, ast.Load)
        and root_name(node) in names
        for node in nodes
    )


def _scope_of(node: ast.AST, tree: ast.AST) -> ast.AST:
    """Return the innermost function or class that contains a node, or the whole tree."""
    for part in ast.walk(tree):
        if part is not tree and isinstance(part, _FUNCTIONS) and _contains(part, node):
            return _scope_of(node, part)
    return tree


def _contains(part: ast.AST, node: ast.AST) -> bool:
    return any(inner is node for inner in ast.walk(part))


def _walk(scope: ast.AST, leave_out: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope. Of functions inside of it, yield the function only."""
    for node in ast.iter_child_nodes(scope):
        if node is leave_out:
            continue
        yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _walk(node, leave_out)


def _free(function: ast.AST) -> Set[str]:
    """Return the names that a function reads from outside."""
    names = Names()
    names.visit(function)
    return names.read.keys()
