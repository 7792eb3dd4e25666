"""Division of a cell into definitions, which are plain code of a program, and other statements."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.cells.names import Names
from nbdist.cells.possible_changes import PossibleChanges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.jobs.cells import JobCell

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_MESHES = {"strategy", "mesh", "P", "PartitionSpec", "NamedSharding", "nbdist"}
"""Words of cells under pjrt whose statements stay together: they decide the context mesh."""


def divided(cell: JobCell, lines: Sequence[str], statements: Sequence[ast.stmt]) -> tuple[str, str]:
    """Return the definitions of a cell and its other statements.

    Imports and constants at the beginning count as definitions. Functions and classes after other
    statements move before them if they use nothing that these bind.

    Args:
        cell: the cell.
        lines: its lines.
        statements: its statements, without imports that are at the top of the program.
    """
    words = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(cell.tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    if cell.request.strategy == "pjrt" and words & _MESHES:
        return "", _trimmed(lines)
    first = 0
    while first < len(statements) and _is_definition(statements[first]):
        first += 1
    end = (statements[first - 1].end_lineno or 0) if first else 0
    if first < len(statements) and statements[first].lineno <= end:  # on one line
        first = end = 0
    definitions, moved = list(lines[:end]), set[int]()
    for rows in _movable(statements[first:], lines):
        definitions += ["", "", *(lines[row] for row in rows)]
        moved.update(rows)
    rest = [line for row, line in enumerate(lines) if row >= end and row not in moved]
    if not any(line.strip() and not line.lstrip().startswith("#") for line in rest):
        rest = []
    return _trimmed(definitions), _trimmed(rest)


def _movable(statements: Sequence[ast.stmt], lines: Sequence[str]) -> Iterator[range]:
    """Yield the rows of functions and classes that may move before the other statements."""
    before = Names()
    changes = PossibleChanges([ast.Module(body=list(statements), type_ignores=[])])
    changed: set[str] = set()
    for at, node in enumerate(statements):
        own = Names()
        own.visit(node)
        if (
            _is_definition(node)
            and isinstance(node, _DEFINITIONS)
            and own.early.keys().isdisjoint({*before.bound, *changed})
            and own.bound.keys().isdisjoint((*before.bound, *before.read))
        ):
            rows = _rows(node, lines)
            beside = [*statements[max(0, at - 1) : at], *statements[at + 1 : at + 2]]
            if not any(_shares(other, rows) for other in beside):
                yield rows
                continue
        before.visit(node)
        changed |= changes.of_cell(ast.Module(body=[node], type_ignores=[]))


def _rows(node: ast.stmt, lines: Sequence[str]) -> range:
    """Return the rows of a definition, with the comments directly above."""
    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ()))) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return range(first, node.end_lineno or node.lineno)


def _shares(statement: ast.stmt, rows: range) -> bool:
    """Return True if a statement has a line in the rows."""
    end = statement.end_lineno or statement.lineno
    return statement.lineno - 1 < rows.stop and end > rows.start


def _is_definition(statement: ast.stmt) -> bool:
    """Return True if a statement only defines functions, classes and constants."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return not any(map(_computes, _run_at_once(statement)))
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _run_at_once(definition: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes that run with a definition: default values, and the body of a class."""
    if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        defaults = (*definition.args.defaults, *definition.args.kw_defaults)
        yield from (node for value in defaults if value is not None for node in ast.walk(value))
    elif isinstance(definition, ast.ClassDef):
        for statement in definition.body:
            yield from _run_at_once(statement)
    elif not isinstance(definition, (ast.Import, ast.ImportFrom)):
        yield from ast.walk(definition)


def _computes(node: ast.AST) -> bool:
    """Return True for a call, except that of a field of a data class."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] != "field"


def _trimmed(lines: Sequence[str]) -> str:
    return "\n".join(lines).strip("\n")
