"""Names of a loop that may contain the same array of a batch.

`x /= 255` changes an array of NumPy in place. Other names of the same object contain the change. A
view, such as `x[:, 1:]`, contains it in one process, but not in the rows that a rank has not read.
"""

from __future__ import annotations

import ast
import itertools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_NEW = ("array", "astype", "copy")
"""Functions and methods that return a new array."""


class _Value(NamedTuple):
    """Value of a name.

    Attributes:
        paths: a number for each batch that it may be a part of, and the keys of this part.
        is_part: True if it is this part itself, False if it may be a view of it.
    """

    paths: tuple[tuple[Any, ...], ...]
    is_part: bool = True

    def item(self, key: Any) -> _Value:
        return _Value(tuple((*path, key) for path in self.paths), self.is_part)


class Aliases:
    """Values of the names of batches.

    Args:
        names: names of different batches.
        are_shared: True if other names may contain views of them.
    """

    def __init__(self, names: Iterable[str], *, are_shared: bool = False) -> None:
        self._numbers = itertools.count()
        self._values = {name: self._new() for name in names}
        paths = [path for value in self._values.values() for path in value.paths]
        self._others = [_Value(tuple(paths), is_part=False)] if are_shared else []

    def _new(self) -> _Value:
        return _Value(((next(self._numbers),),))

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Note the assignment of an expression to names."""
        for name, found in [*self._assigned(target, value)]:
            self._values[name] = found

    def _assigned(self, target: ast.expr, value: ast.expr) -> Iterable[tuple[str, _Value]]:
        if isinstance(target, ast.Name):
            return [(target.id, self._value(value))]
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
        if isinstance(value, ast.Tuple) and len(value.elts) == len(parts):
            pairs = zip(parts, value.elts, strict=True)
            return [found for pair in pairs for found in self._assigned(*pair)]
        whole = self._value(value)
        nested = {id(part) for part in parts if not isinstance(part, ast.Name)}
        if nested:
            names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
            return [(name, whole._replace(is_part=False)) for name in names]
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        return [(name, whole.item(number)) for number, name in enumerate(names)]

    def _value(self, value: ast.expr) -> _Value:
        match value:
            case ast.Name(id=name) if name in self._values:
                return self._values[name]
            case ast.Subscript(value=inner, slice=ast.Constant(value=str(key))):
                return self._value(inner).item(key)
            case ast.BinOp() | ast.UnaryOp() | ast.Compare():
                return self._new()
            case ast.Call(func=ast.Attribute(attr=name), keywords=[]) if name in _NEW:
                return self._new()
        names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
        found = [path for name in names for path in self._of(name).paths]
        return _Value(tuple(found), is_part=False)

    def _of(self, name: str) -> _Value:
        return self._values.get(name, _Value(()))

    def are_free_of(self, name: str) -> bool:
        """Return True if no other name may contain a view of the array that a name contains.

        A batch that contains the array is free of it, but not a row of the array.
        """
        value = self._of(name)
        others = [*(v for n, v in self._values.items() if n != name), *self._others]
        return all(
            value.is_part and other.is_part and len(its) <= len(one)
            for other in others
            for one, its in itertools.product(value.paths, other.paths)
            if all(map(operator.eq, one, its))
        )
