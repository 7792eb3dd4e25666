"""Setup of a new engine: calls of the session through ipyparallel's `apply`.

Each call imports the modules of the frameworks that it needs. An engine without JAX thus never
imports nbdist's modules for JAX.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import socket
import sys
from typing import TYPE_CHECKING

from nbdist.private_api import jax as private_jax
from nbdist.private_api import tensorflow as private_tensorflow
from nbdist.records import RANK_VARIABLE, WorkerHello
from nbdist.utils import host_topology
from nbdist.worker import cell_runner, watchdog
from nbdist.worker.keras import backend as keras_backend
from nbdist.worker.own_modules import finder
from nbdist.worker.runtime import context, gloo_connections, import_hooks, seeding
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from nbdist.records import (
        Agreement,
        CollectiveState,
        Device,
        Framework,
        MirroredWiring,
        PjrtWiring,
        Restored,
        StrategyName,
        Survey,
        WorkerIdentity,
    )

_PACKAGES = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax",)}


def hello(frameworks: tuple[Framework, ...]) -> WorkerHello:
    """Return the identity of this engine and the versions of its packages."""
    versions = {"python": platform.python_version()}
    for framework in frameworks:
        for package in _PACKAGES[framework]:
            versions[package] = importlib.metadata.version(package)
    rank = int(os.environ[RANK_VARIABLE])
    return WorkerHello(rank=rank, host=socket.gethostname(), pid=os.getpid(), versions=versions)


def load(modules: tuple[str, ...]) -> None:
    """Import the modules that the other ranks have imported, on a replacement for a rank."""
    keras_backend.decide_at_import()
    for name in modules:
        with contextlib.suppress(Exception):  # the cell raises the error again when it runs
            importlib.import_module(name)


def take_place(env: dict[str, str], cores: tuple[int, ...]) -> None:
    """Configure a spare engine, forked without a rank, like the engine of a rank."""
    os.environ.update(env)
    if cores:
        os.sched_setaffinity(0, cores)
    else:
        host_topology.bind_to_gpus()


def become(identities: dict[int, WorkerIdentity]) -> None:
    """Assign the rank: from now on output goes to the notebook, and cells can run."""
    identity = identities[int(os.environ[RANK_VARIABLE])]
    worker = context.become(identity)
    namespace = {
        "rank": worker.rank,
        "world_size": worker.world_size,
        "report": worker.reporter.report,
    }
    engine_shell().push(namespace, interactive=False)
    # ipykernel's own `exit` would end an engine that the notebook still uses.
    engine_shell().push({"exit": sys.exit, "quit": sys.exit}, interactive=False)
    seed(identity.seed)
    keras_backend.decide_at_import()
    finder.install()
    host_topology.choose_interface(identity.address)
    watchdog.watch(worker, identity.dispatch)
    cell_runner.take_cells(identity.dispatch)


def seed(number: int) -> None:
    """Seed every random generator of this process."""
    seeding.seed_generators(seeding.ClusterSeed(number))
    import_hooks.once_imported("tensorflow", _keep_seeds_of_operations)


def _keep_seeds_of_operations() -> None:
    if private_tensorflow.SEEDS.is_supported("operations with a seed draw other numbers"):
        from nbdist.worker.tensorflow.runtime import operation_seed

        operation_seed.apply()


def reserve_port() -> int:
    """Find and hold a port for TensorFlow's server."""
    _import_tensorflow()
    private_tensorflow.MIRRORED.check()
    from nbdist.worker.tensorflow import strategy as tensorflow_strategy

    return tensorflow_strategy.reserve_port()


def build_mirrored(wiring: dict[int, MirroredWiring]) -> tuple[Device, ...]:
    """Build MultiWorkerMirroredStrategy. Call it on all ranks at once."""
    _import_tensorflow()
    from nbdist.worker.tensorflow import strategy as tensorflow_strategy

    devices = tensorflow_strategy.build(wiring[context.current().rank])
    watchdog.install_sigterm_handler(context.current())
    _prepare_keras()
    _offer("mirrored")
    return devices


def survey_mirrored() -> Survey | None:
    """Describe TensorFlow's variables; `reopen_mirrored` and `restore_mirrored` follow.

    Returns:
        None on a replacement for a rank: TensorFlow's strategy must be built again.
    """
    if "mirrored" not in context.current().strategies:
        return None
    from nbdist.worker.tensorflow import variable_recovery

    return variable_recovery.survey()


def reopen_mirrored(key: int) -> None:
    """Give TensorFlow new collectives; the instance key is the same on all ranks."""
    from nbdist.worker.tensorflow import strategy as tensorflow_strategy

    tensorflow_strategy.reopen(key)


def restore_mirrored(agreements: tuple[Agreement, ...]) -> Restored:
    """Restore equal variables on all ranks. Call it on all ranks at once."""
    from nbdist.worker.tensorflow import strategy as tensorflow_strategy
    from nbdist.worker.tensorflow import variable_recovery

    tensorflow_strategy.prove()
    return variable_recovery.adopt(agreements[context.current().rank])


def build_pjrt(wiring: dict[int, PjrtWiring]) -> tuple[Device, ...]:
    """Connect JAX's processes and create the mesh. Call it on all ranks at once."""
    private_jax.PJRT.check()
    from nbdist.worker.jax import backend as jax_backend

    devices = jax_backend.build(wiring[context.current().rank])
    _prepare_keras()
    _offer("pjrt")
    engine_shell().push({"mesh": context.current().strategies["pjrt"].mesh}, interactive=False)
    return devices


def _import_tensorflow() -> None:
    """Import TensorFlow without Keras if a cell will choose the backend."""
    if keras_backend.VARIABLE not in os.environ:
        importlib.import_module("nbdist.worker.tensorflow.without_keras")


def leave_pjrt() -> None:
    """Disconnect JAX's processes; `build_pjrt` and `put_back_pjrt` follow."""
    from nbdist.worker.jax import backend as jax_backend

    jax_backend.leave()


def put_back_pjrt() -> tuple[str, ...]:
    """Restore the arrays after `leave_pjrt`; return the names of those that are lost."""
    from nbdist.worker.jax import backend as jax_backend

    return jax_backend.put_back()


_BACKENDS: dict[StrategyName, str] = {
    "mirrored": "nbdist.worker.tensorflow.strategy",
    "pjrt": "nbdist.worker.jax.backend",
}


def collective_states(strategies: tuple[StrategyName, ...]) -> dict[StrategyName, CollectiveState]:
    """Return the state of each strategy's collectives on this rank after earlier cells."""
    found: dict[StrategyName, CollectiveState] = {}
    for name in context.current().strategies.keys() & set(strategies):
        module = importlib.import_module(_BACKENDS[name])
        found[name] = module.collective_state()
    return found


def peer_ports() -> set[int]:
    """Return the remote ports of this process's connections."""
    return gloo_connections.peer_ports()


def forget(names: tuple[str, ...]) -> None:
    """Remove names from the user's namespace after another rank has lost their values."""
    for name in names:
        engine_shell().user_ns.pop(name, None)


def _offer(name: StrategyName) -> None:
    """Bind `strategy` to the first strategy that was built, until a cell requests another."""
    context.current().end_cell()  # output of the libraries so far belongs to no cell
    strategies = context.current().strategies
    if len(strategies) == 1:
        engine_shell().push({"strategy": strategies[name]}, interactive=False)


def _prepare_keras() -> None:
    """Patch Keras's `fit` to report to the notebook, once a cell imports Keras."""
    import_hooks.once_imported("keras", _prepare_imported_keras)


def _prepare_imported_keras() -> None:
    from nbdist.worker.fit import callback as fit_callback

    fit_callback.apply()
