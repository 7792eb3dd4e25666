"""Objects that a cell calls: functions of the user that take gradients, frameworks, metrics."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import random
import sys
import textwrap
from collections import ChainMap
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.cells.effects import effect_in, is_compiled, root_name
from nbdist.cells.loops import repeats_batch, training_loops
from nbdist.utils.installed import is_users_file
from nbdist.worker.lifting.definitions import first_line
from nbdist.worker.lifting.outside_names import read_by, read_in
from nbdist.worker.runtime import import_hooks
from nbdist.worker.runtime.user_modules import behind, is_of_user, is_users

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.cells.loops import Scan

_FRAMEWORKS = ("tensorflow", "keras", "jax", "optax", "flax")
_OF_KERAS = ("fit", "evaluate", "predict", "train_on_batch", "compile")
"""Methods in which Keras trains by itself."""

_RANDOM = (["random"], ["np", "random"], ["numpy", "random"])
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Names and types of generators of random numbers on the host."""

_NEXT = {"next", "get_next"}
"""Functions and methods that take the next item of an iterator."""

_WRAPPERS = {"function", "partial", "jit", "filter_jit"}
"""Functions that return a function which calls another."""

_CONVERSIONS = {"tf.constant", "np.array", "np.asarray", "numpy.array", "numpy.asarray"}
"""Functions that do not accept the tensors of a compiled step."""

_OF_DRAWS = {*_CONVERSIONS, "tf.convert_to_tensor", "np.float32", "numpy.float32"}
"""Functions that do not accept a draw as a tensor, or not with another type."""

_MOST_FUNCTIONS = 20
"""Number of items of a dict or list that are searched for functions."""

_UPDATES = {"GradientTape", "gradient", "apply_gradients", "minimize"}
"""Methods of tapes and optimizers."""


class Callees:
    """Objects behind the calls of a cell, found by name before the cell runs.

    A call of a method, as in `self.train_step(x)`, means every method of this name in the classes
    of the cell, of the user's namespace, and of the user's modules.

    Args:
        tree: the cell, or a module of the user.
        namespace: its global names.

    Attributes:
        namespace: the same names.
    """

    compiles = True

    def __init__(self, tree: ast.Module, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._spaces = [namespace, *map(vars, behind(list(namespace.values())))]
        self._namespace = ChainMap(*self._spaces)
        self._defined: dict[str, list[ast.AST]] = {}
        self._methods: dict[str, list[ast.AST]] = {}
        self._aliases: dict[str, list[str]] = {}
        self._imported: set[str] = set()
        self._lambdas: dict[ast.Lambda, ast.FunctionDef] = {}
        self._callable = {
            node.name: method
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name == "__call__"
        }
        self._collect(tree)
        self._visited: dict[str, bool] = {}
        self._tree = tree

    def _collect(self, tree: ast.Module) -> None:
        """Collect the functions and methods of the cell, and the methods of earlier cells."""
        for node in ast.walk(tree):
            self._note(node)
        kinds = {
            value for space in self._spaces for value in list(space.values()) if _is_class(value)
        }
        for kind in kinds:
            for name, method in vars(kind).items():
                function = getattr(method, "__func__", method)  # of class and static methods
                for found in tree_of(function):
                    self._methods.setdefault(name, []).append(found)
                    self._collect_inner(found)

    def _collect_inner(self, function: ast.AST) -> None:
        """Collect what a function of an earlier cell defines."""
        for node in ast.walk(function):
            if node is not function:
                self._note(node)

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.ClassDef(body=body):
                for statement in body:
                    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        self._methods.setdefault(statement.name, []).append(statement)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._defined.setdefault(name, []).append(node)
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Lambda()):
                self._methods.setdefault(name, []).append(node.value)
            case ast.Assign(targets=[target], value=ast.Call() | ast.Lambda()):
                for part in target.elts if isinstance(target, ast.Tuple) else (target,):
                    if isinstance(part, ast.Name):
                        self._defined.setdefault(part.id, []).append(self._made_by(node.value))
            case ast.Import() | ast.ImportFrom(level=0):
                self._note_import(node)
        self._note_alias(node)

    def _made_by(self, value: ast.expr) -> ast.AST:
        """Return the method `__call__` if a value is an object of a callable class of the cell."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return self._callable.get(value.func.id, value)
        return value

    def _note_alias(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value):
                for part in value.values if isinstance(value, ast.Dict) else (value,):
                    if function := _other_name(part):
                        self._aliases.setdefault(name, []).append(function)
                    elif isinstance(value, ast.Dict):
                        self._defined.setdefault(name, []).append(part)

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            self._note_module(module[:-1] or alias.name)
            self._note_module(f"{module}{alias.name}")
            if module and alias.asname:
                self._aliases.setdefault(alias.asname, []).append(alias.name)

    def _note_module(self, name: str) -> None:
        """Collect the definitions of a module of the user that the cell imports first."""
        if name in self._imported or name.partition(".")[0] in sys.stdlib_module_names:
            return
        self._imported.add(name)
        path = _file_of(name)
        if path is None or not is_users_file(name, path):
            return
        try:
            tree = ast.parse(Path(path).read_bytes())
        except (OSError, SyntaxError):
            return
        for node in ast.walk(tree):
            self._note(node)
        for function in tree.body:  # of the module: `helpers.train_step`
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._methods.setdefault(function.name, []).append(function)

    def updates(self, call: ast.Call) -> bool:
        """Return True for a tape, and for a method that takes or applies a gradient."""
        match call.func:
            case ast.Name(id=name):
                return name == "GradientTape"
            case ast.Attribute(attr="apply", value=owner):
                return self._is_optimizer(owner)
            case ast.Attribute(attr="train_step", value=owner):
                return self._is_model(owner)
            case ast.Attribute(attr=name):
                return name in _UPDATES
        return False

    def _is_model(self, node: ast.expr) -> bool:
        """Return True for a model whose `train_step` is Keras's own."""
        value, keras = self._value(node), sys.modules.get("keras")
        is_model = keras is not None and isinstance(value, keras.Model)
        return is_model and not is_of_user(type(value).train_step)

    def _is_optimizer(self, node: ast.expr) -> bool:
        """Return True for a Keras optimizer; before it exists, for a name such as `self.opt`."""
        value, keras = self._value(node), sys.modules.get("keras")
        if value is not None and keras is not None:
            return isinstance(value, keras.optimizers.Optimizer)
        return "opt" in ast.unparse(node).split(".")[-1]

    def takes_gradient(self, call: ast.Call) -> bool:
        """Return True if the called function takes a gradient, itself or in those it calls.

        Functions that distribute their work with a strategy of the user do not count.
        """
        function = call.func
        if isinstance(function, ast.Subscript):  # steps["train"](x)
            function = function.value
        if isinstance(function, ast.Name):
            return self._name_takes(function.id)
        if not isinstance(function, ast.Attribute) or function.attr in _OF_KERAS:
            return False
        owner = self._value(function.value)
        is_known = owner is not None and not is_of_user(owner)
        return not is_known and self._method_takes(function.attr)

    def trains(self, call: ast.Call) -> bool:
        """Return True if the called function has a training loop, itself or in its calls."""
        key = f"loop {ast.unparse(call.func)}"
        if key not in self._visited:
            self._visited[key] = False  # a recursion ends here
            self._visited[key] = any(map(self._has_loop, self._functions(call)))
        return self._visited[key]

    def _has_loop(self, function: ast.AST) -> bool:
        if any(training_loops(function, self)):
            return True
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        return any(map(self.trains, calls))

    def _name_takes(self, name: str) -> bool:
        key = f"name {name}"
        if key not in self._visited:
            self._visited[key] = False  # a recursion ends here
            nodes = self._defined.get(name)
            if nodes is None:
                nodes = list(tree_of(self._namespace.get(name)))
                for node in nodes:
                    self._collect_inner(node)
            self._visited[key] = any(map(self._takes, nodes)) or self._alias_takes(name)
        return self._visited[key]

    def _alias_takes(self, name: str) -> bool:
        """Return True if the function of another name does, as after `self.step = train_step`."""
        others = self._aliases.get(name, ())
        return any(self._name_takes(other) or self._method_takes(other) for other in others)

    def _method_takes(self, name: str) -> bool:
        key = f"method {name}"
        if key not in self._visited:
            self._visited[key] = False
            takes = any(map(self._takes, self._called_as_method(name)))
            self._visited[key] = takes or self._alias_takes(name)
        return self._visited[key]

    def _called_as_method(self, name: str) -> Iterator[ast.AST]:
        """Yield the methods of a name, and such functions of the user's modules."""
        yield from self._methods.get(name, ())
        for space in self._spaces[1:]:
            yield from tree_of(space.get(name))

    def _takes(self, function: ast.AST) -> bool:
        """Return True if a function takes gradients, but not in a training loop of its own."""
        if not self._body_takes(function):
            return False
        return all(repeats_batch(loop, self) for loop in training_loops(function, self))

    def _body_takes(self, function: ast.AST) -> bool:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(map(self.distributes, calls)):
            return False
        return any(self.updates(call) or self.takes_gradient(call) for call in calls)

    def effect(self, call: ast.Call) -> str:
        """Return code of a called function that changes or shows something else; or empty."""
        return self._effect(call, set())

    def _effect(self, call: ast.Call, visited: set[int]) -> str:
        for function in self._functions(call):
            if id(function) in visited:
                continue
            visited.add(id(function))
            found = effect_in(function) or self._draw_in(function)
            if found is not None:
                return f"`{ast.unparse(found)}` in `{function.name}`"
            for inner in ast.walk(function):
                if isinstance(inner, ast.Call) and (text := self._effect(inner, visited)):
                    return text
        return ""

    def read_by_functions(self, loop: ast.AST) -> set[str]:
        """Return the names from outside that functions of the user read when called.

        Args:
            loop: a loop. Functions that contain it do not count: it knows what they read.
        """
        around = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and any(inner is loop for inner in ast.walk(node))
        ]
        others = (node for node in ast.walk(self._tree) if node not in around)
        skipped = {(node.name, first_line(node)) for node in around}
        return read_by(others) | read_in(self.namespace, skipped)

    def reads(self, call: ast.Call) -> set[str]:
        """Return the names from outside that the called function reads, itself or in its calls."""
        found: set[str] = set()
        visited: set[int] = set()
        waiting = [call]
        while waiting:
            for function in self._functions(waiting.pop()):
                if id(function) not in visited:
                    visited.add(id(function))
                    found |= read_by([function])
                    waiting += (node for node in ast.walk(function) if isinstance(node, ast.Call))
        return found

    def _draw_in(self, function: ast.FunctionDef) -> ast.AST | None:
        """Return a call that draws. None if `tf.function` compiles the function."""
        if is_compiled(function):
            return None
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        return next(filter(self.draws, calls), None)

    def draws(self, call: ast.Call) -> bool:
        """Return True if a compiled step would repeat the result of the call."""
        *owner, name = ast.unparse(call.func).split(".")
        if not owner:
            return name == "next" and bool(call.args) and not self._is_of_framework(call.args[0])
        if self.computes(call):
            return False
        value = self._value(call.func.value) if isinstance(call.func, ast.Attribute) else None
        if value is None:
            return owner in _RANDOM or owner[-1] == "rng"
        return value is random or value is np.random or isinstance(value, _GENERATORS)

    def _is_of_framework(self, node: ast.expr) -> bool:
        return type(self._value(node)).__module__.split(".")[0] in _FRAMEWORKS

    def _functions(self, call: ast.Call) -> list[ast.FunctionDef]:
        """Return the definitions of the user's functions that a call may mean."""
        nodes: list[ast.AST] = []
        function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        if isinstance(function, ast.Name):
            nodes += self._called(function.id)
        elif isinstance(function, ast.Attribute):
            owner = self._value(function.value)
            if owner is None or is_of_user(owner):
                name = function.attr
                nodes += self._called_as_method(name)
                for other in self._aliases.get(name, ()):
                    nodes += (*self._called(other), *self._called_as_method(other))
        name = ast.unparse(call.func)
        return [function for node in nodes for function in self._functions_in(node, name)]

    def _functions_in(self, node: ast.AST, name: str) -> Iterator[ast.FunctionDef]:
        """Yield a function, or the lambdas in another definition than a class as functions."""
        if isinstance(node, ast.FunctionDef):
            yield node
        elif not isinstance(node, ast.ClassDef):
            for part in ast.walk(node):
                if isinstance(part, ast.Lambda):
                    yield self._lambdas.setdefault(part, _function_of(part, name))

    def _called(self, name: str) -> Iterator[ast.AST]:
        """Yield the definitions of a function, also if it has another name."""
        for known in (name, *self._aliases.get(name, ())):
            yield from self._defined.get(known) or tree_of(self._namespace.get(known))

    def distributes(self, call: ast.Call) -> bool:
        """Return True if the call runs a function on the replicas of a strategy."""
        match call.func:
            case ast.Attribute(attr="run", value=ast.Name(id=name)):
                tensorflow = sys.modules.get("tensorflow")
                kinds = () if tensorflow is None else tensorflow.distribute.Strategy
                return "strategy" in name or isinstance(self._namespace.get(name), kinds)
        return False

    def scan(self, call: ast.Call) -> Scan:
        """Return "": loops of TensorFlow in a step have batches of their own."""
        del call
        return ""

    def repeats(self, call: ast.Call) -> bool:
        """Return False: TensorFlow has no such loops."""
        del call
        return False

    def computes(self, call: ast.Call) -> bool:
        """Return True if the called object belongs to a framework."""
        value = self._namespace.get(root_name(call.func))
        if isinstance(value, ModuleType):
            return value.__name__.split(".")[0] in _FRAMEWORKS
        if isinstance(value, FunctionType):
            return False
        return type(value).__module__.split(".")[0] in _FRAMEWORKS

    def takes_next(self, call: ast.Call) -> bool:
        """Return True if the call takes the next item of an iterator, itself or in a function."""
        match call.func:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _NEXT:
                return True
        key = f"next {ast.unparse(call.func)}"
        if key not in self._visited:
            self._visited[key] = False  # a recursion ends here
            nodes = (node for function in self._functions(call) for node in ast.walk(function))
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            self._visited[key] = any(map(self.takes_next, calls))
        return self._visited[key]

    def definitions(self, name: str) -> Sequence[ast.AST]:
        """Return the definitions of the function or class of the user behind a name."""
        return self._defined.get(name) or [*tree_of(self._namespace.get(name))]

    def is_metric(self, call: ast.Call) -> bool:
        """Return True if the call updates a metric: `m.update_state(...)`, or `m(...)`."""
        if isinstance(call.func, ast.Attribute) and call.func.attr == "update_state":
            return True
        keras = sys.modules.get("keras")
        if keras is None:
            return False
        return isinstance(self._value(call.func), keras.metrics.Metric)

    def is_input(self, call: ast.Call, outside: set[str], *, is_first: bool) -> bool:
        """Return True for draws, and for arrays of values of the loop.

        A compiled step cannot make them. It compiles other calls.
        """
        return is_first and (self._converts_draw(call) or _converts(call, outside))

    def _converts_draw(self, call: ast.Call) -> bool:
        """Return True for a draw, a method of its result, or its conversion to an array."""
        if self.draws(call):
            return True
        parts = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        parts += call.args if ast.unparse(call.func) in _OF_DRAWS else []
        return any(self._converts_draw(part) for part in parts if isinstance(part, ast.Call))

    def _value(self, node: ast.expr) -> Any:
        """Return the object behind a name or an attribute of one; None if it is unknown."""
        return value_of(node, self._namespace)


def value_of(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """Return the object behind a name or an attribute of one; None if it is unknown.

    Properties are not evaluated. Fields of a named tuple are.
    """
    if isinstance(node, ast.Name):
        return namespace.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, namespace)
        of = getattr if isinstance(owner, tuple) else inspect.getattr_static
        return None if owner is None else of(owner, node.attr, None)
    return None


def _converts(call: ast.Call, outside: set[str]) -> bool:
    """Return True for a call such as `tf.constant(x)` of a value that the loop binds."""
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    return ast.unparse(call.func) in _CONVERSIONS and bool(names & outside)


def _other_name(value: ast.expr) -> str:
    """Return the name of a function that gets another: `f`, `self.f`, `fs["f"]`, `jax.jit(f)`."""
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=container):
            return _other_name(container)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[inner, *_]) if (
            name in _WRAPPERS
        ):
            return _other_name(inner)
    return ""


def _function_of(value: ast.Lambda, name: str) -> ast.FunctionDef:
    """Return a lambda as a function with a name."""
    body: list[ast.stmt] = [ast.copy_location(ast.Return(value.body), value.body)]
    return ast.copy_location(ast.FunctionDef(name, value.args, body, []), value)


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and is_users(value.__module__)


def _file_of(name: str) -> str | None:
    """Return the file of a module. It imports nothing, not even the package of the module."""
    folders: Sequence[str] | None = None
    origin = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = import_hooks.find_spec(".".join(parts[:end]), folders)
        if spec is None:
            return None
        origin, folders = spec.origin, spec.submodule_search_locations or ()
    return origin


def tree_of(value: Any) -> Iterator[ast.AST]:
    """Yield the definition of a function or class of the user.

    A callable object is the method `__call__` of its class, and a dict or list is its functions.
    """
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        for part in itertools.islice(parts, _MOST_FUNCTIONS):
            if callable(part):
                yield from tree_of(part)
        return
    value = getattr(value, "func", value) if isinstance(value, functools.partial) else value
    value = getattr(value, "python_function", value)  # of tf.function
    value = inspect.unwrap(value) if callable(value) else value
    if not isinstance(value, (FunctionType, MethodType, type)):
        value = getattr(vars(type(value)).get("__call__"), "python_function", None) or vars(
            type(value)
        ).get("__call__")
    if isinstance(value, MethodType):
        value = value.__func__
    if not isinstance(value, (FunctionType, type)) or not is_users(value.__module__):
        return
    try:
        if value.__name__ == "<lambda>":  # its line may be a part of a statement
            yield from _lambdas_of(value)
            return
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError, SyntaxError):
        return
    yield from tree.body


def _lambdas_of(function: FunctionType | type) -> Iterator[ast.AST]:
    """Yield the lambdas on the line of a lambda."""
    lines, first = inspect.findsource(function)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Lambda) and node.lineno == first + 1:
            yield node
