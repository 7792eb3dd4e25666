"""Step cells: checks, and conversion of the cell to a function.

Line numbers of the notebook stay valid. The line of the magic becomes the head of the function,
each logical line is indented in place, and the function returns the last expression.
"""

from __future__ import annotations

import ast
import builtins
import io
import tokenize
from typing import TYPE_CHECKING

from nbdist.cells.names import Names
from nbdist.errors import UsageError
from nbdist.records import StepProgram

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REFUSED = {
    ast.Return: "`return` is not allowed in a step: end the cell with the expression to report",
    ast.Yield: "`yield` is not allowed in a step",
    ast.YieldFrom: "`yield from` is not allowed in a step",
    ast.Await: "`await` is not allowed in a step: use it in a plain cell",
    ast.AsyncFor: "`async for` is not allowed in a step",
    ast.AsyncWith: "`async with` is not allowed in a step",
    ast.Global: "`global` is not allowed in a step: remove it, and assign the name",
    ast.Nonlocal: "`nonlocal` is not allowed at the top of a cell",
}
_CHANGING = {
    *("apply", "apply_gradients", "minimize", "update", "update_state", "reset_state"),
    *("assign", "assign_add", "assign_sub", "append", "extend", "add"),
}
"""Methods whose result is no report."""

_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _fits(tree: ast.Module, given: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield calls of `fit` that do not read the batch."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        if node.func.attr == "fit" and names.isdisjoint(given):
            fit = ast.unparse(node.func)
            yield node.lineno, f"`{fit}` reads its own data: remove --data and --batch"


def compile_step(source: str, *, given: Sequence[str], carries: bool) -> StepProgram:
    """Read a cell as the body of a step.

    Args:
        source: the cell. Its first line is the line of the magic as a comment.
        given: names of the step's arguments: the batch, and its mask.
        carries: True if the step may carry names that it reads and then assigns to the next step.

    Raises:
        UsageError: the cell cannot be a step. The message contains all faults with their lines.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # like Python's own reader
    tree = _parse(source)
    names = Names(given)
    names.scan(tree.body)
    carried = sorted(
        name for name in names.read if name in names.assigned and name not in vars(builtins)
    )
    faults = sorted(
        [
            *_misplaced(tree),
            *_fits(tree, given),
            *_early(names),
            *_unreportable(tree, names),
            *_carry_faults(names, carried, carries=carries),
        ]
    )
    if faults:
        raise UsageError("\n".join(f"line {line}: {text}" for line, text in faults))
    report = _report(tree, names)
    reads = {
        name: line
        for name, line in names.read.items()
        if name not in names.bound and name not in vars(builtins)
    }
    return StepProgram(
        body=_rewrite(source, _reported(tree, names), report, carried),
        given=tuple(given),
        reads=reads,
        carried=tuple(carried),
        carried_lines={name: names.read[name] for name in carried},
        report=report,
    )


def reported_expression(source: str, given: Sequence[str]) -> tuple[ast.Expr | None, str]:
    """Return the last statement of a step if the step reports it, and the reported expression.

    Args:
        source: the cell, which `compile_step` accepts.
        given: names of the step's arguments.
    """
    tree = _parse(source)
    names = Names(given)
    names.scan(tree.body)
    return _reported(tree, names), _report(tree, names)


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()
        if line[:1] in ("%", "!", "?") or line[-1:] == "?":
            raise UsageError(
                f"line {error.lineno}: IPython's `{line}` is not allowed in a step: "
                "move it to another cell"
            ) from None
        raise UsageError(f"line {error.lineno}: {error.msg}: {line}") from None


def _misplaced(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield statements that are invalid, or have another meaning, in a function."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if type(node) in _REFUSED and isinstance(node, (ast.stmt, ast.expr)):
            yield node.lineno, _REFUSED[type(node)]
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield (
                node.lineno,
                f"`from {node.module} import *` is not allowed in a step: import names one by one",
            )
        if not isinstance(node, _OWN_SCOPE):
            waiting.extend(ast.iter_child_nodes(node))


def _early(names: Names) -> Iterator[tuple[int, str]]:
    """Yield names of the cell that are read too early and are not carried between steps."""
    for name in names.read.keys() & names.bound.keys():
        if name in vars(builtins):
            text = f"`{name}` is a built-in until this line assigns it: choose another name"
            yield names.bound[name], text
        elif name in names.early and name not in names.assigned:
            text = (
                f"`{name}` is read before the cell surely imports or defines it: "
                "import or define it first, or in an earlier cell"
            )
            yield names.early[name], text


def _carry_faults(names: Names, carried: list[str], *, carries: bool) -> Iterator[tuple[int, str]]:
    for name, line in names.deleted.items():
        if name in names.read and name not in names.bound:
            yield line, f"`del {name}`: an earlier cell created it; delete it in a plain cell"
    for name in carried:
        if name in names.deleted:
            yield names.deleted[name], f"`del {name}`: the next step needs it; remove the `del`"
        elif not carries:
            text = (
                f"`{name}` is read before it is assigned, and the mirrored strategy carries no "
                "Python names between steps: use a tf.Variable or a metric of an earlier cell"
            )
            yield names.read[name], text


def _reported(tree: ast.Module, names: Names) -> ast.Expr | None:
    """Return the last expression if the step reports it, else None.

    The step never reports a bare string or `...`, or the result of a method that changes its
    object. It reports another call than `dict(...)` only if the cell assigns no loss: such a call
    may belong to an optimizer.
    """
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return None
    match last.value:
        case ast.Call(func=ast.Name(id="dict")):
            return last
        case ast.Constant(value=str() | bytes() | None | builtins.Ellipsis):
            return None
        case ast.Call(func=ast.Attribute(attr=method)) if method in _CHANGING:
            return None
        case ast.Call() | ast.Constant():
            return None if _loss(tree, names) else last
    return last


def _loss(tree: ast.Module, names: Names) -> str:
    """Return the name of the loss: `loss`, else the one whose gradient the step takes.

    Without a gradient that is taken in the cell, it is the only name that contains `loss`. Empty if
    the cell assigns no loss on every path, or several.
    """
    targets = list(dict.fromkeys(_gradient_targets(tree)))
    named = [name for name in names.assigned if "loss" in name.lower()]
    for found in (["loss"], targets, named):
        sure = [name for name in found if names.is_sure(name)]
        if len(sure) == 1:
            return sure[0]
    return ""


def _gradient_targets(tree: ast.Module) -> Iterator[str]:
    """Yield the names whose gradients a cell takes, with a tape or `value_and_grad`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="gradient"), args=[ast.Name(id=name), *_]):
                yield name
            case ast.Assign(
                targets=[
                    ast.Tuple(
                        elts=[ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_]), *_]
                    )
                ],
                value=ast.Call(func=ast.Call(func=function)),
            ) if ast.unparse(function).endswith("value_and_grad"):
                yield name


def _unreportable(tree: ast.Module, names: Names) -> Iterator[tuple[int, str]]:
    """Yield a fault if the reported expression is visibly not a scalar or a dict of scalars."""
    last = _reported(tree, names)
    if last is None:
        return
    match last.value:
        case ast.Dict(keys=[]) | ast.Call(func=ast.Name(id="dict"), args=[], keywords=[]):
            yield last.lineno, "the dict is empty: add a scalar, or remove the dict"
        case ast.Tuple() | ast.List() | ast.Set():
            kind = type(last.value).__name__.lower()
            text = f"the cell ends with a {kind}: report a scalar or a dict of scalars"
            yield last.lineno, text


def _report(tree: ast.Module, names: Names) -> str:
    """Return the text of the reported expression; empty if the step reports nothing."""
    last = _reported(tree, names)
    return _loss(tree, names) if last is None else ast.unparse(last.value)


def _rewrite(source: str, last: ast.Expr | None, report: str, carried: list[str]) -> str:
    """Return the indented body with a `return` at its end, without the line of the head."""
    lines = source.removesuffix("\n").split("\n")  # splitlines() also splits at form feeds
    state = f", ({''.join(f'{name}, ' for name in carried)})"
    if last is not None:  # the position of the statement includes its brackets
        _insert(lines, last.end_lineno, last.end_col_offset, f"){state}")
        _insert(lines, last.lineno, last.col_offset, "return (")
    starts = logical_lines(source)
    body = [
        _indented(line) if number in starts else line
        for number, line in enumerate(lines[1:], start=2)
    ]
    if last is None:
        body.append(f"    return ({report or None}){state}")
    return "\n".join(body) + "\n"


def _indented(line: str) -> str:
    """Indent a line. Python counts the indentation from the last form feed in it."""
    blank = line[: len(line) - len(line.lstrip(" \t\f"))]
    return "    " + line[blank.rfind("\f") + 1 :]


def _insert(lines: list[str], line: int | None, column_bytes: int | None, text: str) -> None:
    """Insert a text at a position of `ast`. Its columns are bytes of UTF-8."""
    assert line is not None
    encoded = lines[line - 1].encode()
    lines[line - 1] = encoded[:column_bytes].decode() + text + encoded[column_bytes:].decode()


def logical_lines(source: str) -> set[int]:
    """Return the physical lines on which statements begin. Others may be inside strings."""
    starts, fresh = set(), True
    skipped = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            fresh = True
        elif fresh and token.type not in skipped:
            starts.add(token.start[0])
            fresh = False
    return starts
