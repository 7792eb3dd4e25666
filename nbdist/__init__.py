"""Train on many machines from one notebook.

In a notebook: `%load_ext nbdist`, `%dist_start 4 hosts`, `%%dist_run`.
In Python: `with nbdist.Cluster(hosts=4) as cluster: run = cluster.run(cell)`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from nbdist.errors import (
    CellError,
    LeftError,
    NbdistError,
    NoClusterError,
    OwnedError,
    StartError,
    StepError,
    StrategyError,
    TransferError,
    UsageError,
    WorkerError,
)

if TYPE_CHECKING:
    from nbdist.kept import runs
    from nbdist.magics import load_ipython_extension, unload_ipython_extension
    from nbdist.placing.autoplace import autoplace
    from nbdist.placing.devices import devices
    from nbdist.placing.meshes import meshes
    from nbdist.placing.pipelined import pipelined
    from nbdist.placing.place import place
    from nbdist.placing.stages import stages
    from nbdist.placing.where import where
    from nbdist.records import Batch, Host
    from nbdist.result import Run
    from nbdist.session import Cluster
    from nbdist.takeover import attach
    from nbdist.worker.pjrt_strategy import PjRTStrategy

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CellError",
    "Cluster",
    "Host",
    "LeftError",
    "NbdistError",
    "NoClusterError",
    "OwnedError",
    "PjRTStrategy",
    "Run",
    "StartError",
    "StepError",
    "StrategyError",
    "TransferError",
    "UsageError",
    "WorkerError",
    "attach",
    "autoplace",
    "devices",
    "load_ipython_extension",
    "meshes",
    "pipelined",
    "place",
    "runs",
    "stages",
    "unload_ipython_extension",
    "where",
]

_HOME = {
    "PjRTStrategy": "nbdist.strategies",
    "Batch": "nbdist.records",
    "Cluster": "nbdist.session",
    "Host": "nbdist.records",
    "Run": "nbdist.result",
    "attach": "nbdist.takeover",
    "autoplace": "nbdist.placing.autoplace",
    "devices": "nbdist.placing.devices",
    "meshes": "nbdist.placing.meshes",
    "pipelined": "nbdist.placing.pipelined",
    "place": "nbdist.placing.place",
    "stages": "nbdist.placing.stages",
    "where": "nbdist.placing.where",
    "runs": "nbdist.kept",
    "_jupyter_server_extension_points": "nbdist.server",
    "load_ipython_extension": "nbdist.magics",
    "unload_ipython_extension": "nbdist.magics",
}


def __getattr__(name: str) -> Any:
    """Load what needs ipyparallel or JAX when it is first used, not on import (PEP 562)."""
    if name in _HOME:
        home = _HOME[name]
        if home.startswith("nbdist.placing") and importlib.util.find_spec("jax") is None:
            raise UsageError(f'nbdist.{name} needs JAX: type %pip install "nbdist[jax]"')
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
