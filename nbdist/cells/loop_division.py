"""Division of a training loop: statements of its body that a step can compute, and others.

The body has three parts: statements before the step, such as `x, y = batch`, the step, and
statements after it, such as `print(loss)`. The step contains every statement that takes a gradient
or updates a metric. The other parts run as written, once for each step.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.cells.arithmetic_updates import (
    items_of,
    may_read,
    only_computes,
    roots,
    updates,
)
from nbdist.cells.effects import (
    acts_outside,
    assigned_items,
    is_host,
    within,
)
from nbdist.cells.loops import (
    LoopError,
    refuse_growth,
    refuse_host,
    refuse_leaving,
    takes_gradient,
    too_late,
)
from nbdist.cells.names import Names
from nbdist.cells.nested_steps import separated
from nbdist.cells.statement_order import belongs, counts, drawn, independent, names_in
from nbdist.cells.step_inputs import Replaced, StepInputs, position

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from nbdist.cells.loops import Callees, Loop, Scan


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
        conditional: other names, which steps assign in an `if` or a loop.
        used: those outputs that other statements of the loop, or functions of the user, read.
        hidden_reads: those outputs that functions read which the step calls, and that it does not
            carry.
        kept_outside: names that statements outside of the step read and assign for the next pass,
            and those that the step reads and whose items they assign.
        mutated: names in `reads` of dicts, lists and arrays whose items the step replaces.
        perhaps: names in `given` that the loop binds in an `if` only.
        late: names in `given` of values that only statements after the step assign, such as
            averaged weights, or statements moved from there, such as counters.
        hidden: statements inside of the step's text that do not belong to it. True if they leave a
            branch empty.
        texts: source of statements that are parts of the user's statements, on one line.
        effect: code of the step that changes or shows something besides its outputs; or empty.
        scan: loop of JAX in the step, around its gradients.
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
    conditional: tuple[str, ...]
    used: tuple[str, ...]
    hidden_reads: tuple[str, ...]
    kept_outside: tuple[str, ...]
    mutated: tuple[str, ...]
    perhaps: tuple[str, ...]
    late: tuple[str, ...]
    hidden: list[tuple[ast.stmt, bool]]
    texts: dict[ast.stmt, str]
    effect: str
    scan: Scan

    @property
    def line(self) -> int:
        return self.node.lineno


@dataclass
class _Branch:
    """Statements of a branch of an `if` that contains a part of the step.

    Attributes:
        ahead: statements that run before the step, because `ours` need them.
        ours: statements of the step.
        others: statements that run after the step.
    """

    ahead: list[ast.stmt] = field(default_factory=list)
    ours: list[ast.stmt] = field(default_factory=list)
    others: list[ast.stmt] = field(default_factory=list)


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
        self._separated: list[ast.stmt] = []
        self._moved: list[ast.stmt] = []
        self._updates: list[ast.stmt] = []
        self._given: dict[str, ast.expr] = {}
        self._effect = ""

    def _innermost(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements with the step: those of an `if` if it contains the whole step."""
        seeds = [statement for statement in block if self._is_seed(statement)]
        match seeds:
            case [ast.If(body=body, orelse=orelse) as only] if not takes_gradient(
                orelse, self._callees
            ):
                self._around += [*(s for s in block if s is not only), *orelse]
                return self._innermost(body)
        return block

    def _is_seed(self, statement: ast.stmt) -> bool:
        return takes_gradient([statement], self._callees)

    def result(self) -> TrainingLoop:
        block = self._block
        seeds = [number for number, statement in enumerate(block) if self._is_seed(statement)]
        self._before += block[: seeds[0]]
        for number, statement in enumerate(block[seeds[0] : seeds[-1] + 1], start=seeds[0]):
            if number in seeds:
                self._add_seed(statement)
            elif self._is_host(statement):
                self._after.append(statement)
            elif isinstance(statement, ast.If) and self._callees.compiles:
                self._add_if(statement)
            else:
                self._add(statement)
        self._add_tail(self._without_managers(block[seeds[-1] + 1 :]))
        self._hoist()
        return self._described()

    def _without_managers(self, tail: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Leave out `del tape` after the step: only the step has the name."""
        managers = self._managers()
        kept: list[ast.stmt] = []
        for statement in tail:
            if isinstance(statement, ast.Delete):
                targets = [t for t in statement.targets if not _is_one_of(t, managers)]
                others = ast.Delete(targets) if targets else ast.Pass()
                kept.append(ast.copy_location(others, statement))
            else:
                kept.append(statement)
        return kept

    def _managers(self) -> set[str]:
        """Return the names that the step binds in `with ... as name`."""
        return {
            inner.id
            for statement in self._step
            for node in within(statement)
            if isinstance(node, ast.withitem) and node.optional_vars is not None
            for inner in ast.walk(node.optional_vars)
            if isinstance(inner, ast.Name)
        }

    def _add_tail(self, tail: Sequence[ast.stmt]) -> None:
        """Add the statements after the last gradient to the step, or to those after it."""
        own = list(self._step)
        for statement in tail:
            if self._belongs(statement, own):
                own.append(statement)
        if not self._callees.compiles:
            self._updates = updates(tail, own, self._early(), self._callees)
        for statement in tail:
            belongs = statement in self._updates or self._belongs(statement, self._step)
            if belongs and self._may_join(statement):
                self._step.append(statement)
            else:
                self._after.append(statement)

    def _belongs(self, statement: ast.stmt, step: Sequence[ast.stmt]) -> bool:
        """Return True if a statement updates a metric, or computes with the framework for a step.

        A new value for a variable of the loop, `x = x + jnp.sign(g)`, is no state.
        """
        if not belongs(statement, step, self._callees):
            return False
        return self._callees.compiles or not roots(statement) & self._targets()

    def _targets(self) -> set[str]:
        target = Names()
        if isinstance(self._loop, ast.For):
            target.visit(self._loop.target)
        return set(target.bound)

    def _early(self) -> set[str]:
        """Return the names that the loop binds before the step, without those of moved statements.

        It also contains those of statements around the block of the step.
        """
        early = Names()
        early.scan([*self._around, *(s for s in self._before if s not in self._moved)])
        return self._targets().union(early.bound)

    def _may_join(self, statement: ast.stmt) -> bool:
        """Move counters and rates that an update reads before the step.

        Return False if another statement must run before the update.
        """
        moved: list[ast.stmt] = []
        for host in reversed(self._after):
            if any(self._must_precede(host, later) for later in (*moved, statement)):
                moved.insert(0, host)
        if not all(map(self._may_move, moved)):
            return False
        self._after = [host for host in self._after if host not in moved]
        self._before += moved
        self._moved += moved
        return True

    def _must_precede(self, host: ast.stmt, statement: ast.stmt) -> bool:
        if not independent(host, statement):
            return True
        callees = self._callees
        return not callees.compiles and may_read(host, statement, self._by_functions, callees)

    @functools.cached_property
    def _by_functions(self) -> Set[str]:
        return self._callees.read_by_functions(self._loop)

    def _may_move(self, host: ast.stmt) -> bool:
        """Return True if a statement after the step may run before it."""
        if self._callees.compiles or not only_computes(host, self._callees):
            return False
        return not any(self._must_precede(other, host) for other in self._step)

    def _bound_in_loop(self) -> set[str]:
        names = Names()
        names.scan(self._loop.body)
        return set(names.bound)

    def _is_host(self, statement: ast.stmt) -> bool:
        return (
            is_host(statement)
            or bool(drawn(statement, self._callees))
            or counts(statement, self._step)
        )

    def _add_seed(self, statement: ast.stmt) -> None:
        for node in within(statement):
            if isinstance(node, ast.Call) and (effect := self._callees.effect(node)):
                self._effect = effect
                if self._callees.compiles:
                    raise LoopError(
                        statement.lineno,
                        f"{effect} would run only when nbdist compiles the step: move it to the "
                        "loop",
                    )
        if isinstance(statement, ast.If):
            self._add_if(statement)
            return
        if self._callees.compiles and (parts := separated(statement, self._callees)):
            call, use = parts
            self._add(call)
            self._separated.append(call)
            self._after.append(use)
            return
        self._refuse(statement)
        self._add(statement)

    def _add_if(self, statement: ast.If) -> None:
        statement, rest = self._split(statement)
        self._add(statement)
        if rest is not None:
            self._after.append(rest)

    def _refuse(self, statement: ast.stmt) -> None:
        refuse_leaving(statement)
        if self._callees.compiles:
            refuse_host(statement)
            refuse_growth(statement, self._bound_in_loop())

    def _add(self, statement: ast.stmt) -> None:
        """Add a statement to the step."""
        self._run_before(statement)
        self._step.append(statement)
        if any(acts_outside(node) and not self._trains(node) for node in within(statement)):
            self._effect = f"`{ast.unparse(statement)}`"

    def _run_before(self, statement: ast.stmt, hosts: Sequence[ast.stmt] | None = None) -> None:
        """Move the statements that a part of the step needs before the step."""
        for host in self._blocking(statement, self._after if hosts is None else hosts):
            self._run_before(host, self._after[: self._after.index(host)])
            if not all(independent(other, host) for other in self._step):
                raise too_late(host, statement)
            self._after.remove(host)
            self._before.append(host)

    def _trains(self, node: ast.AST) -> bool:
        """Return True for a call that takes a gradient, as `trainer.update(x)`."""
        if not isinstance(node, ast.Call):
            return False
        return self._callees.takes_gradient(ast.Call(node.func, args=[], keywords=[]))

    def _blocking(self, statement: ast.stmt, hosts: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [host for host in hosts if not independent(host, statement)]

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
            self._refuse(statement)
            return statement, None
        self._run_before(ast.copy_location(ast.Expr(statement.test), statement))
        name = f"_nbdist_{statement.lineno}"
        test = ast.copy_location(ast.Name(name, ast.Load()), statement.test)
        takes_all = not self._is_seed(statement)
        parts = (statement.body, statement.orelse)
        branches = [self._branches(part, made, takes_all=takes_all) for part in parts]
        self._test(name, statement, [branch.ahead for branch in branches])
        body, orelse = (branch.ours for branch in branches)
        ours = ast.copy_location(ast.If(test, body or [_empty(statement)], orelse), statement)
        others, else_others = (branch.others for branch in branches)
        if not others and not else_others:
            return ours, None
        rest = ast.If(test, others or [_empty(statement)], else_others)
        return ours, ast.copy_location(rest, statement)

    def _test(self, name: str, statement: ast.If, ahead: Sequence[list[ast.stmt]]) -> None:
        """Evaluate a condition before the step, and run the statements that the step needs."""
        self._given[name] = statement.test
        value = ast.Call(ast.Name("bool", ast.Load()), [statement.test], [])
        test = ast.NamedExpr(ast.Name(name, ast.Store()), value)
        body, orelse = ahead
        first = ast.If(test, body or [_empty(statement)], orelse)
        ast.fix_missing_locations(ast.copy_location(first, statement))
        if body or orelse:
            self._run_before(first)
            if not all(independent(other, first) for other in self._step):
                raise too_late((body or orelse)[0], statement)
        self._before.append(first)

    def _branches(self, statements: list[ast.stmt], made: Names, *, takes_all: bool) -> _Branch:
        """Divide a branch. Its part of the step has all statements that only compute, or few."""
        branch = _Branch()
        known = {*made.bound, *made.read}
        for statement in statements:
            names = names_in(statement)
            is_known = takes_all or (
                names.bound and names.bound.keys() <= known & made.bound.keys()
            )
            is_free = all(independent(other, statement) for other in branch.others)
            if self._is_seed(statement) or (is_known and is_free and not self._is_host(statement)):
                self._run_first(statement, branch)
                self._refuse(statement)
                branch.ours.append(statement)
            else:
                branch.others.append(statement)
        rest = [s for s in statements if s not in branch.ours]
        self._hidden += [(s, not branch.ours and s is rest[0]) for s in rest]
        return branch

    def _run_first(self, statement: ast.stmt, branch: _Branch) -> None:
        """Move the statements of a branch that its part of the step needs.

        Those that only compute, as `key, subkey = jax.random.split(key)`, become part of the step.
        Those that draw or act on the host run before it.
        """
        needed = [statement]
        for other in reversed(branch.others):
            if not all(independent(other, later) for later in needed):
                needed.insert(0, other)
        for other in needed[:-1]:
            branch.others.remove(other)
            if not self._is_host(other):
                self._refuse(other)
                branch.ours.append(other)
            elif all(independent(earlier, other) for earlier in branch.ours):
                branch.ahead.append(other)
            else:
                raise too_late(other, statement)

    def _hoist(self) -> None:
        """Let the step receive values that the loop computes for it, such as `x[i : i + 32]`."""
        own = Names()
        own.scan(self._step)
        inputs = StepInputs(self._callees, self._bound_outside(), {*own.bound})
        for statement in (s for s in self._step if s not in self._updates):
            inputs.visit(statement)
            inputs.is_first = False
        for node in inputs.found:
            self._given.setdefault(f"_nbdist_{node.lineno}_{node.col_offset}", node)
        given = {id(part) for node in inputs.found for part in ast.walk(node)}
        for statement in self._step:
            if code := drawn(statement, self._callees, given):
                raise LoopError(
                    statement.lineno,
                    f"`{code}` is inside the statement that takes the gradient, which nbdist "
                    "compiles: move it before that",
                )

    def _bound_outside(self) -> set[str]:
        """Return the names that statements of the loop bind outside of the step."""
        outside = Names()
        outside.visit(self._loop.target if isinstance(self._loop, ast.For) else self._loop.test)
        outside.scan([*self._around, *self._before, *self._after])
        return set(outside.bound)

    def _bound_always(self) -> set[str]:
        """Return the names of `_bound_outside` that not only an `if` binds."""
        outside = (*self._around, *self._before, *self._after)
        always = Names()
        always.scan([s for s in outside if not isinstance(s, ast.If)])
        return self._targets().union(always.bound)

    def _described(self) -> TrainingLoop:
        replaced = {position(value): name for name, value in self._given.items()}
        step = {s: Replaced(replaced).visit(copy.deepcopy(s)) for s in self._step}
        names = Names(self._given)
        names.scan(list(step.values()))
        own = {name for name in names.read if name not in vars(builtins)}
        carried = tuple(sorted(name for name in own if name in names.assigned))
        bound = self._bound_outside()
        given = [n for n in names.read if n in bound and n not in carried and n not in self._given]
        managers = self._managers()
        outputs = tuple(
            name
            for name in names.bound
            if (name in names.assigned and names.is_sure(name) and name not in managers)
            or name in carried
        )
        rest = Names()
        outside = [*self._after, *self._before, *self._around]
        rest.scan(outside)
        if isinstance(self._loop, ast.While):
            rest.visit(self._loop.test)
        for value in self._given.values():
            rest.visit(value)
        items = set().union(*map(assigned_items, outside)) & (own - bound)
        mutated = set().union(*(items_of(s) for s in self._step if s in self._updates))
        early = self._early()
        moved = set().union(*(names_in(s).bound for s in self._moved))
        late = [name for name in given if name not in early]
        late += [
            name
            for name, value in self._given.items()
            if moved & names_in(ast.Expr(value)).read.keys()
        ]
        hidden_reads, always = self._read_in_calls() - {*carried}, self._bound_always()
        conditional = tuple(
            name
            for name in names.bound
            if name in names.assigned and name not in {*outputs, *managers, *names.deleted}
        )
        others = {*rest.read, *rest.bound, *self._by_functions}
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
            conditional=conditional,
            used=tuple(name for name in outputs if name in others),
            hidden_reads=tuple(name for name in outputs if name in hidden_reads),
            kept_outside=tuple(
                n for n in rest.read if n not in self._given and (n in rest.assigned or n in items)
            ),
            mutated=tuple(sorted(mutated)),
            perhaps=tuple(n for n in given if n not in always),
            late=tuple(late),
            hidden=self._hidden,
            texts={statement: ast.unparse(step[statement]) for statement in self._separated},
            effect=self._effect,
            scan=self._scan(),
        )

    def _read_in_calls(self) -> set[str]:
        """Return the names from outside that functions read which the step calls."""
        nodes = (node for statement in self._step for node in within(statement))
        calls = (node for node in nodes if isinstance(node, ast.Call))
        return set().union(*map(self._callees.reads, calls))

    def _scan(self) -> Scan:
        calls = [
            node
            for statement in self._step
            for node in within(statement)
            if isinstance(node, ast.Call) and self._callees.takes_gradient(node)
        ]
        found = {self._callees.scan(call) for call in calls}
        scan = found.pop() if len(found) == 1 else ""
        if scan == "batches" and not all(map(self._is_given, calls)):
            return "inside"  # as in f(x.reshape(5, 8, -1)): only the step has these batches
        return scan

    def _is_given(self, call: ast.Call) -> bool:
        """Return True if all arguments of a call are names, or values that the loop passes."""
        known = (ast.Name, ast.Attribute, ast.Constant, ast.Lambda)
        given = set(map(id, self._given.values()))
        values: list[ast.expr] = [*call.args, *(word.value for word in call.keywords)]
        for value in values:
            if isinstance(value, ast.Tuple):
                values += value.elts
        return all(isinstance(value, (*known, ast.Tuple)) or id(value) in given for value in values)


def _is_one_of(target: ast.expr, names: Set[str]) -> bool:
    return isinstance(target, ast.Name) and target.id in names


def _empty(statement: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Pass(), statement)
