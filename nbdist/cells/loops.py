"""Training loops in a cell: the innermost loops over data whose body takes a gradient.

The last functions refuse statements that a step cannot contain.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbdist.cells.effects import (
    GROWS,
    SHOWS,
    assigns,
    is_compiled,
    own_names,
    root_name,
    within,
)
from nbdist.cells.names import Names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, Set

Loop = ast.For | ast.While

_TRAINED = {"trainable_variables", "trainable_weights", "apply_gradients", "minimize"}
"""Attributes of models and optimizers, which batches do not have."""

Scan = Literal["", "batches", "inside"]
"""Loop of JAX around the gradients of a compiled function: none, over batches that the function
receives along their first axis, or over batches that it takes from its data itself.
"""


class Callees(Protocol):
    """Knowledge about the objects that a cell calls.

    Attributes:
        namespace: global names of the cell.
        compiles: True if the framework compiles the step. Prints and other effects in it are then
            lost.
    """

    namespace: dict[str, Any]
    compiles: bool

    def read_by_functions(self, loop: ast.AST) -> Set[str]:
        """Return the names from outside that functions of the user read, but not those around."""
        ...

    def reads(self, call: ast.Call) -> Set[str]:
        """Return the names from outside that the called function reads, itself or in its calls."""
        ...

    def updates(self, call: ast.Call) -> bool:
        """Return True if the call itself takes or applies a gradient, by its name."""
        ...

    def takes_gradient(self, call: ast.Call) -> bool:
        """Return True if the called function takes a gradient, itself or in those it calls."""
        ...

    def trains(self, call: ast.Call) -> bool:
        """Return True if the called function has a training loop, itself or in its calls."""
        ...

    def distributes(self, call: ast.Call) -> bool:
        """Return True if the call runs a function on the replicas of a strategy."""
        ...

    def scan(self, call: ast.Call) -> Scan:
        """Describe the loop of JAX around the gradients of the called function."""
        ...

    def repeats(self, call: ast.Call) -> bool:
        """Return True if the call is a loop of JAX around gradients, or calls one."""
        ...

    def effect(self, call: ast.Call) -> str:
        """Return code of a called function that changes or shows something else; or empty."""
        ...

    def draws(self, call: ast.Call) -> bool:
        """Return True if a compiled step would repeat the result of the call: `np.random.rand()`.

        Such calls draw random numbers in Python or NumPy, or take the next value of an iterator.
        """
        ...

    def computes(self, call: ast.Call) -> bool:
        """Return True if the called object belongs to the framework, as `tf.reduce_mean`."""
        ...

    def takes_next(self, call: ast.Call) -> bool:
        """Return True if the call takes the next item of an iterator, itself or in a function."""
        ...

    def definitions(self, name: str) -> Sequence[ast.AST]:
        """Return the definitions of the function or class of the user behind a name."""
        ...

    def is_metric(self, call: ast.Call) -> bool:
        """Return True if the call updates a metric."""
        ...

    def is_input(self, call: ast.Call, outside: set[str], *, is_first: bool) -> bool:
        """Return True if the loop may make the call and pass its result to the step.

        Args:
            call: a call in the step that reads nothing that the step assigns.
            outside: names that the loop binds outside of the step.
            is_first: True if no other statement of the step runs before the call.
        """
        ...


class LoopError(Exception):
    """A training loop whose body cannot be divided: the file if it has one, line, and reason."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(line, reason)
        self.file = ""
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        return f"{place_of(self.file, self.line)}: {self.reason}"


def place_of(file: str, line: int) -> str:
    """Return a line for messages, with the name of its file unless that is empty."""
    return f"{file}, line {line}" if file else f"line {line}"


def training_loops(tree: ast.AST, callees: Callees) -> Iterator[Loop]:
    """Yield the training loops of a cell, in its functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.For, ast.While)) and takes_gradient(node.body, callees):
            inner = [loop for loop in _loops(node.body) if takes_gradient(loop.body, callees)]
            if inner and not _repeats_within(node, inner, callees):
                yield from training_loops(node, callees)
            else:
                yield node
        else:
            yield from training_loops(node, callees)


def _repeats_within(outer: Loop, inner: Sequence[Loop], callees: Callees) -> bool:
    """Return True if the inner loops repeat an update on one batch of the outer loop."""
    if not isinstance(outer, ast.For) or _has_no_batches(outer, callees):
        return False
    if not all(repeats_batch(loop, callees) for loop in inner):
        return False
    others = [statement for statement in outer.body if statement not in inner]
    return takes_gradient(others, callees) or not _begins_training(outer, inner, callees)


def _begins_training(outer: ast.For, inner: Sequence[Loop], callees: Callees) -> bool:
    """Return True if each pass of the outer loop creates what its inner loops train."""
    created: set[str] = set()
    for statement in outer.body:
        match statement:
            case ast.Assign(value=ast.Call(func=ast.Attribute(attr="Variable"))):
                return True
            case ast.Assign(targets=[target], value=ast.Call() | ast.Tuple()):
                created |= _names(target)
    if any(created & _trained(loop.body, callees) for loop in inner):
        return True
    return not callees.compiles and _begins_state(outer, inner, callees)


def _begins_state(outer: ast.For, inner: Sequence[Loop], callees: Callees) -> bool:
    """Return True if each pass of the outer loop assigns all that inner steps of JAX carry on.

    Steps that carry nothing train objects: each pass then creates an object that they read.
    """
    read: set[str] = set()
    carried: set[str] = set()
    for loop in inner:
        bound = Names()
        for statement in loop.body:
            if takes_gradient([statement], callees):
                names = Names(bound.bound)
                names.visit(statement)
                read |= names.read.keys()
            bound.visit(statement)
        carried |= read & bound.assigned
    around = Names()
    around.scan(outer.body)
    if carried:
        return not carried & around.read.keys()
    return bool(read & _objects(outer.body))


def _objects(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names to which statements assign objects of classes, as in `net = Net(seed)`."""
    found: set[str] = set()
    for statement in statements:
        match statement:
            case ast.Assign(targets=[target], value=ast.Call(func=function)):
                if ast.unparse(function).split(".")[-1][:1].isupper():
                    found |= _names(target)
    return found


def repeats_batch(loop: Loop, callees: Callees) -> bool:
    """Return True if a loop repeats its body on one batch, as `for _ in range(3)`."""
    if not isinstance(loop, ast.For) or _takes_next(loop.body):
        return False
    return _has_no_batches(loop, callees)


def _has_no_batches(loop: ast.For, callees: Callees) -> bool:
    """Return True for a loop over numbers, or over models or optimizers."""
    if _is_range(loop.iter):
        return True
    return bool(_names(loop.target) & _trained(loop.body, callees))


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _trained(statements: Sequence[ast.stmt], callees: Callees) -> set[str]:
    """Return the names of models and optimizers that statements train, or that train themselves."""
    found: set[str] = set()
    for node in (node for statement in statements for node in within(statement)):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in _TRAINED:
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
                if callees.takes_gradient(node):
                    found.add(name)
    return found


def _is_range(iterable: ast.expr) -> bool:
    """Return True for `range(3)`, also in `enumerate` and `tqdm`, and for numbers in the code."""
    match iterable:
        case ast.Call(func=function, args=arguments):
            name = ast.unparse(function).split(".")[-1]
            if name in ("tqdm", "enumerate") and arguments:
                return _is_range(arguments[0])
            return name in ("trange", "range", "count")
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return all(isinstance(item, ast.Constant) for item in items)
    return False


def _takes_next(statements: Sequence[ast.stmt]) -> bool:
    """Return True if statements take the next batch, with `next(...)` or a slice."""
    return any(
        (isinstance(node, ast.Call) and ast.unparse(node.func) in ("next", "take"))
        or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice))
        for statement in statements
        for node in within(statement)
    )


def takes_gradient(statements: Sequence[ast.stmt], callees: Callees) -> bool:
    """Return True if statements take a gradient, themselves or in functions that they call."""
    nodes = [node for statement in statements for node in within(statement)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if any(map(callees.distributes, calls)):
        return False
    return _any_takes(calls, callees)


def _any_takes(calls: Iterable[ast.Call], callees: Callees) -> bool:
    return any(callees.updates(call) or callees.takes_gradient(call) for call in calls)


def undivided(tree: ast.Module, callees: Callees) -> Iterator[tuple[int, str]]:
    """Yield the lines of training that nbdist does not divide, with its form and a remedy."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (compiler := _compiler(node, callees)):
            for loop in training_loops(node, callees):
                if not repeats_batch(loop, callees):
                    yield loop.lineno, f"a loop inside of `{compiler}`: decorate its step instead"
    for statement in tree.body:
        if isinstance(statement, (ast.For, ast.While)) and takes_gradient(statement.body, callees):
            continue
        expressions = (node for node in within(statement) if isinstance(node, ast.expr))
        for node in expressions:
            if form := _repetition(node, callees):
                yield node.lineno, f"{form}: use a `for` loop over the batches"
                break


def _compiler(function: ast.FunctionDef, callees: Callees) -> str:
    """Return the decorator that compiles a function, or empty."""
    if callees.compiles:
        return "@tf.function" if is_compiled(function) else ""
    is_jitted = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return "@jax.jit" if is_jitted else ""


def _repetition(node: ast.expr, callees: Callees) -> str:
    match node:
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            part = node.value if isinstance(node, ast.DictComp) else node.elt
            return "a comprehension" if _trains(part, callees) else ""
        case ast.Call(func=ast.Name(id="map") | ast.Attribute(attr="reduce"), args=[function, *_]):
            call = ast.Call(function, args=[], keywords=[])
            return "`map` or `reduce`" if _trains(call, callees) else ""
        case ast.Call() if callees.repeats(node):
            return "a compiled loop"
    return ""


def _trains(part: ast.expr, callees: Callees) -> bool:
    calls = (node for node in ast.walk(part) if isinstance(node, ast.Call))
    return _any_takes(calls, callees)


def _loops(statements: Sequence[ast.stmt]) -> Iterator[Loop]:
    for statement in statements:
        for node in within(statement):
            if isinstance(node, (ast.For, ast.While)):
                yield node


def refuse_leaving(statement: ast.stmt) -> None:
    """Raise LoopError if a statement of the step leaves the loop."""
    for node in within(statement):
        if isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom)):
            raise _inside(node, statement)


def refuse_host(statement: ast.stmt) -> None:
    """Raise LoopError if a statement of the step has an effect that a compiled step would lose."""
    for node in within(statement):
        shows = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHOWS
        )
        reads = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("numpy", "item", "tolist")
        )
        if shows or reads or assigns(node, own_names([statement])):
            raise _inside(node, statement)


def refuse_growth(statement: ast.stmt, own: set[str]) -> None:
    """Raise LoopError if a statement of the step adds to a list from outside of the loop."""
    for node in within(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = root_name(node.func)
            if node.func.attr in GROWS and name and name not in own:
                raise _inside(node, statement)


def too_late(host: ast.stmt, statement: ast.stmt) -> LoopError:
    """Return the error for a statement that a step needs and that needs the step."""
    return LoopError(
        host.lineno,
        f"this statement must run before line {statement.lineno} of the step, and after an "
        "earlier line of it",
    )


def _inside(node: ast.AST, statement: ast.stmt) -> LoopError:
    text = ast.unparse(node).split("\n")[0]
    return LoopError(
        getattr(node, "lineno", statement.lineno),
        f"`{text}` is inside the statement that takes the gradient: move it after that",
    )
