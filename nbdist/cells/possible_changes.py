"""Names whose values a cell may change in place, also through functions and other names.

The text of the cells decides. Functions of the notebook and of the user's own modules are followed
into their bodies. A method changes its object unless it is known to read only. Calls of functions
of other packages change nothing, except as statements of their own, such as
`config.update("jax_enable_x64", True)`.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from typing import TYPE_CHECKING

from nbdist.cells.effects import root_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

READING = {
    *("all", "any", "apply", "argmax", "argmin", "argsort", "as_numpy_iterator", "astype"),
    *("batch", "cache", "cardinality", "clip", "compute", "copy", "count", "count_params"),
    *("cumsum", "decode", "describe", "dot", "encode", "endswith", "evaluate", "filter"),
    *("flatten", "format", "get", "get_config", "get_layer", "get_vocabulary"),
    *("get_weights", "groupby", "head", "hist", "imshow", "index", "info", "init", "isna"),
    *("item", "items", "join", "keys", "lower", "map", "max", "mean", "merge", "min"),
    *("nonzero", "numpy", "padded_batch", "plot", "predict", "prefetch", "ravel", "repeat"),
    *("replace", "reshape", "result", "round", "save", "save_weights", "savefig", "shard"),
    *("shift", "skip", "split", "squeeze", "startswith", "std", "strip", "subplots", "sum"),
    *("summary", "tail", "take", "to_list", "tobytes", "tolist", "transpose", "unbatch"),
    *("upper", "value_counts", "values", "var", "window", "zip"),
}
"""Methods that change neither their object nor their arguments."""

_OF_ARGUMENTS = {"apply_gradients", "minimize", "shuffle", "update"}
"""Methods of optimizers and generators that change their arguments."""

_OF_PARTS = {"children", "get", "get_layer", "items", "modules", "pop", "setdefault", "values"}
"""Methods that return parts of their object."""

_PASSING = {"enumerate", "iter", "list", "next", "reversed", "sorted", "tqdm", "tuple", "zip"}
"""Functions whose results contain elements of their arguments."""

CHANGING = {"delattr", "exec", "next", "setattr"}
"""Built-in functions that change their arguments."""

_SILENT = {
    *("IPython", "PIL", "gc", "glob", "graphviz", "json", "logging", "matplotlib", "nbdist", "os"),
    *("pandas", "pathlib", "plotly", "pprint", "seaborn", "shutil", "subprocess", "sys", "tarfile"),
    *("time", "tqdm", "urllib", "warnings", "zipfile"),
}
"""Packages whose calls change nothing that a training reads."""

_SETTING = re.compile("set|config|enable|disable|seed|regist|policy|option|eager")
"""Words in the names of functions that change a package."""


class PossibleChanges:
    """Changes by the cells of a notebook.

    Args:
        trees: syntax trees of all cells, in the order in which they ran.
        own: syntax trees of the files of the user's own modules, by the modules' names.
    """

    def __init__(
        self, trees: Sequence[ast.Module], own: Mapping[str, Sequence[ast.Module]] | None = None
    ) -> None:
        self._own = own or {}
        self._of_modules: set[_Function] = set()
        self._classes: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._functions: dict[str, _Function] = {}
        self._methods: dict[str, list[_Function]] = {}
        self._wrapped: dict[str, str] = {}
        self._imported: dict[str, str] = {}
        self._linked: dict[str, set[str]] = {}
        self._known: dict[_Function, set[str]] = {}
        for tree in itertools.chain(*self._own.values()):
            for node in ast.walk(tree):
                if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
                    self._note(node)
                if isinstance(node, _FUNCTIONS):
                    self._of_modules.add(node)
        for tree in trees:
            for node in ast.walk(tree):
                self._note(node)
            for statement in _outside(tree.body):
                self._link(statement)

    @property
    def settings(self) -> set[str]:
        """Imported names. A change of such a name may concern any later cell."""
        return {n for n, package in self._imported.items() if package not in _SILENT - {"os"}}

    def of_cell(self, tree: ast.Module) -> set[str]:
        """Return the names whose values a cell may change."""
        return self._changed(_outside(tree.body))

    def with_aliases(self, names: Iterable[str]) -> set[str]:
        """Return names, with the other names that the notebook has for their values."""
        return reached(names, self._linked)

    # The notebook as a whole.

    def _note(self, node: ast.AST) -> None:
        """Store a definition or an import."""
        match node:
            case ast.Import() | ast.ImportFrom():
                origin = getattr(node, "module", None) or ""
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._imported[name] = (origin or alias.name).partition(".")[0]
                    self._renamed[name] = alias.name
            case ast.ClassDef(body=body):
                self._classes.add(node.name)
                for part in body:
                    if isinstance(part, _Function):
                        self._methods.setdefault(part.name, []).append(part)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._functions[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                for argument in call.args:  # step = jax.jit(step_of_one_batch)
                    if isinstance(argument, ast.Name) and root_name(call.func) in self._imported:
                        self._wrapped[name] = argument.id

    def _link(self, node: ast.AST) -> None:
        """Store that two names may lead to one value: `a = b.c`, `model.compile(opt)`."""
        pairs: list[tuple[str, Iterable[str]]] = []
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [(name, _parts(value)) for target in targets for name in _targets(target)]
            case ast.Call(func=ast.Attribute(attr="compile") as func):
                given = [name for part in passed(node) for name in _parts(part)]
                pairs = [(root_name(func), given)]
        match node:  # trainer = Trainer(model)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                if self._named(call) in self._classes:
                    pairs += [(name, _parts(part)) for part in passed(call)]
        for name, others in pairs:
            for other in others:
                if other not in self._imported and name not in self._imported:
                    self._linked.setdefault(name, set()).add(other)
                    self._linked.setdefault(other, set()).add(name)

    def _named(self, call: ast.Call) -> str:
        """Return the name of the called function or class at its definition."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        return self._renamed.get(name, name)

    def _is_of_package(self, root: str) -> bool:
        """Return True if a name was imported, and not from a module of the user."""
        return root in self._imported and self._imported[root] not in self._own

    # One cell or function.

    def _changed(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Return the names that nodes may change, and what these names refer to there."""
        every = list(nodes)
        changed = {name for node in every for name in self._changed_by(node)}
        return with_origins(changed, every) - {""}

    def _changed_by(self, node: ast.AST) -> set[str]:
        """Return the names that a node itself may change."""
        match node:
            case ast.AugAssign(target=ast.Name(id=name)):
                return {name}
            case ast.Expr(value=ast.Call() as call):
                return self._by_statement(call)
            case ast.Call():
                return self._by_call(node)
            case ast.Attribute() | ast.Subscript() if not isinstance(node.ctx, ast.Load):
                return {root_name(node)}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                used = {root_name(decorator) for decorator in node.decorator_list}
                functions = [self._functions[name] for name in used if name in self._functions]
                return {n for f in functions for n in self._of_function(f) - _own(f)}
        return set()

    def _by_statement(self, call: ast.Call) -> set[str]:
        """Return the changes by a call whose result is not used, of an imported function."""
        root = root_name(call.func)
        if not self._is_of_package(root) or self._imported[root] in _SILENT:
            return set()
        settings = {root} if _SETTING.search(ast.unparse(call.func)) else set()
        return settings | {name for part in passed(call) for name in _parts(part)}

    def _by_call(self, call: ast.Call) -> set[str]:
        root = root_name(call.func)
        if self._is_of_package(root):
            return set()
        if root in self._imported:
            function = self._functions.get(self._named(call))
            return self._by_function(function, call, 0) if function is not None else set()
        given = [name for part in passed(call) for name in _parts(part)]
        if isinstance(call.func, ast.Attribute):
            method = call.func.attr
            if method in self._methods:
                own = {n for f in self._methods[method] for n in self._by_function(f, call, 1)}
                return {root, *own}
            changed = {root} if method not in READING else set()
            return changed | (set(given) if method in _OF_ARGUMENTS else set())
        if not isinstance(call.func, ast.Name):
            return set()
        function = self._functions.get(self._wrapped.get(root, root))
        if function is not None:
            return self._by_function(function, call, 0)
        if root in CHANGING:
            return set(given)
        trains = any(
            word.arg == "training" and getattr(word.value, "value", True) for word in call.keywords
        )
        return {root} if trains and root not in vars(builtins) else set()

    def _by_function(self, function: _Function, call: ast.Call, skipped: int) -> set[str]:
        """Return the changes by a call of a function: its arguments, and global names."""
        changed = self._of_function(function)
        names = [part.arg for part in (*function.args.posonlyargs, *function.args.args)][skipped:]
        words = {word.arg: word.value for word in call.keywords}
        given = dict(zip(names, call.args, strict=False)) | words
        more = [part for part in passed(call) if part not in given.values()]
        found = set() if function in self._of_modules else changed - _own(function)
        for name in changed & _parameters(function):
            parts = [given[name]] if name in given else more
            found.update(root for part in parts for root in _parts(part))
        return found

    def _of_function(self, function: _Function) -> set[str]:
        if function not in self._known:
            self._known[function] = set()  # a function that calls itself
            nodes = (node for part in function.body for node in ast.walk(part))
            self._known[function] = self._changed(nodes) | _shared(function)
        return self._known[function]


def with_origins(names: Iterable[str], nodes: Iterable[ast.AST]) -> set[str]:
    """Return names, with those whose parts nodes assign to them: `for layer in base.layers`."""
    origins: dict[str, set[str]] = {}
    for node in nodes:
        for target, value in _assigned(node):
            for name in _targets(target):
                origins.setdefault(name, set()).update(_parts(value))
    return reached(names, origins)


def reached(names: Iterable[str], following: Mapping[str, set[str]]) -> set[str]:
    """Return names, those that follow them, those that follow these, and so on."""
    found = set(names)
    waiting = [*found]
    while waiting:
        new = following.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _outside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes in order, without the bodies of functions. Those of classes run at once."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _outside(node.decorator_list)
        elif not isinstance(node, ast.Lambda):
            yield from _outside(ast.iter_child_nodes(node))


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with the value that a node assigns to them, or whose elements it assigns."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, value
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield target, value


def _targets(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _parts(value: ast.expr) -> Iterator[str]:
    """Yield the names whose values, or parts of them, an expression may return."""
    if isinstance(value, ast.Name):
        yield value.id
    for part in _inner(value):
        yield from _parts(part)


def _inner(value: ast.expr) -> Sequence[ast.expr]:
    """Return the expressions whose values an expression may return, or parts of them."""
    match value:
        case ast.Attribute() | ast.Subscript() | ast.Starred() | ast.NamedExpr() | ast.Await():
            return [value.value]
        case ast.Tuple() | ast.List():
            return value.elts
        case ast.BoolOp() | ast.Dict():
            return value.values
        case ast.IfExp():
            return [value.body, value.orelse]
        case ast.Call(func=ast.Name(id=name)) if name in _PASSING:
            return value.args
        case ast.Call(func=ast.Attribute(attr=method) as func) if method in _OF_PARTS:
            return [func.value]
    return []


def passed(call: ast.Call) -> list[ast.expr]:
    """Return the expressions of all arguments of a call."""
    return [*call.args, *(word.value for word in call.keywords)]


def _parameters(function: _Function) -> set[str]:
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {part.arg for part in (*every, arguments.vararg, arguments.kwarg) if part is not None}


def _own(function: _Function) -> set[str]:
    """Return the local names of a function, with its parameters."""
    bound = {name for node in ast.walk(function) for name in _bound_by(node)}
    return (_parameters(function) | bound) - _shared(function)


def _shared(function: _Function) -> set[str]:
    """Return the global names that a function assigns."""
    return {n for node in ast.walk(function) if isinstance(node, ast.Global) for n in node.names}


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
