"""Conversion between a cell and a function of a program.

The function states what the cell implies: `global` for the names that it binds, and `return` for
the value that a step reports. Both directions keep the lines of the body.
"""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING

from nbdist.cells.effects import FORMATTED_STRINGS, within
from nbdist.cells.names import Names
from nbdist.cells.step_program import logical_lines, reported_expression
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Container

    from nbdist.records import StepProgram

_INDENT = "    "


def function_of(source: str, program: StepProgram, name: str) -> str:
    """Return a step cell as a function.

    Args:
        source: the cell; its first line is the line of the magic.
        program: the step that `compile_step` made of the cell.
        name: name of the function.
    """
    source = _without_annotations(source, program.carried)
    last, report = reported_expression(source, program.given)
    lines = source.rstrip("\n").split("\n")
    if last is not None:
        row = last.lineno - 1
        column = len(lines[row].encode()[: last.col_offset].decode())
        lines[row] = f"{lines[row][:column]}return {lines[row][column:]}"
    elif report:
        lines.append(f"return {report}")
    head = [f"def {name}({', '.join(program.given)}):"]
    if program.carried:
        head.append(f"{_INDENT}global {', '.join(program.carried)}")
    body = indented("\n".join(lines[1:]).strip("\n"))
    return "\n".join([*head, body])


def function_of_statements(source: str, name: str) -> str:
    """Return statements of a cell as a function without parameters.

    Args:
        source: the statements.
        name: name of the function.
    """
    names = Names()
    names.scan(ast.parse(source).body)
    bound = sorted((names.bound.keys() | names.deleted) - {"*"})
    body = indented(_without_annotations(source, bound))
    head = [f"{_INDENT}global {', '.join(bound)}"] if bound else []
    return "\n".join([f"def {name}():", *head, body])


def _without_annotations(source: str, names: Container[str]) -> str:
    """Remove the annotations of names, which Python refuses for names that are `global`.

    Lines stay the same. Annotations in inner functions and classes stay too.
    """
    text = source.encode()
    ends = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    for node in reversed([*within(ast.parse(source))]):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if name in names:
                begin = ends[node.lineno - 1] + node.col_offset
                until = ends[(annotation.end_lineno or 0) - 1] + (annotation.end_col_offset or 0)
                if node.value is None:
                    until = ends[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                    kept = b"pass"
                else:
                    until = text.index(b"=", until)
                    kept = name.encode() + b" "
                continued = b"\\\n" * text.count(b"\n", begin, until)
                text = text[:begin] + kept + continued + text[until:]
    return text.decode()


def cell_of(source: str) -> str:
    """Return the body of a function as a cell, on the same lines.

    Args:
        source: the function, from its `def`.

    Raises:
        UsageError: the source is no function without decorators.
    """
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        raise UsageError("a step or a cell is a function without decorators: remove them")
    lines = source.rstrip("\n").split("\n")
    first = function.body[0].lineno
    starts = logical_lines(source)
    for number, line in enumerate(lines, 1):
        if number < first:
            lines[number - 1] = "#"
        elif number in starts:
            lines[number - 1] = line.removeprefix(_INDENT)
    for statement in function.body:
        if isinstance(statement, ast.Global):
            for number in range(statement.lineno, (statement.end_lineno or 0) + 1):
                lines[number - 1] = "#"
    last = function.body[-1]
    if isinstance(last, ast.Return):
        column = last.col_offset - len(_INDENT) * (last.lineno in starts)
        text = lines[last.lineno - 1].encode()
        value = text[column:].removeprefix(b"return").lstrip()
        lines[last.lineno - 1] = (text[:column] + value).decode()
    return "\n".join(lines) + "\n"


def indented(source: str) -> str:
    """Indent a source text. Lines within a string of several lines keep their text."""
    starts = {*range(1, source.count("\n") + 2)} - _in_strings(source)
    return "\n".join(
        f"{_INDENT}{line}" if number in starts and line.strip() else line
        for number, line in enumerate(source.split("\n"), 1)
    )


def _in_strings(source: str) -> set[int]:
    """Return the numbers of the lines that begin within a string."""
    return {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, FORMATTED_STRINGS)
        or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
        for number in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
