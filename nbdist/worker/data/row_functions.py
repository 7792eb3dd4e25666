"""Functions of NumPy and JAX that compute each row of a batch from this row only.

A call of one computes a rank's own rows. Every other function receives all rows.
"""

from __future__ import annotations

import builtins
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.worker.data.batch_array import BatchArray, combined, has_rows, whole

if TYPE_CHECKING:
    from collections.abc import Callable

_CONVERSIONS = ("array", "asarray")
_OF_ELEMENTS = (
    *("abs", "absolute", "cos", "exp", "log", "log1p", "negative", "sign", "sin", "sqrt"),
    *("square", "tanh"),
)
_OF_OPERANDS = {"where": 3, "clip": 3, "maximum": 2, "minimum": 2}
"""Functions of the elements of several arrays, with the number of their operands."""

_TYPES = (
    *("bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
MAPS = ("map", "tree_map")
"""Names of functions that call their first argument with the parts of another."""

NAMES = frozenset((*_CONVERSIONS, *_OF_ELEMENTS, *_OF_OPERANDS, *_TYPES, *MAPS)) | {
    *("device_put", "expand_dims", "one_hot", "reshape", "transpose"),
}
"""Names of the functions, without those of their modules."""


class RowFunction:
    """Function of the user whose code converts rows, and whose calls `call` makes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)


def call(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the result of a function, computed from a rank's own rows if each row is its own."""
    values = (*arguments, *options.values())
    if function is len or not any(map(has_rows, values)):
        return function(*arguments, **options)
    found = NotImplemented if _has_mesh() else _by_row(function, arguments, options)
    if found is NotImplemented:
        named = {name: whole(value) for name, value in options.items()}
        return function(*map(whole, arguments), **named)
    return found


def _by_row(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the result of a known function, NotImplemented for others."""
    if isinstance(function, RowFunction):
        return function(*arguments, **options)
    name = _name_of(function)
    first, *rest = arguments or (None,)
    if name in MAPS:
        return _mapped(function, rest, options, lambda leaf: call(first, leaf))
    if name == "device_put":
        return _mapped(None, (first, *rest), options, _put)
    if (
        len(arguments) == _OF_OPERANDS.get(name)
        and not options
        and not any(map(_is_tree, arguments))
    ):
        return combined(function, arguments)
    if not isinstance(first, BatchArray) or any(map(has_rows, (*rest, *options.values()))):
        return NotImplemented
    if name in ("reshape", "transpose"):
        return _shaped(function, name, first, rest, options)
    is_free = (
        (name in _CONVERSIONS and len(rest) < 2 and options.keys() <= {"dtype", "copy"})
        or (name in (*_OF_ELEMENTS, *_TYPES) and not rest and not options)
        or (name == "one_hot" and len(rest) < 2 and options.keys() <= {"num_classes", "dtype"})
        or (name == "expand_dims" and _is_behind_rows(first, *rest, **options))
    )
    return first.apply(lambda rows: function(rows, *rest, **options)) if is_free else NotImplemented


def _shaped(
    function: Any, name: str, array: BatchArray, rest: list[Any], options: dict[str, Any]
) -> Any:
    """Return the reshaped or transposed array, NotImplemented if rows do not remain rows."""
    if options or len(rest) != 1:
        return NotImplemented
    shape = rest[0]
    if name == "transpose":
        is_free = isinstance(shape, (tuple, list)) and bool(shape) and shape[0] == 0
        return array.apply(lambda rows: function(rows, shape)) if is_free else NotImplemented
    sizes = array.row_sizes(shape)
    if sizes is None:
        return NotImplemented
    return array.apply(lambda rows: function(rows, (len(rows), *sizes)))


def _has_mesh() -> bool:
    """Return True under `jax.set_mesh`: a new array of JAX belongs to all processes of the mesh."""
    jax = sys.modules.get("jax")
    return jax is not None and not jax.sharding.get_abstract_mesh().empty


def _mapped(function: Any, trees: Any, options: dict[str, Any], of_leaf: Any) -> Any:
    """Return the tree with `of_leaf` of each leaf, NotImplemented for several trees or options."""
    if len(trees) != 1 or options:
        return NotImplemented
    return (function or sys.modules["jax"].tree.map)(of_leaf, *trees)


def _put(leaf: Any) -> Any:
    put = sys.modules["jax"].device_put
    return leaf.apply(put) if isinstance(leaf, BatchArray) else put(leaf)


def _is_tree(value: Any) -> bool:
    return has_rows(value) and not isinstance(value, BatchArray)


def _is_behind_rows(array: BatchArray, axis: Any = None) -> bool:
    """Return True if a new axis follows that of the rows."""
    return type(axis) is int and (axis > 0 or -array.ndim <= axis < 0)


def _name_of(function: Any) -> str:
    """Return the name of a function that this module knows; empty for others."""
    name = getattr(function, "__name__", "")
    if name not in NAMES:
        return ""
    owners = [builtins, np]
    if (jax := sys.modules.get("jax")) is not None:
        owners += [jax, jax.numpy, jax.nn, jax.tree, jax.tree_util]
    return name if any(getattr(owner, name, None) is function for owner in owners) else ""
