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

A loop around it, such as one over epochs, counts its passes. A resumed run leaves out passes that
its checkpoint contains (`passes.py`).

    for epoch in range(3):                with __nbdist_outer__() as nbdist_outer_1:
        BODY                                  for epoch in range(3):
                                                  if nbdist_outer_1.is_over(begins=True):
                                                      break
                                                  with nbdist_outer_1.each():
                                                      BODY
                                                  if nbdist_outer_1.is_over(begins=False):
                                                      break
                                              nbdist_outer_1.leave()

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
from nbdist.worker.lifting.batch_names import BatchNames, batch_names, with_data
from nbdist.worker.lifting.row_conversions import RowCalls

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from nbdist.cells.loops import Callees

LIFTS, LIFTED, REFUSE = "__nbdist_lifts__", "__nbdist_lifted__", "__nbdist_refuse__"
"""Built-in functions that rewritten cells call; the number of a loop is their argument."""

OUTER, SKIPPED = "__nbdist_outer__", "__nbdist_skipped__"
"""Built-in function for loops around training loops, and the exception that ends their passes."""

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
        late_read: first statement after the step that takes the next item of an iterator; or empty.
        read_before: names that a pass reads before its step.
        own_names: names whose values belong to the step, or that the loop binds in each pass.
        batches: names of batches whose rows only the step reads.
    """

    def __init__(
        self, loop: TrainingLoop, cell: str, namespace: dict[str, Any], file: str = ""
    ) -> None:
        self.loop = loop
        self.namespace = namespace
        self.late_read = ""
        self.batches = BatchNames()
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
        self.read_before = _read_before(loop)
        own = {*loop.outputs, *loop.carried, *loop.mutated} - self.read_before
        self.own_names = frozenset(own.union(targets.bound))


def _read_before(loop: TrainingLoop) -> set[str]:
    """Return the names that a pass reads before its step, as in `action = act(params, x)`."""
    names = Names()
    names.scan(loop.before)
    nodes = (node for value in loop.given.values() for node in ast.walk(value))
    return {*names.read}.union(node.id for node in nodes if isinstance(node, ast.Name))


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
            program = LoopProgram(divide(node, callees), cell, callees.namespace, file)
            late = (s for s in program.loop.after if _reads(s, callees))
            program.late_read = next(map(ast.unparse, late), "")
            program.batches = batch_names(program.loop, tree, callees)
            programs[number] = program
        except LoopError as error:
            error.file = file
            programs[number] = error
    around = _around(tree, callees, numbers)
    if not programs and not around:
        return None, programs
    rewritten = _Rewriter(programs, numbers, around, callees).visit(tree)
    return ast.fix_missing_locations(rewritten), programs


def _around(tree: ast.AST, callees: Callees, lifted: Container[Loop]) -> set[Loop]:
    """Return the loops that contain training loops, themselves or in functions that they call."""
    found: set[Loop] = set()
    for node in ast.iter_child_nodes(tree):
        if node in lifted or (isinstance(node, ast.FunctionDef) and _is_left(node)):
            continue
        found |= _around(node, callees, lifted)
        if isinstance(node, Loop) and any(
            part in lifted or (isinstance(part, ast.Call) and callees.trains(part))
            for statement in node.body
            for part in within(statement)
        ):
            found.add(node)
    return found


def _is_left(function: ast.FunctionDef) -> bool:
    """Return True if nbdist does not count the loops of a function: it is compiled, or yields."""
    nodes = (node for statement in function.body for node in within(statement))
    yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes)
    return yields or is_compiled(function)


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self,
        programs: dict[int, LoopProgram | LoopError],
        numbers: dict[Loop, int],
        around: set[Loop],
        callees: Callees,
    ) -> None:
        self._programs = programs
        self._numbers = numbers
        self._around = around
        self._callees = callees
        self._local: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        names = Names()
        names.scan(node.body)
        shared = {n for part in ast.walk(node) if isinstance(part, ast.Global) for n in part.names}
        before, self._local = self._local, sorted(names.assigned - shared)
        try:
            return self.generic_visit(node)
        finally:
            self._local = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's own spelling

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Let the end of a skipped pass through handlers of all exceptions."""
        leads = any(
            part in self._numbers or (isinstance(part, ast.Call) and self._callees.trains(part))
            for statement in node.body
            for part in within(statement)
        )
        self.generic_visit(node)
        if leads and any(one.type is None or _is_base_exception(one.type) for one in node.handlers):
            (through,) = _parsed(f"try: pass\nexcept {SKIPPED}: raise", node.lineno)
            assert isinstance(through, ast.Try)
            node.handlers = [*through.handlers, *node.handlers]
        return node

    def visit_For(self, node: ast.For | ast.While) -> ast.AST | list[ast.stmt]:
        if node in self._around:
            return self._outer(node)
        if node not in self._numbers:
            return self.generic_visit(node)
        number = self._numbers[node]
        program = self._programs[number]
        if isinstance(program, LoopError):
            return [*_parsed(f"{REFUSE}({number})", node.lineno), node]
        return _choice(number, program, self._local, self._callees)

    visit_While = visit_For  # noqa: N815 - ast's own spelling

    def _outer(self, node: ast.For | ast.While) -> ast.stmt:
        """Return a loop whose passes are counted."""
        self.generic_visit(node)
        line = node.lineno
        name = f"nbdist_outer_{line}"
        body = [_Breaks(name).visit(statement) for statement in node.body]
        text = (
            f"with {OUTER}() as {name}:\n while True:\n"
            f"  if {name}.is_over(begins=True): break\n"
            f"  with {name}.each(): pass\n"
            f"  if {name}.is_over(begins=False): break\n"
            f" {name}.leave()"
        )
        (around,) = _parsed(text, line)
        assert isinstance(around, ast.With)
        (inner, leave) = around.body
        assert isinstance(inner, ast.While)
        context = inner.body[1]
        assert isinstance(context, ast.With)
        context.body = [*_assignments(name, self._local, line), *body]
        node.body = inner.body
        node.orelse = _exhausted(name, node.orelse, line)
        around.body = [node, leave]
        return around


class _Breaks(ast.NodeTransformer):
    """Lets a resumed run ignore a `break` that decides by values of the past.

    Args:
        name: variable of the loop that the `break` leaves.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Break(self, node: ast.Break) -> ast.AST:
        (guarded,) = _parsed(f"if {self._name}.may_leave(): pass", node.lineno)
        assert isinstance(guarded, ast.If)
        guarded.body = [node]
        return guarded

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.While) -> ast.AST:
        node.orelse = [self.visit(statement) for statement in node.orelse]
        return node

    visit_While = visit_AsyncFor = visit_For  # noqa: N815 - ast's own spelling

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node


def _is_base_exception(kind: ast.expr) -> bool:
    return isinstance(kind, ast.Name) and kind.id == "BaseException"


def _exhausted(name: str, orelse: list[ast.stmt], line: int) -> list[ast.stmt]:
    """Return the `else` branch of a loop. A skipped pass leaves out that of the user."""
    (test,) = _parsed(f"if not {name}.exhausted(): pass", line)
    assert isinstance(test, ast.If)
    test.body = orelse or test.body
    return [test]


def _assignments(name: str, names: Sequence[str], line: int) -> list[ast.stmt]:
    """Return statements that assign the local names of a function which a resumed run restores."""
    if not names:
        return []
    text = "".join(f"\n if {n!r} in {name}.restored: {n} = {name}.restored[{n!r}]" for n in names)
    return _parsed(f"if {name}.restored:{text}", line)


def _conditional_assignments(name: str, names: Sequence[str], line: int) -> list[ast.stmt]:
    """Return statements that assign the names which only some steps assign."""
    text = "".join(
        f"if {n!r} in {name}.assigned(): {n} = {name}.assigned()[{n!r}]\n" for n in names
    )
    return _parsed(text, line)


def _needed(loop: TrainingLoop) -> tuple[str, ...]:
    """Return the carried names that no statement binds before the step of the first pass."""
    earlier, block = Names(), {*loop.block}
    earlier.scan(loop.before)
    waiting: list[ast.AST] = [loop.node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Name, ast.alias)):
            earlier.visit(node)
        waiting.extend(child for child in ast.iter_child_nodes(node) if child not in block)
    return tuple(name for name in loop.carried if name not in earlier.bound)


def _choice(number: int, program: LoopProgram, local: Sequence[str], callees: Callees) -> ast.stmt:
    """Return the statement that runs the lifted loop, or the loop as written."""
    name, loop, used = f"nbdist_{number}", program.loop, program.returned
    before = [_by_row(name, statement, program.batches) for statement in loop.before]
    given = [
        _value(parameter, _by_row(name, value, program.batches), loop, name)
        for parameter, value in loop.given.items()
    ]
    call = f"{name}.step({_tuple(given)}, {_tuple(loop.carried)}, {_thunks(loop)})"
    assign = f"{_tuple(used)} = {call}" if used else call
    line = loop.step[0].lineno
    chosen = _conditional_assignments(name, loop.conditional, line)
    block = [*before, *_parsed(assign, line), *chosen, *loop.after]
    lifted = _with_block(loop.node, loop.block, block)
    if program.batches.every:
        lifted.iter = with_data(lifted.iter, lambda data: _batches(name, data))
    reads = _reads_of_iterators(loop.node.body, loop, callees)
    (skip,) = _parsed(
        f"if {name}.skips():\n if {name}.is_over(begins=True): break\n"
        f" if {name}.is_over(begins=False): break\n continue",
        loop.line,
    )
    assert isinstance(skip, ast.If)
    skip.body = [skip.body[0], *reads, *skip.body[1:]]
    own = [n for n in local if n not in program.own_names]
    lifted.body = [skip, *_assignments(name, own, loop.line), *lifted.body]
    lifted.orelse = _exhausted(name, lifted.orelse, loop.line)
    rest = tuple(n for n in loop.outputs if n not in used)
    last = f"if {name}.ran: {_tuple(rest)} = {name}.last()" if rest else "pass"
    needed = _needed(loop)
    condition = f"{number}, lambda: {_tuple(needed)}" if needed else f"{number}"
    (choice,) = _parsed(
        f"if {LIFTS}({condition}):\n with {LIFTED}({number}) as {name}:\n  {name}.leave()\n"
        f"  {last}\nelse: pass",
        loop.line,
    )
    assert isinstance(choice, ast.If)
    within = choice.body[0]
    assert isinstance(within, ast.With)
    later = "".join(
        f"try: {n} = {name}.whole({n})\nexcept NameError: pass\n"
        for n in program.batches.read_later
    )
    within.body = [lifted, *_parsed(later, loop.line), *within.body]
    choice.orelse = [loop.node]
    return choice


def _batches(name: str, data: ast.expr) -> ast.expr:
    """Return an expression for the batches of a loop over these data."""

    def call(method: str, value: ast.expr) -> ast.expr:
        function = ast.Attribute(ast.Name(name, ast.Load()), method, ast.Load())
        return ast.copy_location(ast.Call(function, args=[value], keywords=[]), data)

    match data:
        case ast.Call(func=ast.Attribute(dataset, "as_numpy_iterator"), args=[], keywords=[]):
            data = call("numpy_batches", dataset)
    return call("batches", data)


def _by_row(name: str, code: Any, batches: BatchNames) -> Any:
    """Return code before the step, and let the loop make the calls that convert batches."""
    is_conversion = any(code is node for node in batches.conversions)
    return RowCalls(name).visit(copy.deepcopy(code)) if is_conversion else code


def _reads_of_iterators(
    body: list[ast.stmt], loop: TrainingLoop, callees: Callees
) -> list[ast.stmt]:
    """Return the statements that take the next batch: a pass without a step runs them too.

    Args:
        body: statements of the loop, or of an `if` in it, that lead to the step.
        loop: the loop.
        callees: knowledge about the objects that it calls.
    """
    if body is loop.block:
        given = [ast.copy_location(ast.Expr(value), value) for value in loop.given.values()]
        return [copy.deepcopy(s) for s in (*loop.before, *given) if _reads(s, callees)]
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If) and _leads_to(statement.body, loop.block):
            if inner := _reads_of_iterators(statement.body, loop, callees):
                found.append(ast.copy_location(ast.If(statement.test, inner, []), statement))
            break
        if _reads(statement, callees):
            found.append(copy.deepcopy(statement))
    return found


def _leads_to(body: list[ast.stmt], block: list[ast.stmt]) -> bool:
    return body is block or any(
        isinstance(statement, ast.If) and _leads_to(statement.body, block) for statement in body
    )


def _reads(statement: ast.stmt, callees: Callees) -> bool:
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(map(callees.takes_next, calls))


def _value(parameter: str, value: ast.expr, loop: TrainingLoop, name: str) -> str:
    """Return the source of a value that the step receives."""
    if _is_test(parameter):
        return parameter
    text = ast.unparse(value)
    return f"{name}.if_bound(lambda: {text})" if parameter in loop.perhaps else text


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

    The function returns None as its report, and its outputs by name. The value of a name that a
    step has not assigned is an ellipsis.
    """
    lines, starts = cell.split("\n"), logical_lines(cell)
    body: dict[int, str] = {}
    for statement in loop.step:
        if statement not in loop.texts:
            body |= {number: lines[number - 1] for number in _lines(statement)}
    _hide(body, loop)
    for other in (*loop.before, *loop.after):
        if not isinstance(other, ast.If):
            _remove(body, other)
    parts = [v for v in loop.given.values() if hasattr(v, "lineno") and v.lineno in body]
    for statement, text in loop.texts.items():
        if body.keys() & set(_lines(statement)):
            raise LoopError(statement.lineno, _SHARED)
        body[statement.lineno] = " " * loop.block[0].col_offset + text
    names = {id(value): name for name, value in loop.given.items()}
    for value in sorted(parts, key=lambda v: (v.lineno, v.col_offset), reverse=True):
        _replace(body, value, names[id(value)])
    indent_size, first = loop.block[0].col_offset, min(body)
    for number in starts & body.keys():
        body[number] = "    " + body[number][indent_size:]
    unassigned = [f"{name}=..." for name in loop.conditional]
    parameters = ", ".join((*loop.given, *loop.carried, *unassigned))
    outputs = ", ".join(f"{name!r}: {name}" for name in (*loop.outputs, *loop.conditional))
    text = "\n".join(body.get(number, "") for number in range(first, max(body) + 1))
    head = "\n" * (first - 2)
    return f"{head}def step({parameters}):\n{text}\n    return None, {{{outputs}}}\n"


def _hide(body: dict[int, str], loop: TrainingLoop) -> None:
    """Remove statements below the conditions of the step that the body runs."""
    for statement, leaves_empty in loop.hidden:
        if _shares_a_line(body, statement):
            _remove(body, statement)
            continue
        indent = " " * statement.col_offset
        body |= dict.fromkeys(_lines(statement), "")
        body[statement.lineno] = f"{indent}pass" if leaves_empty else ""


def _shares_a_line(body: dict[int, str], statement: ast.stmt) -> bool:
    """Return True if other code is on a line of the statement: `if done: print(x); step(x)`."""
    before = body[statement.lineno].encode()[: statement.col_offset]
    after = body[_end(statement)].encode()[statement.end_col_offset :].lstrip(b" \t;")
    return bool(before.strip()) or (bool(after) and not after.startswith(b"#"))


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
