"""Objects of a notebook that change when code takes their items: iterators and own loaders.

The text decides. Data sets of packages, lists and arrays stay as they are.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.cells.effects import root_name
from nbdist.cells.value_parts import LAZY, assigned, passed, targets_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Set

SPECIAL = {"__call__", "__getitem__", "__iter__", "__next__"}
"""Methods that run when code takes items of an object, or calls it."""

_ITEMS = {"__getitem__", "__iter__", "__next__"}
_HELD = "held"
"""Mark of a container of such objects."""

_ITERATORS = {"as_numpy_iterator", "chain", "cycle", "islice", "starmap", "zip_longest"}
"""Functions and methods of packages that return iterators."""

_INERT = {
    *("bool", "callable", "display", "hasattr", "help", "id", "isinstance", "len", "print", "repr"),
    *("str", "type"),
}
"""Functions that take no items of their arguments."""


class IteratedObjects:
    """Names of objects that change when code takes their items.

    Args:
        nodes: nodes of the cells outside of functions, in order.
        changing: returns the special methods that change the object which a class or function
            returns, by its name.
    """

    def __init__(self, nodes: Iterable[ast.AST], changing: Callable[[str], Set[str]]) -> None:
        self._changing = changing
        self._names: dict[str, set[str]] = {}
        for node in nodes:
            for target, value in assigned(node):
                kinds = self._kinds(value)
                if isinstance(node, (ast.For, ast.comprehension)) and _HELD not in kinds:
                    continue
                if isinstance(target, (ast.Attribute, ast.Subscript)) and kinds:
                    self._add([root_name(target)], {*kinds, _HELD})
                self._add(targets_in(target), kinds)

    def taken_by(self, node: ast.AST) -> Iterator[str]:
        """Yield the names of the objects that a node itself changes."""
        match node:
            case ast.For(iter=value) | ast.comprehension(iter=value) | ast.Starred(value=value):
                yield from self._changed_by(value, _ITEMS)
            case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value):
                yield from self._changed_by(value, _ITEMS)
            case ast.Subscript(value=ast.Name() as value):
                yield from self._changed_by(value, {"__getitem__"})
            case ast.Call(func=func):
                yield from self._changed_by(func, {"__call__"})
                if not (isinstance(func, ast.Name) and func.id in _INERT):
                    for part in passed(node):
                        yield from self._changed_by(part, _ITEMS)

    def _changed_by(self, value: ast.expr, methods: Set[str]) -> Iterator[str]:
        """Yield the name of an object that one of the methods changes."""
        name = root_name(value)
        kinds = self._names.get(name, set())
        if kinds & methods and (isinstance(value, ast.Name) or _HELD in kinds):
            yield name

    def _add(self, names: Iterable[str], kinds: set[str]) -> None:
        for name in names if kinds else ():
            self._names.setdefault(name, set()).update(kinds)

    def _kinds(self, value: ast.expr) -> set[str]:
        """Return the special methods that change the value of an expression."""
        match value:
            case ast.Name(id=name):
                return self._names.get(name, set())
            case ast.GeneratorExp():
                return {"__next__"}
            case ast.Attribute() | ast.Subscript():
                kinds = self._names.get(root_name(value), set())
                return kinds if _HELD in kinds else set()
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
                kinds = {kind for part in parts for kind in self._kinds(part)}
                return {*kinds, _HELD} if kinds else set()
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self._of_call(name, value)
        return set()

    def _of_call(self, name: str, call: ast.Call) -> set[str]:
        if name in _ITERATORS or (name in LAZY and isinstance(call.func, ast.Name)):
            return {"__next__"}
        held = self._names.get(root_name(call.func), set())
        if _HELD in held and name in ("get", "items", "values"):
            return held
        return {*self._changing(name)}
