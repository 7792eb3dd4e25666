"""Rewriting of a plain cell, so that its training loops can run as steps over all replicas.

A loop becomes two: one whose step nbdist computes on all replicas, and the loop as written.

    for x, y in data:                     if __nbdist_lifts__(3):
        BEFORE                                with __nbdist_lifted__(3) as nbdist_3:
        STEP                                      for x, y in data:
        AFTER                                         if nbdist_3.skips():
                                                          continue
                                                      BEFORE
                                                      (loss,) = nbdist_3.step((x, y), ...)
                                                      AFTER
                                              if nbdist_3.ran:
                                                  (gradients,) = nbdist_3.last()
                                          else:
                                              the loop as written

A loop around it, such as one over epochs, runs each pass in a context. A resumed run leaves out
passes of it that its checkpoint contains (`passes.py`).

    for epoch in range(3):                for epoch in range(3):
        BODY                                  with __nbdist_outer__(":for epoch") as nbdist_outer_1:
                                                  BODY

All statements keep their lines, so tracebacks show the user's code.
"""

from __future__ import annotations

import ast
import copy
import itertools
from typing import TYPE_CHECKING, Any

from nbdist.cells.effects import is_compiled, within
from nbdist.cells.loop_division import TrainingLoop, divide
from nbdist.cells.loops import Loop, LoopError, place_of, training_loops
from nbdist.cells.names import Names
from nbdist.cells.step_program import logical_lines

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from nbdist.cells.loops import Callees

LIFTS, LIFTED, REFUSE = "__nbdist_lifts__", "__nbdist_lifted__", "__nbdist_refuse__"
"""Built-in functions that rewritten cells call; the number of a loop is their argument."""

OUTER = "__nbdist_outer__"
"""Built-in function for loops around training loops; the name of the loop is its argument."""

_NEXT = {"next", "get_next"}

_SHARED = "two statements in one line: write them in two lines"

_numbers = itertools.count(1)


class LoopProgram:
    """A training loop of a cell, ready to be compiled.

    Attributes:
        loop: the divided loop.
        source: source of the step function, with the user's line numbers.
        returned: outputs that each step assigns in the loop.
        data: source of the iterable, for messages.
        namespace: global names of the loop.
        file: name of its file; empty in a cell.
        place: its line, for messages, with the file if it is in one.
        own_names: names whose values belong to the step, or that the loop binds in each pass.
    """

    def __init__(
        self, loop: TrainingLoop, cell: str, namespace: dict[str, Any], file: str = ""
    ) -> None:
        self.loop = loop
        self.namespace = namespace
        self.file = file
        self.place = place_of(file, loop.line)
        self.source = step_source(loop, cell)
        self.returned = loop.used + tuple(name for name in loop.carried if name not in loop.used)
        node = loop.node
        targets = Names()
        if isinstance(node, ast.For):
            self.data = ast.unparse(node.iter)
            targets.visit(node.target)
        else:
            self.data = f"while {ast.unparse(node.test)}"
        self.own_names = frozenset((*loop.outputs, *loop.carried, *loop.mutated, *targets.bound))


def lift(
    tree: ast.Module, cell: str, callees: Callees, file: str = ""
) -> tuple[ast.Module | None, dict[int, LoopProgram | LoopError]]:
    """Rewrite the training loops of a cell.

    Args:
        tree: the cell, or a module of the user.
        cell: its source.
        callees: knowledge about the objects that it calls.
        file: name of the module's file; empty for a cell.

    Returns:
        The rewritten cell, and its training loops by number. A loop that cannot be divided is the
        error that describes it. None in place of a cell that leads to no such loop.
    """
    programs: dict[int, LoopProgram | LoopError] = {}
    numbers: dict[Loop, int] = {}
    for node in list(training_loops(tree, callees)):
        number = numbers[node] = next(_numbers)
        try:
            programs[number] = LoopProgram(divide(node, callees), cell, callees.namespace, file)
        except LoopError as error:
            error.file = file
            programs[number] = error
    around = _around(tree, callees, numbers)
    if not programs and not around:
        return None, programs
    rewritten = _Rewriter(programs, numbers, around, file).visit(tree)
    return ast.fix_missing_locations(rewritten), programs


def _around(tree: ast.AST, callees: Callees, lifted: Container[Loop]) -> set[Loop]:
    """Return the loops that contain training loops, themselves or in functions that they call."""
    found: set[Loop] = set()
    for node in ast.iter_child_nodes(tree):
        if node in lifted or (isinstance(node, ast.FunctionDef) and is_compiled(node)):
            continue
        found |= _around(node, callees, lifted)
        if isinstance(node, Loop) and any(
            part in lifted or (isinstance(part, ast.Call) and callees.trains(part))
            for statement in node.body
            for part in within(statement)
        ):
            found.add(node)
    return found


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self,
        programs: dict[int, LoopProgram | LoopError],
        numbers: dict[Loop, int],
        around: set[Loop],
        file: str,
    ) -> None:
        self._programs = programs
        self._numbers = numbers
        self._around = around
        self._file = file
        self._function = ""
        self._local: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        names = Names()
        names.scan(node.body)
        shared = {n for part in ast.walk(node) if isinstance(part, ast.Global) for n in part.names}
        before = self._function, self._local
        self._function, self._local = node.name, sorted(names.assigned - shared)
        try:
            return self.generic_visit(node)
        finally:
            self._function, self._local = before

    def visit_For(self, node: ast.For | ast.While) -> ast.AST | list[ast.stmt]:
        if node in self._around:
            return self._outer(node)
        if node not in self._numbers:
            return self.generic_visit(node)
        number = self._numbers[node]
        program = self._programs[number]
        if isinstance(program, LoopError):
            return [*_parsed(f"{REFUSE}({number})", node.lineno), node]
        return _choice(number, program, self._local)

    visit_While = visit_For  # noqa: N815 - ast's own spelling

    def _outer(self, node: ast.For | ast.While) -> list[ast.stmt]:
        """Return a loop whose passes run in contexts, and a statement that may leave more."""
        self.generic_visit(node)
        line = node.lineno
        name = f"nbdist_outer_{line}"
        head = f"for {ast.unparse(node.target)}" if isinstance(node, ast.For) else "while"
        loop = f"{self._file}{self._function}:{head}"
        (context,) = _parsed(f"with {OUTER}({loop!r}) as {name}: pass", line)
        assert isinstance(context, ast.With)
        context.body = [*_assignments(name, self._local, line), *node.body]
        node.body = [context]
        return [node, *_parsed(f"{OUTER}({loop!r}).leave()", line)]


def _assignments(name: str, names: Sequence[str], line: int) -> list[ast.stmt]:
    """Return statements that assign the local names of a function which a resumed run restores."""
    if not names:
        return []
    text = "".join(f"\n if {n!r} in {name}.restored: {n} = {name}.restored[{n!r}]" for n in names)
    return _parsed(f"if {name}.restored:{text}", line)


def _choice(number: int, program: LoopProgram, local: Sequence[str]) -> ast.stmt:
    """Return the statement that runs the lifted loop, or the loop as written."""
    name, loop, used = f"nbdist_{number}", program.loop, program.returned
    given = [_value(parameter, value) for parameter, value in loop.given.items()]
    call = f"{name}.step({_tuple(given)}, {_tuple(loop.carried)}, {_thunks(loop)})"
    assign = f"{_tuple(used)} = {call}" if used else call
    tests = [
        statement
        for parameter, value in loop.given.items()
        if _is_test(parameter)
        for statement in _parsed(f"{parameter} = bool({ast.unparse(value)})", value.lineno)
    ]
    block = [*loop.before, *tests, *_parsed(assign, loop.step[0].lineno), *loop.after]
    lifted = _with_block(loop.node, loop.block, block)
    (skip,) = _parsed(f"if {name}.skips(): continue", loop.line)
    assert isinstance(skip, ast.If)
    skip.body = [*_reads_of_iterators(loop), *skip.body]
    own = [n for n in local if n not in program.own_names]
    lifted.body = [skip, *_assignments(name, own, loop.line), *lifted.body]
    rest = tuple(n for n in loop.outputs if n not in used)
    last = f"if {name}.ran: {_tuple(rest)} = {name}.last()" if rest else "pass"
    (choice,) = _parsed(
        f"if {LIFTS}({number}):\n with {LIFTED}({number}) as {name}:\n  {name}.leave()\n {last}\n"
        "else: pass",
        loop.line,
    )
    assert isinstance(choice, ast.If)
    within = choice.body[0]
    assert isinstance(within, ast.With)
    within.body = [lifted, *within.body]
    choice.orelse = [loop.node]
    return choice


def _reads_of_iterators(loop: TrainingLoop) -> list[ast.stmt]:
    """Return the statements that take the next batch: a pass without a step runs them too."""
    given = [ast.copy_location(ast.Expr(value), value) for value in loop.given.values()]
    return [copy.deepcopy(s) for s in (*loop.before, *given) if any(map(_takes_next, ast.walk(s)))]


def _takes_next(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _NEXT
    return False


def _value(parameter: str, value: ast.expr) -> str:
    return parameter if _is_test(parameter) else ast.unparse(value)


def _is_test(parameter: str) -> bool:
    """Return True for the value of a condition, which other statements read too."""
    return parameter.startswith("_nbdist_") and parameter.count("_") == 2


def _with_block(node: Any, block: list[ast.stmt], new: list[ast.stmt]) -> Any:
    """Return a copy of a loop or `if` with other statements in place of a block."""
    changed = copy.copy(node)
    for field in ("body", "orelse"):
        statements = getattr(node, field)
        if statements is block:
            setattr(changed, field, new)
        else:
            inner = [_with_block(s, block, new) if isinstance(s, ast.If) else s for s in statements]
            setattr(changed, field, inner)
    return changed


def _thunks(loop: TrainingLoop) -> str:
    """Return a function of the values that the step reads from its scope, by name."""
    items = ", ".join(f"{name!r}: (lambda: {name})" for name in loop.reads)
    return f"{{{items}}}"


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _parsed(text: str, line: int) -> list[ast.stmt]:
    """Parse statements, and give all their nodes a line."""
    statements = ast.parse(text).body
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, (ast.stmt, ast.expr)):
                node.lineno = node.end_lineno = line
                node.col_offset = node.end_col_offset = 0
    return statements


def step_source(loop: TrainingLoop, cell: str) -> str:
    """Return the source of the step as a function of its arguments, on the user's lines.

    The function returns None as its report, and its outputs by name.
    """
    lines, starts = cell.split("\n"), logical_lines(cell)
    body: dict[int, str] = {}
    for statement in loop.step:
        if statement not in loop.texts:
            body |= {number: lines[number - 1] for number in _lines(statement)}
    for statement, leaves_empty in loop.hidden:
        indent = " " * statement.col_offset
        body |= dict.fromkeys(_lines(statement), "")
        body[statement.lineno] = f"{indent}pass" if leaves_empty else ""
    for other in (*loop.before, *loop.after):
        if not isinstance(other, ast.If):
            _remove(body, other)
    parts = [v for v in loop.given.values() if hasattr(v, "lineno") and v.lineno in body]
    for statement, text in loop.texts.items():
        if body.keys() & set(_lines(statement)):
            raise LoopError(statement.lineno, _SHARED)
        body[statement.lineno] = " " * loop.step[0].col_offset + text
    names = {id(value): name for name, value in loop.given.items()}
    for value in sorted(parts, key=lambda v: (v.lineno, v.col_offset), reverse=True):
        _replace(body, value, names[id(value)])
    indent_size, first = loop.step[0].col_offset, min(body)
    for number in starts & body.keys():
        body[number] = "    " + body[number][indent_size:]
    parameters = ", ".join((*loop.given, *loop.carried))
    outputs = ", ".join(f"{name!r}: {name}" for name in loop.outputs)
    text = "\n".join(body.get(number, "") for number in range(first, max(body) + 1))
    head = "\n" * (first - 2)
    return f"{head}def step({parameters}):\n{text}\n    return None, {{{outputs}}}\n"


def _remove(body: dict[int, str], other: ast.stmt) -> None:
    """Remove a statement from a line that it shares with the step: `x = step(x); print(x)`.

    Raises:
        LoopError: the statement also has lines of its own.
    """
    if not {other.lineno, _end(other)} & {number for number, text in body.items() if text}:
        return
    if other.lineno != _end(other):
        raise LoopError(other.lineno, _SHARED)
    line = body[other.lineno].encode()
    start, end = other.col_offset, other.end_col_offset or 0
    empty = b"0".ljust(end - start)
    body[other.lineno] = (line[:start] + empty + line[end:]).decode()


def _replace(body: dict[int, str], node: ast.expr, text: str) -> None:
    """Replace an expression by a name. What follows it moves to its first line."""
    first, last = body[node.lineno].encode(), body[_end(node)].encode()
    head, tail = first[: node.col_offset], last[node.end_col_offset :]
    body |= dict.fromkeys(range(node.lineno, _end(node) + 1), "")
    body[node.lineno] = head.decode() + text + tail.decode()


def _lines(statement: ast.stmt) -> range:
    return range(statement.lineno, _end(statement) + 1)


def _end(node: ast.stmt | ast.expr) -> int:
    assert node.end_lineno is not None
    return node.end_lineno
