"""Imports by cells: patches of libraries, and random generators that an import leaves unchanged."""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
import threading
from importlib.machinery import PathFinder, SourceFileLoader
from typing import TYPE_CHECKING, Any

import numpy as np
import wrapt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


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
    if not any(isinstance(finder, _InstalledPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _InstalledPackages())


class _InstalledPackages:
    """Finder of the packages of this environment. Their import keeps the generators."""

    def __init__(self) -> None:
        self._folders = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
        self._keeps = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module. See `importlib.abc.MetaPathFinder.find_spec`."""
        if self._keeps or threading.current_thread() is not threading.main_thread():
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if not (spec.origin or "").startswith(self._folders):
            return None
        loader: Any = spec.loader
        loader.exec_module = functools.partial(self._import, loader.exec_module)
        return spec

    def _import(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        python, numpy = random.getstate(), np.random.get_state()
        self._keeps = True
        try:
            exec_module(module)
        finally:
            self._keeps = False
            random.setstate(python)
            np.random.set_state(numpy)
