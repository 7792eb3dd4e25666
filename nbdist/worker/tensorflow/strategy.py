"""MultiWorkerMirroredStrategy on one rank.

The private calls of TensorFlow's runtime that the product leans on are all here:
`tensorflow.python.eager.context._reset_context`, the state of its context, `abort_collective_ops`,
`enable_collective_ops`, the instance keys of collectives, and the threads of eager replicas.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, mirrored_run
from tensorflow.python.eager import context

from nbdist.records import CollectiveState, Device
from nbdist.worker.checkpoint.digest import of_keys
from nbdist.worker.runtime import context as runtime_context
from nbdist.worker.runtime import import_hooks
from nbdist.worker.tensorflow import dataset_shuffle, running_strategy, variable_scalars
from nbdist.worker.tensorflow.replica import summed_variables
from nbdist.worker.tensorflow.saving import coordination as saving
from nbdist.worker.tensorflow.saving import tensorflow_patch as tensorflow_save_patch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Communication, MirroredWiring

_CANCEL_S = 5.0

_held_ports: list[socket.socket] = []


def reserve_port() -> int:
    """Find a free port and keep it until the strategy is built.

    The socket is bound and never listens. TensorFlow's server may bind the same port because
    both ask for SO_REUSEPORT (`TF_GRPC_REUSE_PORT=1`); a stranger cannot.

    Returns:
        The port's number.
    """
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("::", 0))
    _held_ports.append(held)
    port: int = held.getsockname()[1]
    return port


def build(wiring: MirroredWiring) -> tuple[Device, ...]:
    """Build the strategy together with all other ranks; blocks until they are there.

    An op that ran before (in a startup file, say) would make TensorFlow refuse with "Collective
    ops must be configured at program startup": the context it made is dropped first. Variables
    and datasets made before are lost by that.

    Returns:
        The devices that this rank's replicas run on.
    """
    worker = runtime_context.current()
    os.environ["TF_CONFIG"] = wiring.tf_config
    if worker.strategies.pop("mirrored", None) is not None or _context_exists():
        _reset_context()
    _grow_gpu_memory()
    import_hooks.once_imported("keras", _patch_keras)
    running_strategy.apply()
    dataset_shuffle.apply()
    tensorflow_save_patch.apply()
    variable_scalars.apply()
    summed_variables.apply()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=_options(wiring.communication)
    )
    while _held_ports:
        _held_ports.pop().close()
    _connect_saves(strategy, wiring.tf_config, worker)
    worker.strategies["mirrored"] = strategy
    worker.broken.discard("mirrored")
    worker.collective_keys = _digest_of_keys
    worker.memory.device_bytes = device_bytes
    return _devices()


def _patch_keras() -> None:
    if sys.modules["keras"].backend.backend() == "tensorflow":
        from nbdist.worker.tensorflow.keras import fit_patch
        from nbdist.worker.tensorflow.saving import keras_patch as keras_save_patch

        fit_patch.apply()
        keras_save_patch.apply()


def abort_collectives() -> None:
    """Whoever waits in a collective gets an error; no other works before `reopen`. Any thread."""
    context.context().abort_collective_ops(tf.errors.ABORTED, "broken off by nbdist")


def next_key() -> int:
    """An instance key that no collective of this rank has used."""
    return max(max(keys.values()) for keys in _instance_keys().values())


def reopen(key: int) -> None:
    """Give the context new collectives in the place of those that were broken off.

    TensorFlow's server takes the definition that it runs with once more: it keeps its port, devices
    and resources, and makes another executor of collectives. Variables, datasets, functions and the
    strategy stay valid. `prove` comes next, once all ranks have done this: a request that reaches a
    rank's old executor would fail.

    An interrupt frees the main thread from an eager collective, and leaves it to a thread of
    TensorFlow's, which still waits: it is cancelled first.

    Args:
        key: the first instance key from here on, the same on all ranks. It is one that no rank has
            used, so that a late request of the old collectives meets none of the new ones.

    Raises:
        RuntimeError: a collective does not end.
    """
    abort_collectives()
    deadline = time.monotonic() + _CANCEL_S
    while _in_collective():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a cancelled collective has not ended within {_CANCEL_S:g} s")
        time.sleep(0.01)
    running = context.context()
    with _without_warnings():
        running.enable_collective_ops(running._collective_ops_server_def)
    for keys in _instance_keys().values():
        keys.update(dict.fromkeys(keys, key))
    runtime_context.current().broken.discard("mirrored")


def prove() -> None:
    """Make one all-reduce; every rank has to be asked at once."""
    with _without_warnings():
        _prove_collectives(runtime_context.current().strategies["mirrored"])


def collective_state() -> CollectiveState:
    """What earlier cells have left of collectives on this rank.

    A replica that runs eagerly has a thread of its own, which an interrupt does not reach. The
    keys by which collectives of different ranks find each other are counted on each rank.
    """
    strategy = runtime_context.current().strategies["mirrored"]
    replica = mirrored_run._MirroredReplicaThread
    replicas = [thread for thread in threading.enumerate() if isinstance(thread, replica)]
    return CollectiveState(
        under_way=any(thread.distribution is strategy for thread in replicas),
        keys=_digest_of_keys(),
    )


def device_bytes() -> list[int]:
    """In use on each of this rank's GPUs; TensorFlow does not count a CPU's."""
    gpus = range(len(tf.config.list_physical_devices("GPU")))
    return [tf.config.experimental.get_memory_info(f"GPU:{gpu}")["current"] for gpu in gpus]


def _options(communication: Communication) -> tf.distribute.experimental.CommunicationOptions:
    kinds = tf.distribute.experimental.CommunicationImplementation
    return tf.distribute.experimental.CommunicationOptions(
        implementation=kinds[communication.upper()]
    )


def _connect_saves(
    strategy: tf.distribute.Strategy, tf_config: str, worker: runtime_context.Worker
) -> None:
    """Tell all ranks the port of rank 0's server; the all-reduce shows that the links work."""
    host = json.loads(tf_config)["cluster"]["worker"][0].rpartition(":")[0]
    port = saving.serve(host, worker.stream_key) if worker.rank == 0 else 0
    of_chief = _prove_collectives(strategy, port) // len(strategy.extended.worker_devices)
    saving.connect(host, of_chief, worker.stream_key)


def _prove_collectives(strategy: tf.distribute.Strategy, own: int = 0) -> int:
    """One all-reduce over every replica, so that the links are up before a cell needs them.

    Returns:
        The sum of every replica's `own`.
    """
    values = strategy.run(lambda: tf.constant([1, own]))
    ones, total = strategy.reduce("SUM", values, axis=None).numpy().tolist()
    if ones != strategy.num_replicas_in_sync:
        raise RuntimeError(
            f"an all-reduce of ones over {strategy.num_replicas_in_sync} replicas gave {ones}"
        )
    return int(total)


def _reset_context() -> None:
    """Drop the context, but for its seed and for its random generator, in the state it is in."""
    gc.collect()
    former = vars(context.context())
    kept = {name: former[name] for name in ("_seed", "_rng") if name in former}
    del former
    context._reset_context()
    vars(context.context()).update(kept)


def _in_collective() -> bool:
    """Whether a thread is in an eager collective."""
    return any(
        frame.f_code.co_filename == cross_device_ops.__file__
        for innermost in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(innermost)
    )


def _instance_keys() -> dict[int, dict[str, int]]:
    """The next instance key of each group, by device. Each call of a traced function takes one."""
    strategy = runtime_context.current().strategies["mirrored"]
    tables: dict[int, dict[str, int]] = strategy.extended._collective_keys._instance_key_table
    return tables


def _digest_of_keys() -> int:
    """The digest of each group's key and instance keys. Names of devices contain the rank."""
    return of_keys({group: list(keys.values()) for group, keys in _instance_keys().items()})


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Of TensorFlow, about tensors on devices that are replaced, and an eager all-reduce."""
    loggers = [logging.getLogger(name) for name in ("absl", "tensorflow")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _context_exists() -> bool:
    return context.context()._context_handle is not None


def _grow_gpu_memory() -> None:
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def _devices() -> tuple[Device, ...]:
    gpus = tf.config.list_physical_devices("GPU")
    found = gpus or tf.config.list_physical_devices("CPU")
    return tuple(
        Device(platform=device.device_type.lower(), kind=_kind(device), name=device.name)
        for device in found
    )


def _kind(device: object) -> str:
    details = tf.config.experimental.get_device_details(device)
    kind: str = details.get("device_name", "cpu")
    return kind
