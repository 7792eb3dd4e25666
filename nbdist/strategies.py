"""Strategies by name. A strategy's framework is imported at its first use.

The notebook's kernel never imports JAX: it gets a class that explains where to create a strategy.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NoReturn

from nbdist.errors import StrategyError
from nbdist.views.surface import in_notebook


class _ForWorkers:
    """Placeholder of `PjRTStrategy` in the notebook's kernel: the kernel has no devices."""

    def __init__(self, *_: object, **__: object) -> NoReturn:
        raise StrategyError(
            "PjRTStrategy works only on the workers, and this cell runs in the notebook's kernel: "
            "begin the cell with %%dist_run --strategy pjrt (workers: %dist_start 4 hosts)"
        )


def __getattr__(name: str) -> Any:
    if name != "PjRTStrategy":
        raise AttributeError(f"module 'nbdist.strategies' has no attribute {name!r}")
    if in_notebook():
        return _ForWorkers
    if importlib.util.find_spec("jax") is None:
        raise StrategyError('PjRTStrategy needs JAX: run %pip install "nbdist[jax]"')
    return importlib.import_module("nbdist.worker.jax.strategy").PjRTStrategy
