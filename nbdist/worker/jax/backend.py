"""JAX backend of a rank: join the other processes and create the strategy.

A separate process hosts the coordination service (see `worker/jax/runtime/coordinator.py`), so the
service survives the death of any rank. `jax.distributed.initialize` does not support this, and lets
the client abort the process when a peer dies. This module makes its private calls instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import traceback
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.backend
import jax.numpy as jnp

from nbdist.errors import StartError
from nbdist.private_api import jax as private_jax
from nbdist.private_api import orbax as private_orbax
from nbdist.private_api.jax import _jax, dispatch, distributed, pxla, xla_bridge
from nbdist.records import CollectiveState, Device
from nbdist.utils.processes import batch_scheduling
from nbdist.worker.jax.arrays import default_device_patch
from nbdist.worker.jax.rebuild.arrays import Devices
from nbdist.worker.jax.rebuild.preserve import PreservedArrays
from nbdist.worker.jax.rebuild.walk import LostValue
from nbdist.worker.jax.runtime import coordinator, initialize_patch, processes
from nbdist.worker.jax.strategy import PjRTStrategy
from nbdist.worker.runtime import context, gloo_connections, import_hooks
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from types import FrameType

    from nbdist.records import PjrtWiring

_CONNECT_TIMEOUT_S = 60
_TPU_ORDER = (
    "start one worker on each host of the slice, in the order of these processes, and set no "
    "variables that divide a slice, such as TPU_PROCESS_BOUNDS"
)
_TPU_USE = (
    'install "jax[tpu]" on all hosts, and end other processes that use the TPU, such as a notebook '
    "that has run JAX in its own kernel"
)
_NO_PROCESSES = "it does not connect several processes, use one host"
_make_gloo = _jax.make_gloo_tcp_collectives
_preserved = PreservedArrays()
_unready: list[jax.Array] = []
"""Arrays that were being computed when a cell failed."""

_users: dict[str, jax.sharding.Mesh] = {}
"""Context mesh and `mesh` of the user while the backend is rebuilt."""

_listeners: set[int] = set()
"""Inodes of the sockets that peers connect to for collectives."""


def abort_collectives() -> None:
    """Fail all waiting collectives; none works again until `build`. Callable from any thread."""
    gloo_connections.shut_beside(_listeners)


def note_unready() -> None:
    """Record the arrays that a failed cell is still computing, for `collective_state`.

    Call it while the traceback still references the arrays of the user's functions.
    """
    _unready[:] = [array for array in (*_unready, *jax.live_arrays()) if not _is_done(array)]


def has_unready() -> bool:
    """Return True if an array is still being computed. Callable from any thread."""
    return not all(map(_is_done, (*_unready, *jax.live_arrays())))


def is_dispatching(frame: FrameType) -> bool:
    """Return True if a thread is in the first execution of a computation.

    Small computations on CPUs run on the calling thread, and their arrays exist only afterwards.

    Args:
        frame: innermost frame of the thread.
    """
    execute = inspect.unwrap(pxla.ExecuteReplicated.__call__).__code__
    return any(outer.f_code is execute for outer, _ in traceback.walk_stack(frame))


def on_cpus() -> bool:
    """Return True if all devices of this rank are CPUs; their computations use processor time."""
    return all(device.platform == "cpu" for device in jax.local_devices())


def collective_state() -> CollectiveState:
    """Return True if earlier cells left collectives running on this rank."""
    note_unready()
    return CollectiveState(under_way=bool(_unready))


def _is_done(array: jax.Array) -> bool:
    return bool(array.is_deleted() or array.is_ready())


def leave() -> None:
    """Drop the other processes and the backend; call `build` and `put_back` next.

    Meanwhile the user's arrays are kept on the host.
    """
    global _preserved  # noqa: PLW0603 - kept from one request to a later one
    strategy = context.current().strategies.pop("pjrt", None)
    if strategy is None:
        return
    _unready.clear()
    abort_collectives()  # an abandoned step may be running and never end
    _preserved = PreservedArrays.take(engine_shell().user_ns)
    _leave_meshes(strategy)
    distributed.global_state.client = None
    dispatch.runtime_tokens.clear()  # tokens of a failed step would raise
    gc.collect()
    jax.extend.backend.clear_backends()
    jax.clear_caches()


def put_back() -> tuple[str, ...]:
    """Restore the user's arrays; returns the names that are lost."""
    global _preserved
    preserved, _preserved = _preserved, PreservedArrays()
    _restore_meshes()
    return preserved.put_back(engine_shell().user_ns)


def _leave_meshes(strategy: PjRTStrategy) -> None:
    """Record the user's context mesh and a `mesh` of the user: their devices end now."""
    _users.clear()
    if not jax.sharding.get_mesh().empty:
        _users["context"] = jax.sharding.get_mesh()
    jax.set_mesh(processes.NO_MESH)
    own = engine_shell().user_ns.get("mesh", strategy.mesh)
    if isinstance(own, jax.sharding.Mesh) and own != strategy.mesh:
        _users["mesh"] = own


def _restore_meshes() -> None:
    """Restore the user's context mesh and `mesh`, on the devices of the same ids."""
    devices = Devices()
    with contextlib.suppress(LostValue):
        if "context" in _users:
            jax.set_mesh(devices.renewed(_users["context"]))
        if "mesh" in _users:
            engine_shell().user_ns["mesh"] = devices.renewed(_users["mesh"])
    _users.clear()


def build(wiring: PjrtWiring) -> tuple[Device, ...]:
    """Join the other processes and start the backend; blocks until all have joined.

    Returns:
        The devices of this rank.
    """
    _configure(wiring)
    before = gloo_connections.listening()
    _join(wiring)
    _check_process(wiring)
    strategy = PjRTStrategy()
    strategy.take_bench(wiring.bench)
    _prove_collectives(strategy.mesh)
    processes.announce_host()
    _listeners.update(gloo_connections.listening() - before)
    context.current().strategies["pjrt"] = strategy
    context.current().broken.discard("pjrt")
    context.current().memory.device_bytes = device_bytes
    return tuple(
        Device(
            platform=device.platform,
            kind=device.device_kind,
            name=str(device),
            memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        )
        for device in jax.local_devices()
    )


def device_bytes() -> list[int]:
    """Return the bytes in use on each local device; devices without statistics are omitted."""
    counts = (device.memory_stats() for device in jax.local_devices())
    return [counted["bytes_in_use"] for counted in counts if counted]


def _check_process(wiring: PjrtWiring) -> None:
    """Check the number of this process, which the runtime of TPUs chooses itself.

    Raises:
        StartError: it is not the rank, the runtime found other processes, or it cannot use the TPU.
    """
    try:
        own, count = jax.process_index(), jax.process_count()
    except RuntimeError as error:
        if "tpu" not in (jax.config.jax_platforms or ""):
            raise
        raise StartError(f"JAX cannot use the TPU of this host: {_TPU_USE}. {error}") from None
    if (own, count) != (wiring.rank, wiring.world_size):
        platform = jax.default_backend()
        raise StartError(
            f"rank {wiring.rank} of {wiring.world_size} is process {own} of {count} for JAX's "
            f"runtime of {platform}: {_TPU_ORDER if platform == 'tpu' else _NO_PROCESSES}"
        )


def _prove_collectives(mesh: jax.sharding.Mesh) -> None:
    """Run one all-reduce over every device to establish the links before a cell needs them."""
    with jax.set_mesh(mesh):
        ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=jax.P("data"))()
        total = int(jax.jit(jnp.sum, out_shardings=jax.P())(ones))
    if total != mesh.size:
        raise RuntimeError(f"an all-reduce of ones over {mesh.size} devices returned {total}")


def _configure(wiring: PjrtWiring) -> None:
    _apply_optional_patches(wiring.compiled)
    default_device_patch.apply()
    _patch_orbax_once_imported()
    initialize_patch.apply()
    jax.config.update("jax_enable_preemption_service", False)  # the service swallows SIGTERM
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _configure_gloo(wiring.address)
    if wiring.cpu_devices:
        jax.config.update("jax_num_cpu_devices", wiring.cpu_devices)
    if wiring.cpu_devices > 1:
        # With fewer threads than devices in flight, gloo's collectives deadlock (docs/facts.md).
        os.environ["NPROC"] = str(max(16, 4 * wiring.cpu_devices))


def _apply_optional_patches(compiled: str) -> None:
    """Apply the patches that the installed version of JAX supports.

    Args:
        compiled: folder of compiled programs; empty for none.
    """
    effect = "replaced workers compile their programs again"
    if compiled and private_jax.COMPILE_CACHE.is_supported(effect):
        from nbdist.worker.jax.runtime import compile_cache

        compile_cache.keep_in(compiled)
    if private_jax.CALLBACKS.is_supported("callbacks run on rank 0 only"):
        from nbdist.worker.jax.arrays import callbacks_patch

        callbacks_patch.apply()
    effect = "gradients of sharded grouped convolutions are wrong"
    if private_jax.CONVOLUTIONS.is_supported(effect):
        from nbdist.worker.jax.arrays import convolution_patch

        convolution_patch.apply()
    if private_jax.DEVICE_PUT.is_supported("jax.device_put compares NaN as different"):
        from nbdist.worker.jax.arrays import device_put_patch

        device_put_patch.apply()


@functools.cache
def _patch_orbax_once_imported() -> None:
    import_hooks.once_imported("orbax.checkpoint", _patch_orbax)


def _patch_orbax() -> None:
    if private_orbax.CHECKPOINTS.is_supported("checkpoints are written by each rank"):
        from nbdist.worker.jax import orbax_patch

        orbax_patch.apply()


def _configure_gloo(address: str) -> None:
    """Bind gloo to an address: by default the host name may resolve to 127.0.1.1.

    The thread that polls its connections then yields to the thread that it waits for.
    """

    def make(*args: Any, **kwargs: Any) -> Any:
        with batch_scheduling():
            return _make_gloo(*args, hostname=address, **kwargs)

    xla_bridge._jax.make_gloo_tcp_collectives = make


def _join(wiring: PjrtWiring) -> None:
    shared = distributed.global_state
    shared.process_id = wiring.rank
    shared.num_processes = wiring.world_size
    shared.coordinator_address = wiring.service
    shared.client = coordinator.connect(wiring.service, wiring.rank, _CONNECT_TIMEOUT_S)
