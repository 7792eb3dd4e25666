"""Static analysis of the names that Python code reads and binds, in the order of execution.

A name counts as surely bound only if every path binds it. A name counts as read if some path reads
it before it is surely bound. Nested functions, classes and comprehensions have their own scopes:
the names that they read from outside count as read at their definition.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Names(ast.NodeVisitor):
    """Names of one scope.

    Attributes:
        read: names that are read before they are surely bound, with the first line.
        early: names in `read` that this scope reads itself, not a later call of a function.
        bound: names that are bound on some path, with the first line.
        assigned: names in `bound` that an assignment binds, not only `def`, `class` or `import`.
        deleted: names that are deleted, with the line.

    Args:
        known: names that are bound before the first statement.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.read: dict[str, int] = {}
        self.early: dict[str, int] = {}
        self.bound: dict[str, int] = {}
        self.assigned: set[str] = set()
        self.deleted: dict[str, int] = {}
        self._sure = set(known)
        self._left = False  # the path has ended, for example by `raise` or `break`

    def scan(self, statements: Sequence[ast.stmt]) -> None:
        """Read statements in order."""
        for statement in statements:
            self.visit(statement)

    def is_sure(self, name: str) -> bool:
        """Return True if every path to here binds the name."""
        return name in self._sure

    # Names.

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._reads(node.id, node.lineno)
        elif isinstance(node.ctx, ast.Store):
            self._binds(node.id, node.lineno)
        else:
            self._deletes(node.id, node.lineno)

    def _reads(self, name: str, line: int, *, later: bool = False) -> None:
        if name not in self._sure:
            self.read.setdefault(name, line)
            if not later:
                self.early.setdefault(name, line)

    def _defines(self, name: str, line: int) -> None:
        self.bound.setdefault(name, line)
        self._sure.add(name)

    def _binds(self, name: str, line: int) -> None:
        self._defines(name, line)
        self.assigned.add(name)

    def _deletes(self, name: str, line: int) -> None:
        self._reads(name, line)
        self._sure.discard(name)
        self.deleted.setdefault(name, line)

    # Statements whose fields are not in the order of evaluation.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Skip the annotation of a name: functions do not evaluate it."""
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
            self._defines(alias.asname or alias.name.split(".")[0], node.lineno)

    visit_ImportFrom = visit_Import  # noqa: N815 - ast's own spelling

    # Paths.

    def _path(self, start: set[str], nodes: Sequence[ast.AST]) -> set[str] | None:
        """Read one path. Returns the surely bound names at its end, or None if it ends earlier."""
        self._sure, self._left = set(start), False
        for node in nodes:
            self.visit(node)
        return None if self._left else self._sure

    def _join(self, ends: Sequence[set[str] | None]) -> None:
        """Join alternatives: a name is sure if all paths that reach their end bind it."""
        reached = [end for end in ends if end is not None]
        self._left = not reached
        if reached:
            self._sure = set.intersection(*reached)

    def _paths(self, *paths: Sequence[ast.AST]) -> None:
        before = self._sure
        self._join([self._path(before, path) for path in paths])

    def visit_Raise(self, node: ast.Raise | ast.Return | ast.Break | ast.Continue) -> None:
        self.generic_visit(node)
        self._left = True

    visit_Return = visit_Break = visit_Continue = visit_Raise  # noqa: N815 - ast's own spelling

    def visit_Expr(self, node: ast.Expr) -> None:
        self.visit(node.value)
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "sys.exit":
            self._left = True

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
        leaves = leaves_loop(node.body)
        if _has_items(node.iter) and not leaves:
            for part in (node.target, *node.body):
                self.visit(part)
        else:
            self._paths([node.target, *node.body], [])
        self._paths(node.orelse, *([[]] if leaves else []))

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._paths(node.body, [])
        self._paths(node.orelse, [])

    def visit_With(self, node: ast.With) -> None:
        """Assume that the body runs to its end: managers that suppress exceptions are rare."""
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.visit(item.optional_vars)
        self.scan(node.body)
        self._left = False  # a manager may suppress the exception of the body

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        """Let handlers begin anywhere in the body: no name that the body binds is sure there."""
        before = self._sure - _deleted(node.body)
        ends = [self._path(self._sure, [*node.body, *node.orelse])]
        ends += [self._path(before, [handler]) for handler in node.handlers]
        self._join(ends)
        after, left = self._sure, self._left
        self._path(before - _deleted([*node.handlers, *node.orelse]), node.finalbody)
        left = self._path(after, node.finalbody) is None or left
        self._left = left

    visit_TryStar = visit_Try  # noqa: N815 - ast's own spelling

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self._binds(node.name, node.lineno)
        for statement in node.body:
            self.visit(statement)
        if node.name is not None:
            self._sure.discard(node.name)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        paths: list[Sequence[ast.AST]] = [
            [case.pattern, *([case.guard] if case.guard else []), *case.body] for case in node.cases
        ]
        last = node.cases[-1]
        every = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        self._paths(*paths, *([] if every and last.guard is None else [[]]))

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self._binds(node.name, node.lineno)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name is not None:
            self._binds(node.name, node.lineno)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self._binds(node.rest, node.lineno)

    # Scopes.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._defaults(node.args)
        self._annotations(node)
        self._defines(node.name, node.lineno)
        self._nested(_parameters(node.args), node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's own spelling

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._defaults(node.args)
        self._nested(_parameters(node.args), [ast.Expr(node.body, lineno=node.lineno)])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
            self.visit(part)
        self._nested((), node.body, hides=False)
        self._defines(node.name, node.lineno)

    def visit_ListComp(self, node: _Comprehension) -> None:
        """Read the first iterable in this scope. A walrus inside may bind a name of this scope."""
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
            self._reads(name, line, later=name not in inner.early)
        for walrus in (n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)):
            self.bound.setdefault(walrus.target.id, walrus.lineno)
            self.assigned.add(walrus.target.id)

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
        """Read the names that a nested scope reads from outside.

        Args:
            parameters: the parameters of the scope.
            body: its statements.
            hides: True for a function, whose own names are never read from outside.
        """
        inner = Names(parameters)
        inner.scan(body)
        own = {*inner.bound, *parameters} if hides else set()
        for name, line in inner.read.items():
            if name not in own:
                self._reads(name, line, later=hides or name not in inner.early)


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {argument.arg for argument in every}


def _has_items(iterable: ast.expr) -> bool:
    """Return True for a literal `range`, tuple or list that surely has items."""
    match iterable:
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return any(not isinstance(item, ast.Starred) for item in items)
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if len(bounds) in (1, 2):
            values = [bound.value for bound in bounds if isinstance(bound, ast.Constant)]
            numbers = [value for value in values if isinstance(value, int)]
            return len(numbers) == len(bounds) and len(range(*numbers)) > 0
    return False


def leaves_loop(body: Sequence[ast.stmt]) -> bool:
    """Return True if the body contains a `break` or `continue` of this loop."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Break, ast.Continue)):
            return True
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            waiting.extend(node.orelse)
        elif not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def _deleted(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that `del` or the end of a handler unbinds anywhere in these nodes."""
    every = [inner for node in nodes for inner in ast.walk(node)]
    names = {n.id for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del)}
    return names | {n.name for n in every if isinstance(n, ast.ExceptHandler) and n.name}
