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
from typing import TYPE_CHECKING, Literal

from nbdist.cells.effects import GROWS, root_name
from nbdist.cells.fixed_points import FixedPoints
from nbdist.cells.iterated_objects import SPECIAL, IteratedObjects
from nbdist.cells.value_parts import (
    FUNCTIONS,
    arguments_of,
    assigned,
    body_of,
    names_in,
    parameters,
    passed,
    targets_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.cells.value_parts import Function, OfCall

READING = {
    *("abs", "agg", "aggregate", "all", "any", "apply", "applymap", "argmax", "argmin", "argsort"),
    *("as_numpy_iterator", "astype", "bar", "barh", "batch", "between", "boxplot"),
    *("cache", "cardinality", "clip", "compute", "compute_output_shape", "copy", "corr", "count"),
    *("count_params", "cov", "cumsum", "decode", "describe", "diff", "dot", "drop"),
    *("drop_duplicates", "dropna", "duplicated", "encode", "endswith", "evaluate", "explode"),
    *("ffill", "fillna", "filter", "find", "flatten", "format", "get", "get_config", "get_layer"),
    *("get_vocabulary", "get_weights", "groupby", "head", "hist", "idxmax", "idxmin", "imshow"),
    *(
        "index",
        "info",
        "init",
        "interpolate",
        "isin",
        "isna",
        "isnull",
        "item",
        "items",
        "iterrows",
    ),
    *("itertuples", "join", "keys", "kurt", "lower", "map", "max", "mean", "median", "melt"),
    *("memory_usage", "merge", "min", "mode", "ne", "nlargest", "nonzero", "notna", "notnull"),
    *("nsmallest", "numpy", "nunique", "padded_batch", "pivot", "pivot_table", "plot", "predict"),
    *("predict_classes", "predict_proba", "prefetch", "quantile", "query", "rank", "ravel"),
    *("rename", "repeat", "replace", "reset_index", "reshape", "resample", "result", "rolling"),
    *("round", "save", "save_weights", "savefig", "scatter", "score", "select_dtypes"),
    *("set_index", "shard", "shift", "show", "size", "skew", "skip", "sort_index", "sort_values"),
    *("split", "squeeze", "stack", "startswith", "std", "strip", "subplots", "sum", "summary"),
    *("swapaxes", "tail", "take", "title", "to_csv", "to_dict", "to_frame", "to_json", "to_list"),
    *("to_numpy", "tobytes", "tolist", "transpose", "unbatch", "unique", "unstack", "upper"),
    *("value_counts", "values", "var", "window", "zfill", "zip"),
}
"""Methods that change neither their object nor their arguments."""

_OF_ARGUMENTS = {"apply_gradients", "minimize", "shuffle", "update"}
"""Methods of optimizers and generators that change their arguments."""

_GROWS = GROWS | {"add", "appendleft", "setdefault", "update"}
"""Methods whose object contains their arguments afterwards."""

_APPLYING = {
    *("apply", "filter", "map", "map_structure", "max", "min", "reduce", "sorted", "starmap"),
    "tree_map",
}
"""Functions and methods that call a function with their other arguments, or parts of them."""

CHANGING = {"delattr", "exec", "next", "setattr"}
"""Built-in functions that change their arguments."""

_SILENT = {
    *("IPython", "PIL", "gc", "glob", "graphviz", "json", "logging", "matplotlib", "nbdist", "os"),
    *("pandas", "pathlib", "plotly", "pprint", "seaborn", "shutil", "subprocess", "sys", "tarfile"),
    *("time", "tqdm", "urllib", "warnings", "zipfile"),
}
"""Packages whose calls change nothing that a training reads."""

_COMPUTING = {"jax", "numpy", "scipy", "sklearn"}
_IN_PLACE = {"at", "copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
"""Packages whose functions change no arguments, except these and `shuffle`."""

_SETTING = re.compile("set|config|enable|disable|seed|regist|policy|option|eager|clear")
"""Words in the names of functions that change a package."""

_LOOKING = re.compile("plot|show|print|display|save|draw|summar|visuali")
"""Words in the names of functions of packages that only read their arguments."""


_Key = tuple[Literal["changes", "returns", "object"], "Function"]


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
        self._of_modules: set[Function] = set()
        self._classes: dict[str, ast.ClassDef | None] = {}
        self._renamed: dict[str, str] = {}
        self._functions: dict[str, Function] = {}
        self._methods: dict[str, list[Function]] = {}
        self._properties: set[str] = set()
        self._wrapped: dict[str, ast.Call] = {}
        self._imported: dict[str, str] = {}
        self._linked: dict[str, set[str]] = {}
        self._sets = FixedPoints(self._computed)
        self._iterated = IteratedObjects((), self._changing)
        for tree in itertools.chain(*self._own.values()):
            for node in ast.walk(tree):
                if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                    self._note(node)
                if isinstance(node, FUNCTIONS):
                    self._of_modules.add(node)
        for tree in trees:
            for node in ast.walk(tree):
                self._note(node)
        nodes = [node for tree in trees for node in _outside(tree.body)]
        self._iterated = IteratedObjects(nodes, self._changing)
        self._sets = FixedPoints(self._computed)
        for node in nodes:
            self._link(node)

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
            case ast.ClassDef():
                self._classes[node.name] = node
                self._note_methods(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._functions[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                self._functions[name] = function
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[first, *_]) as call):
                if "namedtuple" in ast.unparse(call.func):
                    self._classes[name] = None
                elif isinstance(first, ast.Name) and root_name(call.func) in self._imported:
                    self._wrapped[name] = call  # step = jax.jit(step_of_one_batch)

    def _note_methods(self, definition: ast.ClassDef) -> None:
        for method in definition.body:
            if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._methods.setdefault(method.name, []).append(method)
                if any("property" in ast.unparse(part) for part in method.decorator_list):
                    self._properties.add(method.name)

    def _changing(self, name: str) -> set[str]:
        """Return the special methods that change the object which a class or function returns."""
        function = self._functions.get(name)
        found = self._special(name) | self._of_generator(name)
        for node in body_of(function) if function is not None else ():
            if isinstance(node, (ast.Return, ast.Assign)) and node.value is not None:
                calls = (part for part in ast.walk(node.value) if isinstance(part, ast.Call))
                for made in map(self._named, calls):
                    found |= self._special(made) | self._of_generator(made)
        return found

    def _of_generator(self, name: str) -> set[str]:
        function = self._functions.get(name)
        nodes = () if function is None or isinstance(function, ast.Lambda) else function.body
        yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _outside(nodes))
        return {"__next__"} if yields else set()

    def _special(self, name: str) -> set[str]:
        """Return the special methods of a class and its bases that change its objects."""
        bases: dict[str, set[str]] = {}
        for each, node in self._classes.items():
            if node is not None:
                bases[each] = {base.id for base in node.bases if isinstance(base, ast.Name)}
        classes = [node for each in reached([name], bases) if (node := self._classes.get(each))]
        return {
            part.name
            for node in classes
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name in SPECIAL
            if self._changes_first(part)
        }

    def _changes_first(self, function: Function) -> bool:
        """Return True if a method changes its object, also without `self.layer(x)`."""
        return bool(self._sets.of(("object", function)))

    def _computed(self, key: _Key) -> set[str]:
        """Return what is known about a function: changed names, returned names, changed object."""
        kind, function = key
        if kind == "changes":
            return self._changed(body_of(function)) | _shared(function)
        if kind == "returns":
            return self._returned_by(function)
        first = parameters(function)[:1]
        nodes = [node for node in body_of(function) if not self._computes(node, first)]
        return self._changed(nodes) & {*first}

    def _computes(self, node: ast.AST, first: Sequence[str]) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
                return name in first and attribute not in self._methods
        return False

    def _link(self, node: ast.AST) -> None:
        """Store that two names may lead to one value: `a = b.c`, `model.compile(opt)`."""
        pairs: list[tuple[str, Iterable[str]]] = []
        for target, value in assigned(node):
            given = {*self._parts(value)}
            names = [*targets_in(target)] or [root_name(target)]  # d["x"] = x
            pairs += [(name, given) for name in names]
        match node:
            case ast.Call(func=ast.Attribute(attr=method) as func):
                if method == "compile" or method in _GROWS:
                    given = {name for part in passed(node) for name in self._parts(part)}
                    pairs += [(name, given) for name in self._parts(func.value)]
        for name, others in pairs:
            for other in others:
                if other not in self._imported and name not in self._imported and name:
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

    # Values of expressions.

    def _parts(self, value: ast.expr) -> Iterator[str]:
        """Yield the names whose values, or parts of them, an expression may return."""
        return names_in(value, self._parts_of_call)

    def _parts_of_call(self, call: ast.Call) -> set[str]:
        """Return the names whose values the result of a function or class of the user contains."""
        name = self._named(call)
        if name in self._classes and not self._is_of_package(root_name(call.func)):
            return {n for part in passed(call) for n in self._parts(part)}
        found = set()
        for function, skipped in self._called(call):
            names = self._sets.of(("returns", function))
            found |= self._at_call(function, call, names, skipped)
            if skipped and names & {*parameters(function)[:1]}:
                assert isinstance(call.func, ast.Attribute)
                found |= {*self._parts(call.func.value)}
        return found

    def _called(self, call: ast.Call) -> Iterator[tuple[Function, int]]:
        """Yield the functions of the user that a call may run, and their parameters to skip."""
        root = root_name(call.func)
        if self._is_of_package(root):
            return
        if isinstance(call.func, ast.Attribute) and root not in self._imported:
            yield from ((function, 1) for function in self._methods.get(call.func.attr, ()))
        elif isinstance(call.func, ast.Lambda):
            yield call.func, 0
        elif isinstance(call.func, (ast.Name, ast.Attribute)):
            name = self._named(call)
            wrapper = self._wrapped.get(name)
            if wrapper is not None and isinstance(wrapper.args[0], ast.Name):
                name = wrapper.args[0].id
            if name in self._functions:
                yield self._functions[name], 0

    def _returned_by(self, function: Function) -> set[str]:
        """Return the names whose values, or parts of them, a function may return."""
        nodes = [*body_of(function)]
        values = [function.body] if isinstance(function, ast.Lambda) else []
        outputs = (n for n in nodes if isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom)))
        values += [node.value for node in outputs if node.value is not None]
        found = {name for value in values for name in self._parts(value)}
        return with_origins(found, nodes, self._parts_of_call)

    def _at_call(
        self, function: Function, call: ast.Call, names: set[str], skipped: int
    ) -> set[str]:
        """Return the names at a call for names in the function: arguments, and global names."""
        found = set() if function in self._of_modules else names - _own(function)
        for name in names & {*parameters(function)[skipped:]}:
            for part in arguments_of(function, call, name, skipped):
                found.update(self._parts(part))
        return found

    # One cell or function.

    def _changed(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Return the names that nodes may change, and what these names refer to there."""
        every = list(nodes)
        changed = {name for node in every for name in self._changed_by(node)}
        changed |= {name for node in every for name in self._iterated.taken_by(node)}
        return with_origins(changed, every, self._parts_of_call) - {""}

    def _changed_by(self, node: ast.AST) -> set[str]:
        """Return the names that a node itself may change."""
        match node:
            case ast.AugAssign(target=ast.Name(id=name)):
                return {name}
            case ast.Expr(value=ast.Call() as call):
                return self._by_statement(call)
            case ast.Call():
                return self._by_call(node) | self._by_words(node) | self._by_applied(node)
            case ast.Attribute(attr=name) | ast.Subscript(value=ast.Attribute(attr=name)) if (
                isinstance(node.ctx, ast.Load)
            ):
                return self._by_property(node, name)
            case ast.Attribute() | ast.Subscript() if not isinstance(node.ctx, ast.Load):
                return {*self._parts(node.value)}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                used = {root_name(decorator) for decorator in node.decorator_list}
                functions = [self._functions[name] for name in used if name in self._functions]
                return {n for f in functions for n in self._of_function(f) - _own(f)}
        return set()

    def _by_property(self, node: ast.Attribute | ast.Subscript, name: str) -> set[str]:
        """Return the object of a property that changes it."""
        functions = self._methods[name] if name in self._properties else ()
        if any(map(self._changes_first, functions)):
            return {*self._parts(node.value)}
        return set()

    def _by_statement(self, call: ast.Call) -> set[str]:
        """Return the changes by a call whose result is not used, of an imported function."""
        root, name = root_name(call.func), ast.unparse(call.func)
        if not self._is_of_package(root) or self._imported[root] in _SILENT:
            return set()
        settings = {root} if _SETTING.search(name) else set()
        function = name.rpartition(".")[2]
        if self._imported[root] in _COMPUTING and function not in _IN_PLACE:
            return settings
        if _LOOKING.search(function):
            return settings
        return settings | {name for part in passed(call) for name in self._parts(part)}

    def _by_words(self, call: ast.Call) -> set[str]:
        """Return the changes that keywords of a call ask for: `out=x`, and `inplace=True`."""
        found = set()
        for word in call.keywords:
            if word.arg == "out":
                found |= {*self._parts(word.value)}
            elif word.arg == "inplace" and getattr(word.value, "value", True):
                found |= {*self._parts(call.func)}
        return found

    def _by_applied(self, call: ast.Call) -> set[str]:
        """Return the changes by a function that a call applies to its other arguments."""
        if self._named(call) not in _APPLYING | {"map"}:
            return set()
        found = set()
        every = passed(call)
        for argument in every:
            others = [part for part in every if part is not argument]
            if isinstance(call.func, ast.Attribute):
                others.append(call.func.value)
            if isinstance(argument, (ast.Name, ast.Lambda)):
                found |= self._by_call(ast.Call(argument, others, []))
        return found

    def _by_call(self, call: ast.Call) -> set[str]:
        root = root_name(call.func)
        given = {name for part in passed(call) for name in self._parts(part)}
        if self._is_of_package(root):
            return given if ast.unparse(call.func).endswith(".shuffle") else set()
        functions = [*self._called(call)]
        found = {n for f, skipped in functions for n in self._by_function(f, call, skipped)}
        if root in self._imported or isinstance(call.func, ast.Lambda):
            return found
        if isinstance(call.func, ast.Attribute):
            return found | self._by_method(call.func, given, is_own=bool(functions))
        if not isinstance(call.func, ast.Name) or functions:
            return found
        if root in CHANGING:
            return self._by_next(call) if root == "next" else given
        trains = any(
            word.arg == "training" and getattr(word.value, "value", True) for word in call.keywords
        )
        return {root} if trains and root not in vars(builtins) else set()

    def _by_next(self, call: ast.Call) -> set[str]:
        """Return the iterator of `next`. A new one, `iter(x)`, is no name of the notebook."""
        match call.args:
            case [ast.Call() | ast.GeneratorExp(), *_]:
                return set()
            case [iterator, *_]:
                return {*self._parts(iterator)}
        return set()

    def _by_method(self, func: ast.Attribute, given: set[str], *, is_own: bool) -> set[str]:
        """Return the changes by a method: its object and arguments, as far as it is unknown."""
        if is_own:
            return {*self._parts(func.value)}
        changed = {*self._parts(func.value)} if func.attr not in READING else set()
        return changed | (given if func.attr in _OF_ARGUMENTS else set())

    def _by_function(self, function: Function, call: ast.Call, skipped: int) -> set[str]:
        """Return the changes by a call of a function: its arguments, and global names."""
        changed = self._of_function(function)
        wrapper = self._wrapped.get(self._named(call))
        if wrapper is not None:  # functools.partial(f, x)
            call = ast.Call(call.func, [*wrapper.args[1:], *call.args], call.keywords)
        return self._at_call(function, call, changed, skipped)

    def _of_function(self, function: Function) -> set[str]:
        return self._sets.of(("changes", function))


def with_origins(
    names: Iterable[str], nodes: Iterable[ast.AST], of_call: OfCall | None = None
) -> set[str]:
    """Return names, with those whose parts nodes assign to them: `for layer in base.layers`.

    Args:
        names: changed names.
        nodes: nodes of a cell or function.
        of_call: names for a call of a function of the user.
    """
    origins: dict[str, set[str]] = {}
    for node in nodes:
        for target, value in assigned(node):
            for name in targets_in(target):
                origins.setdefault(name, set()).update(names_in(value, of_call))
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


def _own(function: Function) -> set[str]:
    """Return the local names of a function, with its parameters."""
    bound = {name for node in ast.walk(function) for name in _bound_by(node)}
    return ({*parameters(function)} | bound) - _shared(function)


def _shared(function: Function) -> set[str]:
    """Return the global names that a function assigns."""
    return {n for node in ast.walk(function) if isinstance(node, ast.Global) for n in node.names}


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
