"""Loops of a program that may be training loops, found by names alone."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.cells.dependencies import outside_functions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.jobs.cells import JobCell

_GRADIENTS = {
    *("GradientTape", "gradient", "apply_gradients", "minimize"),
    *("grad", "value_and_grad", "filter_grad", "filter_value_and_grad", "vjp", "filter_vjp"),
    *("value_and_grad_from_state", "jacrev", "jacfwd", "hessian"),
}
"""Functions that take or apply a gradient."""


class GradientLoops:
    """Loops whose body takes a gradient, itself or in functions of the cells.

    The runtime decides which of them it divides. A loop that it does not divide runs as written.

    Args:
        cells: cells of the program.
    """

    def __init__(self, cells: Sequence[JobCell]) -> None:
        defined = [pair for cell in cells for pair in _definitions(cell.tree)]
        self._words, count = set(_GRADIENTS), 0
        while count != len(self._words):
            count = len(self._words)
            self._words |= {name for name, node in defined if not self._words.isdisjoint(_in(node))}

    def within(self, node: ast.AST) -> bool:
        """Return True if a definition contains such a loop."""
        return any(self._is_one(part) for part in ast.walk(node))

    def outside_functions(self, tree: ast.Module) -> bool:
        """Return True if a cell contains such a loop outside of its functions."""
        return any(self._is_one(part) for part in outside_functions(tree))

    def _is_one(self, node: ast.AST) -> bool:
        return isinstance(node, (ast.For, ast.While)) and not self._words.isdisjoint(_in(node))


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that functions and simple assignments define."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value


def _in(node: ast.AST) -> Iterator[str]:
    """Yield the names and attributes in a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
