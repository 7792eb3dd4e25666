"""Training loops in the user's own modules, whose steps run on all replicas."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.worker.lifting import rewritten_loops
from nbdist.worker.lifting.definitions import replace_code
from nbdist.worker.own_modules.finder import OwnLoader
from nbdist.worker.runtime import context, import_hooks
from nbdist.worker.runtime.user_modules import behind

if TYPE_CHECKING:
    from types import ModuleType

    from nbdist.records import StrategyName

_lifted: set[tuple[str, StrategyName]] = set()
"""Names of modules that have been searched for loops, each with the strategy."""


def lift_modules(namespace: dict[str, Any], strategy: StrategyName) -> None:
    """Rewrite the loops of the modules that a namespace uses, and of later imports.

    Args:
        namespace: the user's namespace.
        strategy: strategy of the cell.
    """
    import_hooks.after_imports_of_users(_lift_imported)
    for module in behind(list(namespace.values())):
        if (module.__name__, strategy) not in _lifted:
            _lift(module, strategy)


def _lift_imported(module: ModuleType) -> None:
    """Rewrite the loops of a module right after its import or reload, if the cell can lift them."""
    for known in [known for known in _lifted if known[0] == module.__name__]:
        _lifted.discard(known)
    worker = context.if_any()
    if worker is not None and worker.strategy is not None and not worker.request.options.no_lift:
        _lift(module, worker.strategy)


def _lift(module: ModuleType, strategy: StrategyName) -> None:
    _lifted.add((module.__name__, strategy))
    try:
        path, source = _source(module)
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    changed = rewritten_loops.rewritten(tree, source, vars(module), strategy, Path(path).name)
    if changed is not None:
        own = [value for value in vars(module).values() if _is_defined_in(value, module)]
        replace_code(own, compile(changed, path, "exec", dont_inherit=True))


def _source(module: ModuleType) -> tuple[str, str]:
    """Return the path that the code of a module names, and its text.

    Raises:
        OSError: the module has no file of Python.
    """
    loader = vars(module).get("__loader__")
    if isinstance(loader, OwnLoader):
        return loader.module.source, loader.get_source(module.__name__)
    path = inspect.getsourcefile(module)
    if path is None:
        raise FileNotFoundError(module.__name__)
    return path, Path(path).read_text(encoding="utf-8")


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__
