"""Reload of the user's own modules after an edit, before the next cell runs.

Functions and classes change in place, as with IPython's `%autoreload 2`. Names of the notebook and
of other modules that referred to objects of the module then refer to the new ones.
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from IPython.extensions.autoreload import superreload

from nbdist.worker.own_modules.finder import OwnLoader, install

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.worker.own_modules.finder import ModuleText

_CONSTANTS = (int, float, complex, str, bytes, type(None), tuple, frozenset, list, dict, set)
"""Types of values that a name refers to anew; objects with a state, such as models, stay."""

_old_objects: dict[Any, Any] = {}
"""Earlier functions and classes of each module, which `superreload` also updates."""

_from_imports: dict[str, tuple[str, str]] = {}
"""Names of the notebook that `from m import a as b` binds: module and name there."""

_failed: dict[str, str] = {}
"""Digest of the text of each module whose reload failed."""


def note_imports(cell: ast.Module) -> None:
    """Note the names that a cell imports from modules, and forget those that it assigns."""
    for node in ast.walk(cell):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            _from_imports.pop(node.id, None)
    _from_imports.update(_names_from_modules(cell, ""))


def reload_changed(namespace: dict[str, Any]) -> tuple[str, ...]:
    """Reload the loaded modules whose text has changed, each after those that it imports.

    Args:
        namespace: the user's namespace.

    Returns:
        Modules that keep an earlier text, because a reload with their text has failed before.

    Raises:
        BaseException: any error of a module. It keeps its earlier text and objects.
    """
    finder = install()
    changed: dict[str, ModuleText] = {}
    for name, _, text in finder.loaded():
        if finder.texts[name].digest != text.digest:
            changed[name] = finder.texts[name]
        else:
            _failed.pop(name, None)
    stale = tuple(name for name, text in changed.items() if _failed.get(name) == text.digest)
    for name in stale:
        del changed[name]
    for name, text in changed.items():
        _checked(name, text)
    if changed:
        _forget_compiled(namespace)
    for name in _ordered(changed):
        _reload(sys.modules[name], changed[name], namespace)
    return stale


def _forget_compiled(namespace: Mapping[str, Any]) -> None:
    """Let the frameworks, and `fit` of Keras models, trace functions again."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "tensorflow" in sys.modules:
        _forget_traces(type(sys.modules["tensorflow"].function(len)))
    if "keras" in sys.modules:
        spaces = (namespace, *(vars(module) for _, module, _ in install().loaded()))
        for model in {id(v): v for space in spaces for v in space.values()}.values():
            if isinstance(model, sys.modules["keras"].Model):
                model.train_function = model.test_function = model.predict_function = None


def _forget_traces(kind: Any) -> None:
    """Clear the traces of all functions of `tf.function`. Their variables stay."""
    found: Any
    for found in gc.get_objects():
        if type(found) is kind:
            found._function_cache.clear()


def _checked(name: str, text: ModuleText) -> None:
    """Raise the error of a text that is no Python, before any module changes."""
    try:
        OwnLoader(text).get_code(name)
    except (SyntaxError, ValueError):
        _failed[name] = text.digest
        raise


def _ordered(changed: Mapping[str, ModuleText]) -> list[str]:
    """Return the names of modules, each after those that it imports."""
    order: dict[str, None] = {}
    begun: set[str] = set()

    def visit(name: str) -> None:
        if name in begun:
            return
        begun.add(name)
        for imported in _imported(changed[name]):
            if imported in changed:
                visit(imported)
        order[name] = None

    for name in sorted(changed):
        visit(name)
    return list(order)


def _imported(text: ModuleText) -> Iterator[str]:
    """Yield the full names of the modules that a module imports, also possible ones."""
    package = text.name if text.is_package else text.name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text.text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
    for module, name in _names_from_modules(ast.parse(text.text), package).values():
        yield from (module, f"{module}.{name}")
    yield package


def _reload(module: ModuleType, text: ModuleText, namespace: dict[str, Any]) -> None:
    before = dict(vars(module))
    try:
        superreload(module, reload=_reloaded, old_objects=_old_objects)
    except BaseException as error:
        vars(module).clear()
        vars(module).update(before)
        if isinstance(error, Exception):  # after an interrupt, the next cell reloads it
            _failed[text.name] = text.digest
        raise
    for name, value in before.items():  # `superreload` removes the submodules of a package
        if isinstance(value, ModuleType) and value is sys.modules.get(f"{text.name}.{name}"):
            vars(module).setdefault(name, value)
    _rebind(before, vars(module), namespace)


def _reloaded(module: ModuleType) -> ModuleType:
    """Reload a module. Prepare its earlier functions that cannot receive the new code.

    `superreload` replaces the code of a function, which needs the same free variables.
    """
    fresh = importlib.reload(module)
    for (name, attribute), references in _old_objects.items():
        if name != module.__name__:
            continue
        new = vars(fresh).get(attribute)
        for reference in list(references):
            old = reference()
            if isinstance(old, FunctionType) and not _has_same_form(old, new):
                references.remove(reference)
            elif isinstance(old, type) and isinstance(new, type):
                _replace_methods(old, new)
    return fresh


def _has_same_form(old: Any, new: Any) -> bool:
    if not isinstance(old, FunctionType) or not isinstance(new, FunctionType):
        return True
    return old.__code__.co_freevars == new.__code__.co_freevars


def _replace_methods(old: type, new: type) -> None:
    """Replace the methods of a class that have other free variables than before.

    `super()` needs `__class__`: the replacement refers to the old class.
    """
    for name, method in list(vars(new).items()):
        if _has_same_form(vars(old).get(name), method) or name not in vars(old):
            continue
        cells = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
        closure = tuple(CellType(old) if free == "__class__" else cell for free, cell in cells)
        replacement = FunctionType(
            method.__code__, method.__globals__, name, method.__defaults__, closure
        )
        replacement.__kwdefaults__ = method.__kwdefaults__
        setattr(old, name, replacement)


def _rebind(before: Mapping[str, Any], after: Mapping[str, Any], namespace: dict[str, Any]) -> None:
    """Let names that refer to old objects of a module refer to the new ones.

    Functions and classes are found under any name. Other values need an import of the name,
    because Python shares equal constants.
    """
    pairs = {
        name: (old, after[name])
        for name, old in before.items()
        if name in after and old is not after[name] and not name.startswith("__")
    }
    by_id = {id(old): new for old, new in pairs.values() if _is_definition(old)}
    spaces = [(namespace, _from_imports)]
    for _, module, text in install().loaded():
        if vars(module) is not after:
            package = text.name if text.is_package else text.name.rpartition(".")[0]
            spaces.append((vars(module), _names_from_modules(ast.parse(text.text), package)))
    for names, imported in spaces:
        for name, value in list(names.items()):
            origin, attribute = imported.get(name, ("", ""))
            if id(value) in by_id:
                names[name] = by_id[id(value)]
            elif origin == after["__name__"] and attribute in pairs:
                old, new = pairs[attribute]
                if value is old and isinstance(old, _CONSTANTS):
                    names[name] = new


def _names_from_modules(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    """Return the names that `from m import a as b` binds, with the full name of the module.

    Args:
        tree: code.
        package: package of the code, for relative imports.
    """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            parts = [*(above if node.level else ()), *filter(None, [node.module])]
            for alias in node.names:
                found[alias.asname or alias.name] = (".".join(parts), alias.name)
    return found


def _is_definition(value: Any) -> bool:
    """Return True for a function or a class, also a compiled function."""
    return isinstance(value, type) or (
        callable(value)
        and any(name in dir(value) for name in ("__code__", "__wrapped__", "python_function"))
    )
