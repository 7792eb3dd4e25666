"""Hyperparameters that the text and the options of a cell contain."""

from __future__ import annotations

import ast
import math
import operator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.records import options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.records import CellOptions, CellRequest, StepOptions

MOST = 64
"""Largest number of hyperparameters of a run."""

_LONGEST = 100
"""Longest text of a value, in characters."""

_NOT_OF_TRAINING = {
    "ranks",
    "name",
    "check",
    "profile",
    "guard",
    "watch",
    "hang_after",
    "max_heals",
    "once",
    "detach",
}
"""Options that do not change the training."""

_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def hyperparameters(request: CellRequest) -> dict[str, float | str]:
    """Return the hyperparameters of a cell by name, at most `MOST`.

    They are the given options that change the training, as `--epochs`, except those of checkpoints
    and of the layout. Then follow the numbers that the cell assigns at its top level, and those
    that it passes to `fit` by keyword.
    """
    found = chain(_options(request.options), _numbers(request.source))
    return dict(islice(dict(found).items(), MOST))


def _options(options: CellOptions) -> Iterator[tuple[str, float | str]]:
    """Yield the options that differ from their defaults, by flag."""
    yield from _given(options)
    if options.step is not None:
        yield from _given(options.step)


def _given(record: CellOptions | StepOptions) -> Iterator[tuple[str, float | str]]:
    defaults = {field.name: field.default for field in msgspec.structs.fields(record)}
    for name, option in options_of(type(record)).items():
        if option.record is type(record) and name not in _NOT_OF_TRAINING:
            value = getattr(record, option.field)
            if value not in (defaults[option.field], ""):
                yield option.flag, _plain(value)


def _plain(value: Any) -> float | str:
    """Return a number, or a text of at most `_LONGEST` characters."""
    if isinstance(value, bool):
        return "yes"
    if isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else ",".join(map(str, value))
    return text[:_LONGEST]


def _numbers(source: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a cell assigns, then those that it passes to `fit`."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):  # syntax of IPython
        return
    pairs = chain(
        chain.from_iterable(map(_assigned, statements)), chain.from_iterable(map(_fit, statements))
    )
    for name, value in pairs:
        number = _number(value)
        if number is not None:
            yield name, number


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement assigns, with their expressions."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield from _pairs(statement.target, statement.value)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _pairs(target, statement.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for part, own in zip(target.elts, value.elts, strict=False):
            yield from _pairs(part, own)


def _fit(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keywords of a call of `fit`, as in `history = model.fit(x, y, batch_size=64)`."""
    call = getattr(statement, "value", None)
    if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "fit":
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value


def _number(node: ast.expr) -> float | None:
    """Return the value of a number or of simple arithmetic on numbers, else None."""
    if isinstance(node, ast.Constant):
        value = node.value
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return value if _is_finite(value) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _number(node.operand)
        return None if operand is None else -operand
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left), _number(node.right)
        if left is None or right is None or (right == 0 and isinstance(node.op, ast.Div)):
            return None
        result = _OPERATORS[type(node.op)](left, right)
        return result if _is_finite(result) else None
    return None


def _is_finite(value: float) -> bool:
    """Return True if a double can contain the number. JSON has no others."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
