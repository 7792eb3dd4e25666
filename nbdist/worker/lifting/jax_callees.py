"""Objects that a cell calls under JAX: functions that take gradients, and inputs of a step."""

from __future__ import annotations

import ast
import functools
import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any

from nbdist.cells.effects import root_name, within
from nbdist.worker.lifting.callees import Callees, tree_of
from nbdist.worker.runtime.user_modules import is_of_user, is_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.cells.loops import Scan

_GRADIENTS = {
    *("grad", "value_and_grad", "filter_grad", "filter_value_and_grad", "vjp", "filter_vjp"),
    *("value_and_grad_from_state", "jacrev", "jacfwd", "hessian"),
}
"""Transformations of JAX, Flax NNX, Equinox and Optax that differentiate a function."""

_TRANSFORMATIONS = _GRADIENTS | {
    *("jit", "pmap", "vmap", "partial", "checkpoint", "remat", "shard_map", "named_call"),
    *("filter_jit", "filter_pmap", "filter_vmap", "custom_vjp", "custom_jvp", "cached_partial"),
}
"""Functions that return a function."""

_LOOPS = {"scan", "fori_loop", "while_loop"}
"""Loops of JAX in a compiled function."""

_TAKES_ROWS = ("dynamic_slice", "dynamic_index", "choice", "permutation")
"""Parts of the names of functions that take some rows of an array."""

_DIFFERENTIATES = ("grad", "jacrev", "jacfwd", "vjp")
"""Parts of the names of the functions that these transformations return."""

_WRAPPERS = 8
"""Largest number of wrappers around a function of the user that nbdist looks into."""


class JaxCallees(Callees):
    """Objects behind the calls of a cell under JAX.

    A function that a call passes on, as in `jax.jit(train_step)`, counts as called.
    """

    compiles = False

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Name() | ast.Tuple()], value=ast.Call() as value) if (
                not self._makes_function(value)
            ):
                return  # state = train_step(state, x)
        super()._note(node)
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call() as value):
                self._methods.setdefault(name, []).append(value)  # self.step = jax.jit(step)

    def _makes_function(self, call: ast.Call) -> bool:
        """Return True if a call returns a function: `jax.jit(f)`, or a function of the user.

        `jax.grad(f)(x)` returns an array, and `partial(jax.jit, static_argnums=0)(f)` a function.
        """
        word = _last_name(call.func)
        if word in _TRANSFORMATIONS or word in self._callable:
            return True
        if isinstance(call.func, ast.Call):
            return _last_name(call.func.func) == "partial"
        value = self._namespace.get(word)
        if isinstance(value, type) and is_of_user(value):
            return "__call__" in vars(value)
        nodes = self._defined.get(word) or list(tree_of(value))
        return any(map(_returns_function, nodes))

    def updates(self, call: ast.Call) -> bool:
        """Return True for a transformation that takes gradients."""
        return any(_last_name(node) in _GRADIENTS for node in ast.walk(call.func))

    def takes_gradient(self, call: ast.Call) -> bool:
        """Return True if a called function takes a gradient, itself or in those it calls."""
        return any(map(self._reference_takes, ast.walk(call)))

    def _reference_takes(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):  # `grad` alone is often a gradient
            return node.id not in _GRADIENTS and self._name_takes(node.id)
        if not isinstance(node, ast.Attribute):
            return False
        owner = self._value(node.value)
        if owner is None or is_of_user(owner):
            return self._method_takes(node.attr) or _differentiates(self._value(node))
        return False

    def _name_takes(self, name: str) -> bool:
        is_known = name not in self._defined
        return (is_known and _differentiates(self._namespace.get(name))) or super()._name_takes(
            name
        )

    def _body_takes(self, function: ast.AST) -> bool:
        nodes = list(ast.walk(function))
        return any(_last_name(node) in _GRADIENTS for node in nodes) or any(
            map(self._reference_takes, nodes)
        )

    def scan(self, call: ast.Call) -> Scan:
        """Describe the loop of JAX around the gradients of the called function."""
        if self._loops(call):
            return "" if "" in _scanned_names(call) else "batches"
        name = _last_name(call.func)
        nodes = self._defined.get(name) or list(tree_of(self._namespace.get(name)))
        found = {self._scan_of(node) for node in nodes if isinstance(node, ast.FunctionDef)}
        return found.pop() if len(found) == 1 else ""

    def repeats(self, call: ast.Call) -> bool:
        """Return True if the call is a loop of JAX around gradients, or calls one."""
        name = _last_name(call.func)
        nodes = self._defined.get(name) or list(tree_of(self._namespace.get(name)))
        inner = (node for function in nodes for node in ast.walk(function))
        return self._loops(call) or any(
            isinstance(node, ast.Call) and self._loops(node) for node in inner
        )

    def _scan_of(self, function: ast.FunctionDef) -> Scan:
        nodes = [node for statement in function.body for node in within(statement)]
        loops = [node for node in nodes if isinstance(node, ast.Call) and self._loops(node)]
        bodies = [part for loop in loops for part in ast.walk(loop)]
        inside = set(map(id, bodies))
        if not loops or any(
            _last_name(node) in _GRADIENTS or self._reference_takes(node)
            for node in nodes
            if id(node) not in inside and not isinstance(getattr(node, "ctx", None), ast.Store)
        ):
            return ""
        given = _given_names(function)
        if all(_scanned_names(loop) <= given for loop in loops):
            return "batches"
        return "inside" if self._takes_rows(function, set()) else ""

    def _takes_rows(self, function: ast.AST, visited: set[str]) -> bool:
        """Return True if a function takes some rows of an array, itself or in those it calls."""
        for node in ast.walk(function):
            match node:
                case ast.Subscript(ctx=ast.Load(), slice=ast.Name() | ast.BinOp()):
                    return True
                case ast.Call() if any(part in _last_name(node.func) for part in _TAKES_ROWS):
                    return True
                case ast.Name(id=name) if name not in visited:
                    visited.add(name)
                    nodes = self._defined.get(name) or list(tree_of(self._namespace.get(name)))
                    if any(self._takes_rows(inner, visited) for inner in nodes):
                        return True
        return False

    def _loops(self, call: ast.Call) -> bool:
        """Return True for a loop of JAX whose body takes a gradient."""
        return _last_name(call.func) in _LOOPS and self.takes_gradient(call)

    def draws(self, call: ast.Call) -> bool:
        """Return False: the step runs in Python."""
        del call
        return False

    def distributes(self, call: ast.Call) -> bool:
        """Return False: arrays on a mesh of the user are found when the loop runs."""
        del call
        return False

    def is_metric(self, call: ast.Call) -> bool:
        """Return False: metrics are arrays, and need no step."""
        del call
        return False

    def is_input(self, call: ast.Call, outside: set[str], *, is_first: bool) -> bool:
        """Return True if the loop may make the call and pass its result to the step.

        These are `next(...)`, methods such as `x.numpy()`, and functions of a framework. Other
        functions must be called before the step.
        """
        if isinstance(call.func, ast.Name) and call.func.id == "next":
            return True
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        if not names & outside:
            return False
        return is_first or self.computes(call) or root_name(call.func) in outside


def _returns_function(function: ast.AST) -> bool:
    """Return True if a function returns one that it defines, or a transformation of one."""
    own = {
        node.name
        for node in ast.walk(function)
        if isinstance(node, ast.FunctionDef) and node is not function
    }
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    returned = [
        part
        for value in returned
        for part in (value.elts if isinstance(value, ast.Tuple) else (value,))
    ]
    return any(
        isinstance(value, ast.Lambda)
        or (isinstance(value, ast.Name) and value.id in own)
        or (isinstance(value, ast.Call) and _last_name(value.func) in _TRANSFORMATIONS)
        for value in returned
    )


def _given_names(function: ast.FunctionDef) -> set[str]:
    """Return the parameters of a function, and names of parts of them, as in `x, y = batch`."""
    given = {argument.arg for argument in function.args.args}
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[target], value=ast.Name(id=name)) if name in given:
                given |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return given


def _scanned_names(loop: ast.Call) -> set[str]:
    """Return the names in the third argument of `scan`; a name that is no parameter without one."""
    scanned = [*loop.args[2:3], *(word.value for word in loop.keywords if word.arg == "xs")]
    if _last_name(loop.func) != "scan" or not scanned:
        return {""}
    (value,) = scanned
    plain = (ast.Name, ast.Tuple, ast.Dict, ast.Constant, ast.Load)
    if not all(isinstance(node, plain) for node in ast.walk(value)):
        return {""}
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} or {""}


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_pmapped(value: Any) -> bool:
    """Return True if a function is the result of `jax.pmap`."""
    return callable(value) and any(name.startswith("pmap.") for name in _wrappers(value))


def _differentiates(value: Any) -> bool:
    """Return True if a function is the result of a transformation that takes gradients."""
    return callable(value) and any(
        any(part in name for part in _DIFFERENTIATES) for name in _wrappers(value)
    )


def _wrappers(value: Any) -> Iterator[str]:
    """Yield the lower-case names of a function's wrappers that libraries have made."""
    waiting = [value]
    for _ in range(_WRAPPERS):
        if not waiting:
            return
        part = waiting.pop(0)
        if isinstance(part, functools.partial):
            waiting.append(part.func)
        elif isinstance(part, FunctionType) and is_users(part.__globals__.get("__name__")):
            continue
        elif isinstance(part, FunctionType):
            yield part.__code__.co_qualname.lower()
            waiting += [v for v in inspect.getclosurevars(part).nonlocals.values() if callable(v)]
        elif not is_of_user(part):
            yield type(part).__qualname__.lower()
        if (inner := getattr(part, "__wrapped__", None)) is not None:
            waiting.append(inner)
