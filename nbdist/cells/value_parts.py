"""Names whose values, or parts of them, an expression may return."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

OfCall = Callable[[ast.Call], Iterable[str]]

_METHODS = {
    *("children", "flatten", "get", "get_layer", "items", "modules", "pop", "popitem", "ravel"),
    *("reshape", "setdefault", "squeeze", "swapaxes", "to_numpy", "transpose", "values", "view"),
}
"""Methods that return parts of their object, or a view of it."""

LAZY = {"enumerate", "filter", "iter", "map", "reversed", "zip"}
"""Built-in functions that return iterators."""

_COPIES = {
    *("OrderedDict", "SimpleNamespace", "deque", "dict", "list", "set", "sorted", "tuple"),
    *("getattr", "next", "tqdm", "vars"),
}
"""Functions whose results contain their arguments, or elements of them."""

_VIEWS = {
    *("asanyarray", "asarray", "ascontiguousarray", "atleast_1d", "atleast_2d", "broadcast_to"),
    *("expand_dims", "flip", "moveaxis", "ravel", "reshape", "squeeze", "swapaxes", "transpose"),
    *("chain", "copy", "cycle", "islice", "iter_children", "iter_graph", "iter_modules"),
    *("zip_longest", "SimpleNamespace", "OrderedDict", "deque", "partial", "tqdm"),
}
"""Functions of packages whose results share values with their arguments."""

_PLAIN = {"columns", "dtype", "name", "ndim", "shape", "size"}
"""Attributes whose values cannot be changed in place."""


def names_in(value: ast.expr, of_call: OfCall | None = None) -> Iterator[str]:
    """Yield the names whose values, or parts of them, an expression may return.

    Args:
        value: the expression.
        of_call: names for a call of a function of the user.
    """
    match value:
        case ast.Name(id=name):
            yield name
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            yield from _of_elements(value.elt, value.generators, of_call)
        case ast.DictComp():
            yield from _of_elements(value.value, value.generators, of_call)
        case ast.Call() if of_call is not None:
            yield from of_call(value)
    for part in _inner(value):
        yield from names_in(part, of_call)


def _of_elements(
    element: ast.expr, generators: Sequence[ast.comprehension], of_call: OfCall | None
) -> set[str]:
    found = {*names_in(element, of_call)}
    for generator in reversed(generators):
        for target, value in _elements(generator.target, generator.iter):
            own = {*targets_in(target)}
            if own & found:
                found = (found - own) | {*names_in(value, of_call)}
    return found


def _inner(value: ast.expr) -> Sequence[ast.expr]:
    """Return the expressions whose values an expression may return, or parts of them."""
    match value:
        case ast.Attribute(attr=name) if name in _PLAIN:
            return []
        case ast.Attribute() | ast.Subscript() | ast.Starred() | ast.NamedExpr() | ast.Await():
            return [value.value]
        case ast.Tuple() | ast.List() | ast.Set():
            return value.elts
        case ast.BoolOp() | ast.Dict():
            return value.values
        case ast.IfExp():
            return [value.body, value.orelse]
        case ast.Call():
            return _of_call(value)
    return []


def _of_call(call: ast.Call) -> Sequence[ast.expr]:
    """Return the expressions whose values the result of a call may contain."""
    match call.func:
        case ast.Name(id=name) if name in _COPIES | LAZY | _VIEWS:
            return passed(call)
        case ast.Attribute(attr=name) if name in _METHODS:
            return [call.func.value, *passed(call)] if name in _VIEWS else [call.func.value]
        case ast.Attribute(attr=name) if name in _VIEWS:
            return passed(call)
    return []


def passed(call: ast.Call) -> list[ast.expr]:
    """Return the expressions of all arguments of a call."""
    return [*call.args, *(word.value for word in call.keywords)]


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with the value that a node assigns to them, or whose elements it assigns."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _paired(target, value)
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield from _elements(target, value)
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield target, value


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment with their values: `a, b = x, y`."""
    match target, value:
        case ((ast.Tuple(elts=some) | ast.List(elts=some)), (ast.Tuple(elts=others))) if len(
            some
        ) == len(others) and not any(isinstance(e, ast.Starred) for e in some + others):
            for one, other in zip(some, others, strict=True):
                yield from _paired(one, other)
        case _:
            yield target, value


def _elements(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of a loop with the values that contain their elements."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=args) if len(
            targets
        ) == len(args) and not any(isinstance(arg, ast.Starred) for arg in args):
            for one, arg in zip(targets, args, strict=True):
                yield from _elements(one, arg)
        case ast.Tuple(elts=[_, one]), ast.Call(func=ast.Name(id="enumerate"), args=[arg, *_]):
            yield from _elements(one, arg)
        case ast.Tuple(elts=[_, one]), ast.Call(func=ast.Attribute(attr="items") as func):
            yield one, func.value
        case _:
            yield target, value


def targets_in(target: ast.expr) -> Iterator[str]:
    """Yield the names that a target binds."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def parameters(function: Function) -> list[str]:
    """Return the names of all parameters of a function; those that take positions come first."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [part.arg for part in (*every, arguments.vararg, arguments.kwarg) if part is not None]


def arguments_of(function: Function, call: ast.Call, name: str, skipped: int) -> list[ast.expr]:
    """Return the arguments of a call that a parameter of the function may receive.

    Args:
        function: the called function.
        call: the call.
        name: the parameter.
        skipped: number of first parameters that the call does not pass: 1 for a method.
    """
    positions = [part.arg for part in (*function.args.posonlyargs, *function.args.args)][skipped:]
    words = {word.arg: word.value for word in call.keywords}
    given = dict(zip(positions, call.args, strict=False)) | words
    if name in given:
        return [given[name]]
    return [part for part in passed(call) if part not in given.values()]


def body_of(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes in the body of a function."""
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for part in body:
        yield from ast.walk(part)
