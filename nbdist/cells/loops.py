"""Training loops in a cell, and the statements of a loop's body that a step can compute.

A training loop is the innermost loop over data whose body takes a gradient. Its body has three
parts: statements before the step, such as `x, y = batch`, the step, and statements after it, such
as `print(loss)`. The step contains every statement that takes a gradient or updates a metric. The
other parts run as written, once for each step.
"""

from __future__ import annotations

import ast
import builtins
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nbdist.cells.names import Names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Loop = ast.For | ast.While
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

UPDATES = {"GradientTape", "gradient", "apply_gradients", "minimize"}
"""Tapes, and methods of tapes and optimizers: a statement that calls one belongs to the step."""

_GROWS = {"append", "extend", "insert"}
_SHOWS = {"print", "display", "input", "open"}
_READS = {"float", "int", "str", "repr", "format", "len", "list", "round", "bool"}
_HOST_METHODS = {
    *("append", "extend", "insert", "numpy", "item", "tolist", "format", "join", "write"),
    *("set_description", "set_postfix", "set_postfix_str", "update", "add", "info", "debug"),
    *("warning", "log", "flush", "scalar", "savefig", "plot", "add_scalar"),
}
"""Methods whose effect is outside of a step: lists, progress bars, logs and files."""


class Callees(Protocol):
    """Knowledge about the objects that a cell calls."""

    def takes_gradient(self, call: ast.Call) -> bool:
        """Return True if the called function takes a gradient, itself or in those it calls."""
        ...

    def distributes(self, call: ast.Call) -> bool:
        """Return True if the call runs a function on the replicas of a strategy."""
        ...

    def effect(self, call: ast.Call) -> str:
        """Return the effect of a called function that a compiled step would lose; or empty."""
        ...

    def computes(self, call: ast.Call) -> bool:
        """Return True if the called object belongs to the framework, as `tf.reduce_mean`."""
        ...

    def is_metric(self, call: ast.Call) -> bool:
        """Return True if the call updates a metric."""
        ...


@dataclass(frozen=True)
class TrainingLoop:
    """A training loop whose body is divided.

    Attributes:
        node: the loop.
        block: statements of the loop that contain the step: its body, or that of an `if` in it.
        before: statements of the block before the step.
        step: statements of the step.
        after: statements after the step.
        given: values that the step receives, by the name of its parameter.
        reads: names that the step reads from outside of the loop, with their first line.
        carried: names that the step reads and then assigns for the next step.
        outputs: names that the step assigns.
        used: those outputs that other statements of the loop read.
        hidden: statements inside of the step's text that do not belong to it. True if they leave a
            branch empty.
    """

    node: Loop
    block: list[ast.stmt]
    before: list[ast.stmt]
    step: list[ast.stmt]
    after: list[ast.stmt]
    given: dict[str, ast.expr]
    reads: dict[str, int]
    carried: tuple[str, ...]
    outputs: tuple[str, ...]
    used: tuple[str, ...]
    hidden: list[tuple[ast.stmt, bool]]

    @property
    def line(self) -> int:
        return self.node.lineno


class LoopError(Exception):
    """A training loop whose body cannot be divided: the line, and the reason."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


def training_loops(tree: ast.AST, callees: Callees) -> Iterator[Loop]:
    """Yield the training loops of a cell, in its functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.For, ast.While)) and _takes_gradient(node.body, callees):
            inner = [loop for loop in _loops(node.body) if _takes_gradient(loop.body, callees)]
            if inner and not _repeats_within(node, inner):
                yield from training_loops(node, callees)
            else:
                yield node
        else:
            yield from training_loops(node, callees)


def _repeats_within(outer: Loop, inner: Sequence[Loop]) -> bool:
    """Return True if the inner loops repeat an update on one batch of the outer loop."""
    if not isinstance(outer, ast.For) or _is_range(outer.iter):
        return False
    return all(
        isinstance(loop, ast.For) and _is_range(loop.iter) and not _takes_next(loop.body)
        for loop in inner
    )


def _is_range(iterable: ast.expr) -> bool:
    call = iterable
    while isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] in (
        *("tqdm", "enumerate", "trange", "range", "count"),
    ):
        if ast.unparse(call.func).split(".")[-1] in ("trange", "range", "count"):
            return True
        if not call.args:
            return False
        call = call.args[0]
    return False


def _takes_next(statements: Sequence[ast.stmt]) -> bool:
    """Return True if statements take the next batch, with `next(...)` or a slice."""
    return any(
        (isinstance(node, ast.Call) and ast.unparse(node.func) in ("next", "take"))
        or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice))
        for statement in statements
        for node in _within(statement)
    )


def divide(loop: Loop, callees: Callees) -> TrainingLoop:
    """Divide the body of a training loop.

    Raises:
        LoopError: statements of the step and others cannot be separated.
    """
    return _Division(loop, callees).result()


class _Division:
    """Division of the body of a loop, statement by statement."""

    def __init__(self, loop: Loop, callees: Callees) -> None:
        self._loop = loop
        self._callees = callees
        self._around: list[ast.stmt] = []
        self._block = self._innermost(loop.body)
        self._before: list[ast.stmt] = []
        self._step: list[ast.stmt] = []
        self._after: list[ast.stmt] = []
        self._hidden: list[tuple[ast.stmt, bool]] = []
        self._given: dict[str, ast.expr] = {}

    def _innermost(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements with the step: those of an `if` if it contains the whole step."""
        seeds = [statement for statement in block if self._is_seed(statement)]
        match seeds:
            case [ast.If(body=body, orelse=orelse) as only] if not _takes_gradient(
                orelse, self._callees
            ):
                self._around += [*(s for s in block if s is not only), *orelse]
                return self._innermost(body)
        return block

    def _is_seed(self, statement: ast.stmt) -> bool:
        return _takes_gradient([statement], self._callees)

    def result(self) -> TrainingLoop:
        block = self._block
        seeds = [number for number, statement in enumerate(block) if self._is_seed(statement)]
        self._before += block[: seeds[0]]
        for number, statement in enumerate(block[seeds[0] :], start=seeds[0]):
            if number in seeds:
                self._add_seed(statement)
            elif number < seeds[-1]:
                if _is_host(statement):
                    self._after.append(statement)
                else:
                    self._add(statement)
            elif _belongs(statement, self._step, self._callees) and not self._blocking(statement):
                self._step.append(statement)
            else:
                self._after.append(statement)
        self._hoist()
        return self._described()

    def _add_seed(self, statement: ast.stmt) -> None:
        for node in _within(statement):
            if isinstance(node, ast.Call) and (effect := self._callees.effect(node)):
                raise LoopError(
                    statement.lineno,
                    f"{effect} would run only when nbdist compiles the step: move it to the loop",
                )
        if isinstance(statement, ast.If):
            statement, rest = self._split(statement)
            self._add(statement)
            if rest is not None:
                self._after.append(rest)
            return
        _refuse_host(statement)
        self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        """Add a statement to the step. Statements that must run earlier move before the step."""
        for host in self._blocking(statement):
            earlier = [*self._step, *self._after[: self._after.index(host)]]
            if not all(_independent(other, host) for other in earlier):
                raise LoopError(
                    host.lineno,
                    f"this statement must run before line {statement.lineno} of the step, and "
                    "after an earlier line of it",
                )
            self._after.remove(host)
            self._before.append(host)
        self._step.append(statement)

    def _blocking(self, statement: ast.stmt) -> list[ast.stmt]:
        return [host for host in self._after if not _independent(host, statement)]

    def _split(self, statement: ast.If) -> tuple[ast.If, ast.If | None]:
        """Split an `if` into one of the step and one of other statements, such as `print`.

        The step receives the value of the condition. An update in every fourth step, `if (i + 1) %
        4 == 0`, then needs one program for each value.
        """
        made = Names()
        made.scan(self._step)
        condition = Names()
        condition.visit(statement.test)
        if condition.read.keys() & made.bound.keys():
            _refuse_host(statement)
            return statement, None
        name = f"_nbdist_{statement.lineno}"
        test = ast.copy_location(ast.Name(name, ast.Load()), statement.test)
        self._given[name] = statement.test
        branches = [self._branches(part, made) for part in (statement.body, statement.orelse)]
        (body, others), (orelse, else_others) = branches
        ours = ast.copy_location(ast.If(test, body or [_empty(statement)], orelse), statement)
        if not others and not else_others:
            return ours, None
        rest = ast.If(test, others or [_empty(statement)], else_others)
        return ours, ast.copy_location(rest, statement)

    def _branches(
        self, statements: list[ast.stmt], made: Names
    ) -> tuple[list[ast.stmt], list[ast.stmt]]:
        ours: list[ast.stmt] = []
        others: list[ast.stmt] = []
        known = {*made.bound, *made.read}
        for statement in statements:
            names = _names(statement)
            is_known = names.bound and names.bound.keys() <= known & made.bound.keys()
            is_free = all(_independent(other, statement) for other in others)
            if self._is_seed(statement) or (is_known and is_free and not _is_host(statement)):
                _refuse_host(statement)
                ours.append(statement)
            else:
                others.append(statement)
        self._hidden += [(s, not ours and s is others[0]) for s in others]
        return ours, others

    def _hoist(self) -> None:
        """Let the step receive slices of the loop, such as `x[i : i + 32]`."""
        own, bound = Names(), self._bound_outside()
        own.scan(self._step)
        for statement in self._step:
            for node in _within(statement):
                if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
                    continue
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                index = {n.id for n in ast.walk(node.slice) if isinstance(n, ast.Name)}
                if index & bound and not names & own.bound.keys():
                    name = f"_nbdist_{node.lineno}_{node.col_offset}"
                    self._given.setdefault(name, node)

    def _bound_outside(self) -> set[str]:
        """Return the names that statements of the loop bind outside of the step."""
        outside = Names()
        if isinstance(self._loop, ast.For):
            outside.visit(self._loop.target)
        outside.scan([*self._around, *self._before, *self._after])
        return set(outside.bound)

    def _described(self) -> TrainingLoop:
        replaced = {_position(value): name for name, value in self._given.items()}
        names = Names(self._given)
        names.scan([_Replaced(replaced).visit(copy.deepcopy(s)) for s in self._step])
        own = {name for name in names.read if name not in vars(builtins)}
        carried = tuple(sorted(name for name in own if name in names.assigned))
        bound = self._bound_outside()
        given = [n for n in names.read if n in bound and n not in carried and n not in self._given]
        managers = {
            inner.id
            for statement in self._step
            for node in _within(statement)
            if isinstance(node, ast.withitem) and node.optional_vars is not None
            for inner in ast.walk(node.optional_vars)
            if isinstance(inner, ast.Name)
        }
        outputs = tuple(
            name
            for name in names.bound
            if (name in names.assigned and names.is_sure(name) and name not in managers)
            or name in carried
        )
        rest = Names()
        rest.scan([*self._after, *self._before, *self._around])
        if isinstance(self._loop, ast.While):
            rest.visit(self._loop.test)
        for value in self._given.values():
            rest.visit(value)
        return TrainingLoop(
            node=self._loop,
            block=self._block,
            before=self._before,
            step=self._step,
            after=self._after,
            given={**{n: ast.Name(n, ast.Load()) for n in given}, **self._given},
            reads={
                name: line
                for name, line in names.read.items()
                if name in own and name not in (*given, *carried) and name not in names.bound
            },
            carried=carried,
            outputs=outputs,
            used=tuple(name for name in outputs if name in rest.read),
            hidden=self._hidden,
        )


class _Replaced(ast.NodeTransformer):
    """Replaces expressions by names, by their positions."""

    def __init__(self, names: dict[tuple[int, int, int], str]) -> None:
        self._names = names

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = self._names.get(_position(node))
        return (
            self.generic_visit(node)
            if name is None
            else ast.copy_location(ast.Name(name, ast.Load()), node)
        )


def _position(node: ast.expr) -> tuple[int, int, int]:
    return node.lineno, node.col_offset, node.end_col_offset or 0


def _empty(statement: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Pass(), statement)


def _takes_gradient(statements: Sequence[ast.stmt], callees: Callees) -> bool:
    nodes = [node for statement in statements for node in _within(statement)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if any(map(callees.distributes, calls)):
        return False
    return any(updates(call) or callees.takes_gradient(call) for call in calls)


def updates(call: ast.Call) -> bool:
    """Return True for a tape, and for a method that takes or applies a gradient."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "GradientTape"
    return isinstance(function, ast.Attribute) and function.attr in UPDATES


def _belongs(statement: ast.stmt, step: Sequence[ast.stmt], callees: Callees) -> bool:
    """Return True if a statement after the last gradient is part of the step.

    It updates a metric, or computes with the framework from values of the step.
    """
    calls = [node for node in _within(statement) if isinstance(node, ast.Call)]
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and callees.is_metric(statement.value)
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not calls:
        return False
    made = Names()
    made.scan(step)
    names = Names()
    names.visit(statement)
    return bool(names.read.keys() & made.bound.keys()) and all(map(callees.computes, calls))


def _is_host(statement: ast.stmt) -> bool:
    """Return True if a statement has an effect outside of the step, such as `print`."""
    return any(map(_acts_outside, _within(statement)))


def _acts_outside(node: ast.AST) -> bool:
    if isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)):
        return True
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return not isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in _SHOWS or node.func.id in _READS
    return isinstance(node.func, ast.Attribute) and node.func.attr in _HOST_METHODS


def _refuse_host(statement: ast.stmt) -> None:
    """Raise LoopError if a statement of the step prints, or leaves the loop."""
    for node in _within(statement):
        leaves = isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom))
        shows = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _SHOWS
        )
        reads = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("numpy", "item", "tolist")
        )
        if leaves or shows or reads or _assigns(node, _own_names([statement])):
            text = ast.unparse(node).split("\n")[0]
            raise LoopError(
                getattr(node, "lineno", statement.lineno),
                f"`{text}` is inside the statement that takes the gradient: move it after that",
            )


def effect_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST | None:
    """Return the first statement of a function that changes or shows something outside of it.

    None if the function has no such statement, or if `tf.function` compiles it. TensorFlow then
    runs it only during a trace, also without nbdist.
    """
    if any("function" in ast.unparse(decorator) for decorator in function.decorator_list):
        return None
    own = _own_names(function.body)
    for node in (node for statement in function.body for node in _within(statement)):
        if isinstance(node, (ast.Global, ast.Nonlocal)) or _assigns(node, own):
            return node
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in _SHOWS:
                return node
            case ast.Call(func=ast.Attribute(attr=method)) if method in _GROWS:
                if root_name(node.func) not in own:
                    return node
    return None


def _own_names(statements: Sequence[ast.stmt]) -> set[str]:
    nodes = (node for statement in statements for node in _within(statement))
    return {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def _assigns(node: ast.AST, own: set[str]) -> bool:
    """Return True for a target such as `self.count`, or `log["loss"]` unless `log` is in `own`."""
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or isinstance(node.ctx, ast.Load):
        return False
    return isinstance(node, ast.Attribute) or root_name(node) not in own


def root_name(node: ast.expr) -> str:
    """Return the name at the start of `a.b[c]`; empty if it starts with another expression."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _independent(host: ast.stmt, statement: ast.stmt) -> bool:
    """Return True if `statement` may run before `host`, which is written before it."""
    one, other = _names(host), _names(statement)
    if one.bound.keys() & (other.read.keys() | other.bound.keys()):
        return False
    if other.bound.keys() & one.read.keys():
        return False
    return not (set(_roots(statement)) & set(_roots(host)))


def _names(statement: ast.stmt) -> Names:
    names = Names()
    names.visit(statement)
    return names


def _roots(statement: ast.stmt) -> Iterator[str]:
    """Yield the names whose objects a statement changes by a method, as `losses.append(...)`."""
    for node in _within(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = root_name(node.func)
            if name and name not in ("tf", "np", "jnp"):
                yield name


def _loops(statements: Sequence[ast.stmt]) -> Iterator[Loop]:
    for statement in statements:
        for node in _within(statement):
            if isinstance(node, (ast.For, ast.While)):
                yield node


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the nodes below it, without the contents of functions and classes."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from _within(child)
