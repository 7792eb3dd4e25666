"""Inputs of a step: expressions that the loop computes for it, such as `x[i : i + 32]`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from nbdist.cells.loops import takes_gradient
from nbdist.cells.statement_order import changed_objects

if TYPE_CHECKING:
    from nbdist.cells.loops import Callees


class StepInputs(ast.NodeVisitor):
    """Finds the largest expressions of a step that depend on the loop and not on the step.

    Args:
        callees: knowledge about the objects that the step calls.
        outside: names that the loop binds outside of the step.
        own: names that the step binds.

    Attributes:
        found: the expressions.
        is_first: True while the first statement of the step is visited.
    """

    def __init__(self, callees: Callees, outside: set[str], own: set[str]) -> None:
        self.is_first = True
        self.found: list[ast.expr] = []
        self._callees = callees
        self._outside = outside
        self._own = own
        self._may_skip = False  # inside of code that does not always run
        self._changed: set[str] = set()  # objects that earlier code of the step changes

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = _loaded(node.slice)
        if isinstance(node.ctx, ast.Load) and index & self._outside and not self._is_own(node):
            self.found.append(node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        is_input = self._callees.is_input(node, self._outside, is_first=self.is_first)
        if is_input and self._may_move(node):
            self.found.append(node)
        else:
            self.generic_visit(node)
            self._changed.update(changed_objects(node))

    def _may_move(self, node: ast.expr) -> bool:
        """Return True if an expression always runs, and depends on nothing of the step."""
        is_free = not self._may_skip and not self._is_own(node)
        is_free = is_free and self._changed.isdisjoint(changed_objects(node))
        return is_free and not takes_gradient([ast.Expr(node)], self._callees)

    def _is_own(self, node: ast.expr) -> bool:
        return bool(_loaded(node) & self._own)

    def _skip(self, node: ast.AST) -> None:
        before, self._may_skip = self._may_skip, True
        self.generic_visit(node)
        self._may_skip = before

    visit_IfExp = visit_BoolOp = visit_If = visit_For = visit_While = visit_Try = _skip  # noqa: N815

    def _comprehension(self, node: Any) -> None:
        """Take a whole comprehension, or exclude its variables."""
        is_input = self.is_first and not self._callees.compiles and _loaded(node) & self._outside
        if is_input and self._may_move(node):
            self.found.append(node)
            return
        before = self._own
        targets = (part.target for part in node.generators)
        self._own = before | {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        self._skip(node)
        self._own = before

    visit_ListComp = visit_SetComp = visit_DictComp = _comprehension  # noqa: N815
    visit_GeneratorExp = _comprehension  # noqa: N815

    def visit_Lambda(self, node: ast.AST) -> None:
        """Leave out the contents of functions: they run later."""

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda  # noqa: N815


def _loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


class Replaced(ast.NodeTransformer):
    """Replaces expressions by names, by their positions."""

    def __init__(self, names: dict[tuple[int, int, int], str]) -> None:
        self._names = names

    def visit_Subscript(self, node: ast.expr) -> ast.AST:
        name = self._names.get(position(node))
        return (
            self.generic_visit(node)
            if name is None
            else ast.copy_location(ast.Name(name, ast.Load()), node)
        )

    visit_Call = visit_ListComp = visit_SetComp = visit_Subscript  # noqa: N815 - ast's spelling
    visit_DictComp = visit_GeneratorExp = visit_Subscript  # noqa: N815


def position(node: ast.expr) -> tuple[int, int, int]:
    return node.lineno, node.col_offset, node.end_col_offset or 0
