"""Strategies by name, and none of their frameworks until one is named.

The notebook's kernel gets a stand-in that says where to make one: it never imports JAX.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NoReturn

from nbdist.errors import StrategyError
from nbdist.views.surface import in_notebook


class _ForWorkers:
    """`PjRTStrategy` in the notebook's kernel, which holds no devices."""

    def __init__(self, *_: object, **__: object) -> NoReturn:
        raise StrategyError(
            "PjRTStrategy is made on the workers, and this cell runs in the notebook's kernel: "
            "begin the cell with %%dist_run --strategy pjrt (workers: %dist_start 4 hosts)"
        )


def __getattr__(name: str) -> Any:
    if name != "PjRTStrategy":
        raise AttributeError(f"module 'nbdist.strategies' has no attribute {name!r}")
    if in_notebook():
        return _ForWorkers
    if importlib.util.find_spec("jax") is None:
        raise StrategyError('PjRTStrategy needs JAX: type %pip install "nbdist[jax]"')
    return importlib.import_module("nbdist.worker.jax.strategy").PjRTStrategy
