"""Functions of a program that may contain training loops, found by names alone."""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING

from nbdist.cells.dependencies import outside_functions
from nbdist.cells.value_parts import passed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef

_GRADIENTS = {
    *("GradientTape", "gradient", "apply_gradients", "minimize"),
    *("grad", "value_and_grad", "filter_grad", "filter_value_and_grad", "vjp", "filter_vjp"),
    *("value_and_grad_from_state", "jacrev", "jacfwd", "hessian"),
}
"""Functions that take or apply a gradient."""


class GradientLoops:
    """Loops whose body may take a gradient, itself or in the functions that it calls.

    The runtime decides which of them it divides. A loop that it does not divide runs as written.

    Args:
        trees: syntax trees of the cells of the program.
        modules: syntax trees of the user's own modules.
    """

    def __init__(self, trees: Sequence[ast.Module], modules: Sequence[ast.Module] = ()) -> None:
        nodes = [n for tree in itertools.chain(trees, modules) for n in ast.walk(tree)]
        defined = [(name, {*_in(node)}) for name, node in [*_defined(nodes), *_passed(nodes)]]
        self._words, count = _GRADIENTS.union(_called_parameters(nodes)), 0
        while count != len(self._words):
            count = len(self._words)
            self._words |= {name for name, used in defined if not self._words.isdisjoint(used)}

    def within(self, node: ast.AST) -> bool:
        """Return True if a definition contains such a loop."""
        return any(_is_loop(n) and not self._words.isdisjoint(_in(n)) for n in ast.walk(node))


def has_loops(tree: ast.Module) -> bool:
    """Return True if a cell contains loops outside of its functions."""
    return any(map(_is_loop, outside_functions(tree)))


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, (ast.For, ast.While))


def _defined(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names and attributes that nodes define, with their code."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.ImportFrom(names=aliases):
                yield from ((a.asname, ast.Name(a.name)) for a in aliases if a.asname)
            case ast.Assign(targets=targets, value=value):
                yield from ((name, value) for target in targets for name in _in(target))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from ((name, value) for name in _in(target))
            case ast.NamedExpr(target=target, value=value):
                yield target.id, value


def _passed(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the parameters of functions with the arguments of their calls, by their names."""
    parameters: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, _Definition):
            parameters.setdefault(node.name, set()).update(_parameters(node))
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            yield from itertools.product(parameters.get(name, ()), passed(node))


def _called_parameters(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the parameters that functions call. The functions behind them are unknown."""
    for node in nodes:
        if isinstance(node, _Function):
            called = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
            yield from _parameters(node) & {c.id for c in called if isinstance(c, ast.Name)}


def _parameters(node: _Definition) -> set[str]:
    """Return the parameters of a function, or of the methods of a class."""
    return {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}


def _in(node: ast.AST) -> Iterator[str]:
    """Yield the names and attributes in a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
