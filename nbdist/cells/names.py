"""Which names a piece of Python reads before it binds them, and which it binds.

A static reading in the order of execution. A name counts as bound only where it is bound on every
path; a name that some path reads first counts as read. Nested functions, classes and
comprehensions have scopes of their own; what they take from outside counts as read where they are
defined.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Names(ast.NodeVisitor):
    """The names of one scope.

    Attributes:
        read: names read before they are surely bound, with the first line.
        bound: names that are bound on some path.
        deleted: names that are deleted, with the line.

    Args:
        known: names that are bound before the first statement.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.read: dict[str, int] = {}
        self.bound: set[str] = set()
        self.deleted: dict[str, int] = {}
        self._sure = set(known)

    def scan(self, statements: Sequence[ast.stmt]) -> None:
        """Read statements in order."""
        for statement in statements:
            self.visit(statement)

    def is_sure(self, name: str) -> bool:
        """Whether the name is bound on every path to here."""
        return name in self._sure

    # Names.

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._reads(node.id, node.lineno)
        elif isinstance(node.ctx, ast.Store):
            self._binds(node.id)
        else:
            self._deletes(node.id, node.lineno)

    def _reads(self, name: str, line: int) -> None:
        if name not in self._sure:
            self.read.setdefault(name, line)

    def _binds(self, name: str) -> None:
        self.bound.add(name)
        self._sure.add(name)

    def _deletes(self, name: str, line: int) -> None:
        self._reads(name, line)
        self._sure.discard(name)
        self.deleted.setdefault(name, line)

    # Statements whose order of evaluation is not that of their fields.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Inside of a function, the annotation of a name is not evaluated."""
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._reads(node.target.id, node.target.lineno)
        self.visit(node.value)
        self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._binds(alias.asname or alias.name.split(".")[0])

    visit_ImportFrom = visit_Import  # noqa: N815 - ast's own spelling

    # Paths.

    def _paths(self, *paths: Sequence[ast.AST]) -> None:
        """Alternatives: what is bound on all of them is sure afterwards."""
        before, ends = self._sure, []
        for path in paths:
            self._sure = set(before)
            for node in path:
                self.visit(node)
            ends.append(self._sure)
        self._sure = set.intersection(*ends)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._paths(node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._paths([node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._paths(node.values[1:], [])

    def visit_Compare(self, node: ast.Compare) -> None:
        self.visit(node.left)
        self.visit(node.comparators[0])
        self._paths(node.comparators[1:], [])

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)
        self._paths([node.msg] if node.msg else [], [])

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._paths([node.target, *node.body], [])
        self._paths(node.orelse, [])

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._paths(node.body, [])
        self._paths(node.orelse, [])

    def visit_With(self, node: ast.With) -> None:
        """The body is taken to run to its end: managers that swallow exceptions are rare."""
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.visit(item.optional_vars)
        for statement in node.body:
            self.visit(statement)

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        self._paths([*node.body, *node.orelse], [])
        for handler in node.handlers:
            self._paths([handler], [])
        for statement in node.finalbody:
            self.visit(statement)

    visit_TryStar = visit_Try  # noqa: N815 - ast's own spelling

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self._binds(node.name)
        for statement in node.body:
            self.visit(statement)
        if node.name is not None:
            self._sure.discard(node.name)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            parts = [case.pattern, *([case.guard] if case.guard else []), *case.body]
            self._paths(parts, [])

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self._binds(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name is not None:
            self._binds(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self._binds(node.rest)

    # Scopes.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._defaults(node.args)
        self._annotations(node)
        self._binds(node.name)
        self._nested(_parameters(node.args), node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's own spelling

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._defaults(node.args)
        self._nested(_parameters(node.args), [ast.Expr(node.body, lineno=node.lineno)])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
            self.visit(part)
        self._nested((), node.body, hides=False)
        self._binds(node.name)

    def visit_ListComp(self, node: _Comprehension) -> None:
        """The first iterable belongs to this scope; a walrus inside binds here, perhaps."""
        first, *others = node.generators
        self.visit(first.iter)
        inner = Names()
        inner.visit(first.target)
        for condition in first.ifs:
            inner.visit(condition)
        for generator in others:
            inner.visit(generator.iter)
            inner.visit(generator.target)
            for condition in generator.ifs:
                inner.visit(condition)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for result in results:
            inner.visit(result)
        for name, line in inner.read.items():
            self._reads(name, line)
        for walrus in (n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)):
            self.bound.add(walrus.target.id)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def _defaults(self, arguments: ast.arguments) -> None:
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.visit(default)

    def _annotations(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        for annotation in (*(a.annotation for a in every), node.returns):
            if annotation is not None:
                self.visit(annotation)

    def _nested(
        self, parameters: Iterable[str], body: Sequence[ast.stmt], *, hides: bool = True
    ) -> None:
        """What a nested scope takes from outside; a function hides every name that it binds."""
        inner = Names(parameters)
        inner.scan(body)
        own = inner.bound | set(parameters) if hides else set()
        for name, line in inner.read.items():
            if name not in own:
                self._reads(name, line)


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {argument.arg for argument in every}
