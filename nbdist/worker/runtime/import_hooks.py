"""Imports by cells: patches of libraries, and random generators that an import leaves unchanged."""

from __future__ import annotations

import functools
import random
import sys
import threading
from abc import ABC, abstractmethod
from importlib.machinery import PathFinder, SourceFileLoader
from typing import TYPE_CHECKING, Any

import numpy as np
import wrapt

from nbdist.utils.installed import is_users_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from _typeshed.importlib import MetaPathFinderProtocol


def once_imported(name: str, do: Callable[[], None]) -> None:
    """Call `do` now if the module is loaded, else right after its first import.

    An exception of `do` is then raised by the import.
    """
    if name in sys.modules:
        do()
    else:
        wrapt.register_post_import_hook(lambda _module: do(), name)


def keep_generators() -> None:
    """Keep the generators of Python and NumPy unchanged when an installed package is imported.

    Some packages draw random numbers at their import, for example `rich`, which Keras imports. A
    worker may have imported a package already, as after a restart. Without this function, the same
    cells would then draw other numbers. A module of the user may draw or set a seed.
    """
    _find_first(_InstalledPackages())


def after_imports_of_users(do: Callable[[ModuleType], None]) -> None:
    """Call `do` after each import or reload of a module of the user."""
    _find_first(_UsersModules(do))


def search_first(finder: MetaPathFinderProtocol) -> None:
    """Let a finder search before the folders of `sys.path`. The hooks above see its modules too."""
    _before_path.append(finder)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)


def find_spec(
    name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """Find a module with a file. See `importlib.abc.MetaPathFinder.find_spec`."""
    for finder in _before_path:
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, path, target)


_before_path: list[MetaPathFinderProtocol] = []


def _find_first(finder: _Finder) -> None:
    """Let a finder search before the others, unless one of its kind does already."""
    if not any(type(other) is type(finder) for other in sys.meta_path):
        sys.meta_path.insert(0, finder)


class _Finder(ABC):
    """Finder of some modules with a source file, whose code it runs by `run`."""

    @abstractmethod
    def wants(self, name: str, path: str) -> bool:
        """Return True for the name and the file of such a module."""

    @abstractmethod
    def run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Run the code of a module by the function of its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module. See `importlib.abc.MetaPathFinder.find_spec`."""
        spec = find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if not self.wants(name, spec.origin or ""):
            return None
        loader: Any = spec.loader
        loader.exec_module = functools.partial(self.run, loader.exec_module)
        return spec


class _UsersModules(_Finder):
    """Finder of the user's modules.

    Args:
        do: receives each module after its code has run.
    """

    def __init__(self, do: Callable[[ModuleType], None]) -> None:
        self._do = do

    def wants(self, name: str, path: str) -> bool:
        return is_users_file(name, path)

    def run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        self._do(module)


class _InstalledPackages(_Finder):
    """Finder of the packages of this environment. Their import keeps the generators."""

    def __init__(self) -> None:
        self._keeps = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module, unless the import of another one keeps the generators already."""
        if self._keeps or threading.current_thread() is not threading.main_thread():
            return None
        return super().find_spec(name, path, target)

    def wants(self, name: str, path: str) -> bool:
        return not is_users_file(name, path)

    def run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        python, numpy = random.getstate(), np.random.get_state()
        self._keeps = True
        try:
            exec_module(module)
        finally:
            self._keeps = False
            random.setstate(python)
            np.random.set_state(numpy)
