"""Train on many machines from one notebook.

In a notebook: `%load_ext nbdist`, `%dist_start 4 hosts`, `%%dist_run`.
In Python: `with nbdist.Cluster(hosts=4) as cluster: run = cluster.run(cell)`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from nbdist._version import __version__ as __version__
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
    from nbdist.execution.alerts import on_alert
    from nbdist.execution.result import Run
    from nbdist.execution.saved_runs import runs
    from nbdist.magics.extension import load_ipython_extension as load_ipython_extension
    from nbdist.magics.extension import unload_ipython_extension as unload_ipython_extension
    from nbdist.parallel.autoplace.decorator import autoplace
    from nbdist.parallel.pipeline.stacked_layers import pipelined
    from nbdist.parallel.pipeline.stages import stages
    from nbdist.parallel.placement.devices import devices
    from nbdist.parallel.placement.meshes import meshes
    from nbdist.parallel.placement.place import place
    from nbdist.parallel.placement.where import where
    from nbdist.records import Batch, Host, Sync
    from nbdist.session.cluster import Cluster
    from nbdist.session.discovery import attach
    from nbdist.session.submission import job
    from nbdist.worker.export.model_export import export
    from nbdist.worker.jax.strategy import PjRTStrategy
    from nbdist.worker.script.job import script

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
    "Sync",
    "TransferError",
    "UsageError",
    "WorkerError",
    "attach",
    "autoplace",
    "devices",
    "export",
    "job",
    "meshes",
    "on_alert",
    "pipelined",
    "place",
    "runs",
    "script",
    "stages",
    "where",
]

_HOME = {  # also the hooks of IPython and Jupyter; they are not part of the API
    "PjRTStrategy": "nbdist.strategies",
    "Batch": "nbdist.records",
    "Cluster": "nbdist.session.cluster",
    "Host": "nbdist.records",
    "Run": "nbdist.execution.result",
    "Sync": "nbdist.records",
    "attach": "nbdist.session.discovery",
    "autoplace": "nbdist.parallel.autoplace.decorator",
    "export": "nbdist.worker.export.model_export",
    "devices": "nbdist.parallel.placement.devices",
    "job": "nbdist.session.submission",
    "meshes": "nbdist.parallel.placement.meshes",
    "on_alert": "nbdist.execution.alerts",
    "pipelined": "nbdist.parallel.pipeline.stacked_layers",
    "place": "nbdist.parallel.placement.place",
    "stages": "nbdist.parallel.pipeline.stages",
    "where": "nbdist.parallel.placement.where",
    "runs": "nbdist.execution.saved_runs",
    "script": "nbdist.worker.script.job",
    "_jupyter_server_extension_points": "nbdist.server",
    "load_ipython_extension": "nbdist.magics.extension",
    "unload_ipython_extension": "nbdist.magics.extension",
}


def __dir__() -> list[str]:
    """List all public names for completion, also those that are not loaded yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import the module of a public name at first use (PEP 562).

    `import nbdist` stays fast: it imports neither ipyparallel nor JAX.
    """
    if name in _HOME:
        home = _HOME[name]
        if home.startswith("nbdist.parallel") and importlib.util.find_spec("jax") is None:
            raise UsageError(f'nbdist.{name} needs JAX: run %pip install "nbdist[jax]"')
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
