"""Conversions of the batches of a training loop that compute each row from this row only.

A rank computes `x = jnp.asarray(batch["x"]) / 255` or `step(params, x.reshape(len(x), -1))` from
its own rows. The analysis accepts forms by name. `row_functions.call` and `BatchArray` compute with
all rows if a function, shape or operand is another one than its name or form suggests.
"""

from __future__ import annotations

import ast
import builtins
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cells.effects import root_name
from nbdist.worker.data import row_functions
from nbdist.worker.data.batch_array import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

SIZES = ("shape", "ndim", "size", "dtype")
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_OPERATORS = (*OPERATORS, ast.BitAnd, ast.BitOr, ast.BitXor)
_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_WITH_NAMES = ("astype", "reshape")
"""Methods whose arguments may have names."""

_OTHERS = ("tf", "tensorflow")
"""Modules whose functions receive all rows."""

_REFUSED = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)


class Scope(NamedTuple):
    """Names that code uses.

    Attributes:
        batches: names of batches.
        converts: returns True for a call of a function of the user that converts rows. Its
            arguments are batches where the second argument is True.
    """

    batches: Set[str]
    converts: Callable[[ast.Call, Sequence[bool]], bool] = lambda _call, _are_batches: False

    def with_batch(self, name: str) -> Scope:
        return self._replace(batches={*self.batches, name})


def part_of(value: ast.AST, scope: Scope) -> bool:
    """Return True for a batch, an item of it such as `batch["x"]`, and a tuple of them."""
    match value:
        case ast.Tuple(elts=[_, *_] as parts):
            return all(part_of(part, scope) for part in parts)
        case ast.Name(id=name):
            return name in scope.batches
        case ast.Subscript(value=inner, slice=ast.Constant()):
            return part_of(inner, scope)
    return False


def is_size(node: ast.AST, scope: Scope) -> bool:
    """Return True for `x.shape`, `len(x)` and similar code for a batch."""
    match node:
        case ast.Attribute(value=value, attr=attribute):
            return attribute in SIZES and part_of(value, scope)
        case ast.Call(func=ast.Name(id="len"), args=[value], keywords=[]):
            return part_of(value, scope)
    return False


def converts(value: ast.AST, scope: Scope) -> bool:
    """Return True for a batch and parts of it, also if conversions change each row.

    Args:
        value: an expression.
        scope: names that it uses.
    """
    match value:
        case ast.Name(id=name):
            return name in scope.batches
        case ast.Tuple(elts=[_, *_] as parts):
            return all(converts(part, scope) for part in parts)
        case ast.Dict(keys=keys, values=[_, *_] as parts):
            are_free = all(key is not None and is_free(key, scope) for key in keys)
            return are_free and _combines(parts, scope)
        case ast.Subscript(value=inner, slice=index):
            takes_parts = isinstance(index, ast.Constant) or _keeps_rows(index)
            return takes_parts and converts(inner, scope) and is_free(index, scope)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert(), operand=inner):
            return converts(inner, scope)
        case ast.BinOp(left=left, op=operator, right=right):
            return isinstance(operator, _OPERATORS) and _combines([left, right], scope)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return isinstance(operator, _COMPARISONS) and _combines([left, right], scope)
        case ast.Call():
            return not unpacks(value, scope) and _is_conversion(value, scope)
        case ast.DictComp():
            return _converts_items(value, scope)
    return False


def unpacks(value: ast.AST, scope: Scope) -> bool:
    """Return True for `map(jnp.asarray, batch)`, whose results are parts of a batch."""
    match value:
        case ast.Call(func=ast.Name(id="map"), args=[_, _], keywords=[]):
            return _is_conversion(value, scope)
    return False


def _is_conversion(call: ast.Call, scope: Scope) -> bool:
    given = [*call.args, *(word.value for word in call.keywords)]
    match call.func:
        case ast.Attribute(value=inner, attr=method) if converts(inner, scope):
            is_known = method in METHODS and (not call.keywords or method in _WITH_NAMES)
            return is_known and all(is_free(value, scope) for value in given)
        case ast.Attribute() | ast.Name() if _is_known(call.func):
            is_map = _last_name(call.func) in row_functions.MAPS
            first, *trees = given or [call.func]
            if is_map and _maps_rows(first, scope):
                return is_free(call.func, scope) and _combines(trees, scope)
            return not is_map and is_free(call.func, scope) and _combines(given, scope)
        case ast.Name():
            are_batches = [converts(value, scope) for value in given]
            return (
                is_free(call.func, scope)
                and _combines(given, scope)
                and scope.converts(call, are_batches)
            )
    return False


def _maps_rows(function: ast.expr, scope: Scope) -> bool:
    """Return True for a function that converts each part of a tree."""
    if isinstance(function, ast.Name) and not _is_known(function):
        call = ast.Call(function, [ast.Name("part", ast.Load())], [])
        return is_free(function, scope) and scope.converts(call, [True])
    return _is_known(function) or _is_of_rows(function, scope)


def _is_known(function: ast.expr) -> bool:
    return _last_name(function) in row_functions.NAMES and root_name(function) not in _OTHERS


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _combines(values: list[ast.expr], scope: Scope) -> bool:
    """Return True if some values are batches, and the others read no rows."""
    batches = [value for value in values if converts(value, scope)]
    others = [value for value in values if value not in batches]
    return bool(batches) and all(is_free(value, scope) for value in others)


def _is_of_rows(value: ast.expr, scope: Scope) -> bool:
    """Return True for a lambda of one argument that converts it."""
    match value:
        case ast.Lambda(args=ast.arguments(args=[one], defaults=[]) as given, body=body):
            is_simple = not (given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg)
            return is_simple and converts(body, scope.with_batch(one.arg))
    return False


def _converts_items(value: ast.DictComp, scope: Scope) -> bool:
    """Return True for `{key: jnp.asarray(part) for key, part in batch.items()}`."""
    match value.generators:
        case [
            ast.comprehension(
                target=ast.Tuple(elts=[ast.Name(id=key), ast.Name(id=part)]),
                iter=ast.Call(func=ast.Attribute(value=batch, attr="items"), args=[], keywords=[]),
                ifs=conditions,
                is_async=0,
            )
        ] if part_of(batch, scope) and key not in scope.batches:
            inner = scope.with_batch(part)
            are_free = all(is_free(code, inner) for code in (value.key, *conditions))
            return are_free and converts(value.value, inner)
    return False


def _keeps_rows(index: ast.expr) -> bool:
    """Return True for `[:, 1:]` and `[..., None]`: the first axis is that of all rows."""
    first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    if isinstance(first, ast.Slice):
        return first.lower is first.upper is first.step is None
    return isinstance(first, ast.Constant) and first.value is ...


def is_free(value: ast.AST, scope: Scope) -> bool:
    """Return True if code reads no rows of a batch. It may read sizes."""
    if is_size(value, scope):
        return True
    if isinstance(value, _REFUSED) or (isinstance(value, ast.Name) and value.id in scope.batches):
        return False
    return all(is_free(part, scope) for part in ast.iter_child_nodes(value))


class RowCalls(ast.NodeTransformer):
    """Lets the loop make the calls of a conversion.

    Args:
        loop: name of the loop's object, with the methods `call` and `row_function`.
    """

    def __init__(self, loop: str) -> None:
        self._loop = loop

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_own = isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id)
        if not is_own and not _is_known(node.func):
            return node
        call = ast.Call(self._method("call"), [node.func, *node.args], node.keywords)
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        call = ast.Call(self._method("row_function"), [node], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def _method(self, name: str) -> ast.expr:
        return ast.Attribute(ast.Name(self._loop, ast.Load()), name, ast.Load())
