"""MultiWorkerMirroredStrategy on one rank.

This module contains all private calls of TensorFlow's runtime that nbdist uses. These are
`_reset_context` of its eager context, the state of this context, `abort_collective_ops`,
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

from nbdist.private_api import keras as private_keras
from nbdist.private_api import tensorflow as private_tensorflow
from nbdist.private_api.tensorflow import context, cross_device_ops, mirrored_run
from nbdist.records import CollectiveState, Device
from nbdist.utils.polling import repeat_until
from nbdist.worker.checkpoint.digest import of_keys
from nbdist.worker.keras import untested
from nbdist.worker.runtime import context as runtime_context
from nbdist.worker.runtime import import_hooks
from nbdist.worker.tensorflow.runtime import dataset_shuffle
from nbdist.worker.tensorflow.saving import coordination as saving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Communication, MirroredWiring

_CANCEL_S = 5.0
_CONNECT_S, _SERVER_S = 1.0, 10.0
"""Limits of one connection and of all attempts to connect to the server of rank 0."""

_reserved_ports: list[socket.socket] = []


def reserve_port() -> int:
    """Find a free port and reserve it until the strategy is built.

    The socket is bound and never listens. TensorFlow's server can bind the same port because both
    set SO_REUSEPORT (`TF_GRPC_REUSE_PORT=1`). Other processes cannot bind it.

    Returns:
        The port number.
    """
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    reserved = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("::", 0))
    _reserved_ports.append(reserved)
    port: int = reserved.getsockname()[1]
    return port


def build(wiring: MirroredWiring) -> tuple[Device, ...]:
    """Build the strategy together with all other ranks. Block until they take part.

    If an op ran before, for example in a startup file, TensorFlow raises "Collective ops must be
    configured at program startup". nbdist therefore resets an existing context. Earlier variables
    and datasets are lost.

    Returns:
        Devices of this rank's replicas.
    """
    worker = runtime_context.current()
    os.environ["TF_CONFIG"] = wiring.tf_config
    exists = context.context()._context_handle is not None
    if worker.strategies.pop("mirrored", None) is not None or exists:
        _reset_context()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    import_hooks.once_imported("keras", _patch_keras)
    dataset_shuffle.apply()
    _apply_optional_patches()
    if worker.rank > 0:
        _await_server(json.loads(wiring.tf_config)["cluster"]["worker"][0])
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=_options(wiring.communication)
    )
    while _reserved_ports:
        _reserved_ports.pop().close()
    _connect_saves(strategy, wiring.tf_config, worker)
    worker.strategies["mirrored"] = strategy
    worker.broken.discard("mirrored")
    worker.collective_keys = _digest_of_keys
    worker.memory.device_bytes = device_bytes
    return _devices()


def _apply_optional_patches() -> None:
    """Apply the patches that the installed version of TensorFlow supports."""
    if private_tensorflow.ONE_STRATEGY.is_supported("a second strategy ends the process"):
        from nbdist.worker.tensorflow.runtime import running_strategy

        running_strategy.apply()
    if private_tensorflow.SAVING.is_supported("each rank writes its own checkpoints"):
        from nbdist.worker.tensorflow.saving import tensorflow_patch as tensorflow_save_patch

        tensorflow_save_patch.apply()
    if private_tensorflow.SCALARS.is_supported("variables are no Python numbers"):
        from nbdist.worker.tensorflow.runtime import variable_scalars

        variable_scalars.apply()
    if private_tensorflow.SLICES.is_supported("slices of variables cannot be assigned"):
        from nbdist.worker.tensorflow.runtime import slice_assignments

        slice_assignments.apply()
    if private_tensorflow.SUMS.is_supported("assignments to sums are divided"):
        from nbdist.worker.tensorflow.replica import summed_variables

        summed_variables.apply()


def _await_server(address: str) -> None:
    """Wait until TensorFlow's server of rank 0 accepts connections, 10 s at most.

    The other ranks connect to it when they build the strategy. If it refuses the connection, gRPC
    waits for about a second before it tries again.
    """
    host, _, port = address.rpartition(":")

    def accepts() -> bool:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError:
            return False
        return True

    repeat_until(accepts, _SERVER_S, interval_s=0.01)


def _patch_keras() -> None:
    keras = sys.modules["keras"]
    needed = (private_keras.FIT, private_keras.STEPS, private_keras.MIRRORED_FIT)
    if keras.backend.backend() == "tensorflow" and untested.accepts(
        keras, *needed, private_tensorflow.STEPS
    ):
        from nbdist.worker.tensorflow.keras import fit_patch

        fit_patch.apply()
        if private_keras.SAVING.is_supported("each rank writes the files of a model"):
            from nbdist.worker.tensorflow.saving import keras_patch as keras_save_patch

            keras_save_patch.apply()


def abort_collectives() -> None:
    """Abort all collectives until `reopen`, new ones too. Any thread may call this."""
    context.context().abort_collective_ops(tf.errors.ABORTED, "cancelled by nbdist")


def next_key() -> int:
    """Return an instance key that no collective of this rank has used."""
    return max(max(keys.values()) for keys in _instance_keys().values())


def reopen(key: int) -> None:
    """Replace the aborted collectives of the context by new ones.

    TensorFlow's server receives its current definition again. It keeps its port, devices and
    resources, and creates a new collective executor. Variables, datasets, functions and the
    strategy stay valid. Call `prove` once all ranks have done this: a request that reaches the old
    executor of a rank would fail.

    An interrupt frees the main thread from an eager collective, but a thread of TensorFlow still
    waits in it. That collective is aborted first.

    Args:
        key: first instance key of the new collectives, the same on all ranks. No rank has used it,
            so a late request of an old collective cannot match a new one.

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
    """Run one all-reduce. All ranks must call this at the same time."""
    with _without_warnings():
        _prove_collectives(runtime_context.current().strategies["mirrored"])


def collective_state() -> CollectiveState:
    """Return the state that earlier cells left in the collectives of this rank.

    An eager replica has its own thread, and an interrupt does not reach it. Each rank counts the
    keys that match collectives between ranks.
    """
    strategy = runtime_context.current().strategies["mirrored"]
    replica = mirrored_run._MirroredReplicaThread
    replicas = [thread for thread in threading.enumerate() if isinstance(thread, replica)]
    return CollectiveState(
        under_way=any(thread.distribution is strategy for thread in replicas),
        keys=_digest_of_keys(),
    )


def device_bytes() -> list[int]:
    """Return the bytes in use on each GPU of this rank. TensorFlow does not count CPU memory."""
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
    """Send the port of rank 0's server to all ranks. The all-reduce also tests the links."""
    host = json.loads(tf_config)["cluster"]["worker"][0].rpartition(":")[0]
    port = saving.serve(host, worker.identity.stream.server_key) if worker.rank == 0 else 0
    of_chief = _prove_collectives(strategy, port) // len(strategy.extended.worker_devices)
    saving.connect(host, of_chief, worker.identity.stream.server_key)


def _prove_collectives(strategy: tf.distribute.Strategy, own: int = 0) -> int:
    """Run one all-reduce over all replicas, so that the links are up before a cell needs them.

    Returns:
        The sum of `own` over all replicas.
    """
    values = strategy.run(lambda: tf.constant([1, own]))
    ones, total = strategy.reduce("SUM", values, axis=None).numpy().tolist()
    if ones != strategy.num_replicas_in_sync:
        raise RuntimeError(
            f"an all-reduce of ones over {strategy.num_replicas_in_sync} replicas gave {ones}"
        )
    return int(total)


def _reset_context() -> None:
    """Reset the context, but keep its seed and the state of its random generator."""
    gc.collect()
    previous = vars(context.context())
    kept = {name: previous[name] for name in ("_seed", "_rng") if name in previous}
    del previous
    context._reset_context()
    vars(context.context()).update(kept)


def _in_collective() -> bool:
    """Return True if a thread is in an eager collective."""
    return any(
        frame.f_code.co_filename == cross_device_ops.__file__
        for innermost in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(innermost)
    )


def _instance_keys() -> dict[int, dict[str, int]]:
    """Return the next instance key of each group, by device. Each traced call uses one key."""
    strategy = runtime_context.current().strategies["mirrored"]
    tables: dict[int, dict[str, int]] = strategy.extended._collective_keys._instance_key_table
    return tables


def _digest_of_keys() -> int:
    """Return a digest of the group keys and instance keys, without rank-specific device names."""
    return of_keys({group: list(keys.values()) for group, keys in _instance_keys().items()})


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence TensorFlow's warnings about replaced devices and eager all-reduces."""
    loggers = [logging.getLogger(name) for name in ("absl", "tensorflow")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
