"""A cell that is the body of a training step: checked, and rewritten as a function.

Line numbers stay those of the notebook: the magic's own line becomes the function's head, every
logical line is indented where it stands, and the last expression becomes what is returned.
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
    ast.Return: "`return` ends a function, and a step is none: end the cell with what it reports",
    ast.Yield: "`yield` has no place in a step",
    ast.YieldFrom: "`yield from` has no place in a step",
    ast.Await: "`await` has no place in a step: nothing in it can be waited for",
    ast.AsyncFor: "`async for` has no place in a step",
    ast.AsyncWith: "`async with` has no place in a step",
    ast.Global: "`global` has no place in a step: a name that is read and then assigned is carried",
    ast.Nonlocal: "`nonlocal` has no place at the top of a cell",
}
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def compile_step(source: str, *, given: Sequence[str], carries: bool) -> StepProgram:
    """Read a cell as the body of a step.

    Args:
        source: the cell; its first line is the magic's, as a comment.
        given: names that the step is given: the batch's.
        carries: whether names that are read and then assigned may be carried from step to step.

    Raises:
        UsageError: the cell cannot be a step; every fault is named with its line.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # as Python's own reader does
    tree = _parse(source)
    names = Names(given)
    names.scan(tree.body)
    carried = sorted(
        name for name in names.read if name in names.assigned and name not in vars(builtins)
    )
    faults = sorted(
        [
            *_misplaced(tree),
            *_early(names),
            *_unreportable(tree, names),
            *_carry_faults(names, carried, carries=carries),
        ]
    )
    report = _report(tree, names)
    if report is None:
        last = source.count("\n", 0, -1) + 1
        faults.append(
            (last, "the cell reports nothing: end it with a scalar or a dict of scalars, or `loss`")
        )
    if faults:
        raise UsageError("\n".join(f"line {line}: {text}" for line, text in faults))
    assert report is not None
    reads = {
        name: line
        for name, line in names.read.items()
        if name not in names.bound and name not in vars(builtins)
    }
    return StepProgram(
        body=_rewrite(source, _reported(tree, names), carried),
        given=tuple(given),
        reads=reads,
        carried=tuple(carried),
        carried_lines={name: names.read[name] for name in carried},
        report=report,
    )


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()
        if line[:1] in ("%", "!", "?") or line[-1:] == "?":
            raise UsageError(
                f"line {error.lineno}: IPython's `{line}` has no place in a step: "
                "put it into a cell of its own"
            ) from None
        raise UsageError(f"line {error.lineno}: {error.msg}: {line}") from None


def _misplaced(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What would mean something else, or nothing, inside of a function."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if type(node) in _REFUSED and isinstance(node, (ast.stmt, ast.expr)):
            yield node.lineno, _REFUSED[type(node)]
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield (
                node.lineno,
                f"`from {node.module} import *` cannot be followed: name what is used",
            )
        if not isinstance(node, _OWN_SCOPE):
            waiting.extend(ast.iter_child_nodes(node))


def _early(names: Names) -> Iterator[tuple[int, str]]:
    """Names of the cell's own that are read too early, and cannot come from the step before."""
    for name in names.read.keys() & names.bound.keys():
        if name in vars(builtins):
            text = f"`{name}` is Python's own until this line assigns it: choose another name"
            yield names.bound[name], text
        elif name in names.early and name not in names.assigned:
            text = (
                f"`{name}` is read before the cell surely imports or defines it: "
                "do that first, or in an earlier cell"
            )
            yield names.early[name], text


def _carry_faults(names: Names, carried: list[str], *, carries: bool) -> Iterator[tuple[int, str]]:
    for name, line in names.deleted.items():
        if name in names.read and name not in names.bound:
            yield line, f"`del {name}`: it was made in an earlier cell; delete it in one of its own"
    for name in carried:
        if name in names.deleted:
            yield names.deleted[name], f"`del {name}`: it is carried to the next step"
        elif not carries:
            text = (
                f"`{name}` is read before it is assigned, and is no state under the mirrored "
                "strategy: keep it in a tf.Variable or a metric made in an earlier cell"
            )
            yield names.read[name], text


def _reported(tree: ast.Module, names: Names) -> ast.Expr | None:
    """The last expression, if it is what the step reports.

    A note, such as a string or `...`, never is. A call, such as one of the optimizer, is only when
    it is `dict(...)`, or when the cell does not surely assign `loss`. Anything else is.
    """
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return None
    match last.value:
        case ast.Call(func=ast.Name(id="dict")):
            return last
        case ast.Constant(value=str() | bytes() | None | builtins.Ellipsis):
            return None
        case ast.Call() | ast.Constant():
            return None if names.is_sure("loss") else last
    return last


def _unreportable(tree: ast.Module, names: Names) -> Iterator[tuple[int, str]]:
    """A report that can be seen to be no scalar and no dict of scalars."""
    last = _reported(tree, names)
    if last is None:
        return
    match last.value:
        case ast.Dict(keys=[]) | ast.Call(func=ast.Name(id="dict"), args=[], keywords=[]):
            yield last.lineno, "the dict reports nothing: put a scalar into it, or leave it out"
        case ast.Tuple() | ast.List() | ast.Set():
            kind = type(last.value).__name__.lower()
            text = f"the cell ends with a {kind}: report a scalar or a dict of scalars"
            yield last.lineno, text


def _report(tree: ast.Module, names: Names) -> str | None:
    """The text of what the step reports; None when there is nothing."""
    last = _reported(tree, names)
    if last is not None:
        return ast.unparse(last.value)
    return "loss" if names.is_sure("loss") else None


def _rewrite(source: str, last: ast.Expr | None, carried: list[str]) -> str:
    """The body, indented, with its end returned; the line of the head is left out."""
    lines = source.removesuffix("\n").split("\n")  # splitlines() also splits at form feeds
    state = f", ({''.join(f'{name}, ' for name in carried)})"
    if last is not None:  # the statement's own place: it has the brackets around it
        _insert(lines, last.end_lineno, last.end_col_offset, f"){state}")
        _insert(lines, last.lineno, last.col_offset, "return (")
    starts = _logical_lines(source)
    body = [
        _indented(line) if number in starts else line
        for number, line in enumerate(lines[1:], start=2)
    ]
    if last is None:
        body.append(f"    return (loss){state}")
    return "\n".join(body) + "\n"


def _indented(line: str) -> str:
    """Python counts the indentation from the last form feed in it."""
    blank = line[: len(line) - len(line.lstrip(" \t\f"))]
    return "    " + line[blank.rfind("\f") + 1 :]


def _insert(lines: list[str], line: int | None, column_bytes: int | None, text: str) -> None:
    """Insert at a place of ast's, which counts columns in bytes of UTF-8."""
    assert line is not None
    encoded = lines[line - 1].encode()
    lines[line - 1] = encoded[:column_bytes].decode() + text + encoded[column_bytes:].decode()


def _logical_lines(source: str) -> set[int]:
    """The physical lines on which a statement begins; others may lie inside of a string."""
    starts, fresh = set(), True
    skipped = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            fresh = True
        elif fresh and token.type not in skipped:
            starts.add(token.start[0])
            fresh = False
    return starts
