"""JAX across processes on one rank: the processes joined, the strategy made.

The coordination service is not hosted by a rank (see `worker/jax/runtime/coordinator.py`), so that
no rank's death takes it along. JAX's public `jax.distributed.initialize` cannot do that, nor keep
the client from aborting the process when a peer dies; the private calls it would make are here.
"""

from __future__ import annotations

import functools
import gc
import os
from typing import TYPE_CHECKING

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax._src import dispatch, distributed, xla_bridge
from jax._src.lib import _jax

from nbdist.records import CollectiveState, Device
from nbdist.worker.jax.arrays import callbacks_patch
from nbdist.worker.jax.rebuild.preserve import PreservedArrays
from nbdist.worker.jax.runtime import compile_cache, processes
from nbdist.worker.jax.runtime.coordinator import HEARTBEAT_TIMEOUT_S, SHUTDOWN_TIMEOUT_S
from nbdist.worker.jax.strategy import PjRTStrategy
from nbdist.worker.runtime import context, gloo_connections
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from nbdist.records import PjrtWiring

_CONNECT_TIMEOUT_S = 60
_make_gloo = _jax.make_gloo_tcp_collectives
_preserved = PreservedArrays()
_unready: list[jax.Array] = []
"""Arrays that were being computed when a cell failed."""

_listeners: set[int] = set()
"""What peers connect to for collectives, by inode."""


def abort_collectives() -> None:
    """Whoever waits in a collective gets an error; no other works before `build`. Any thread."""
    gloo_connections.shut_beside(_listeners)


def note_unready() -> None:
    """The cell has failed: what it has launched is looked for by `collective_state`.

    To be called while the traceback still holds the arrays of the user's functions.
    """
    _unready[:] = [array for array in (*_unready, *jax.live_arrays()) if not _is_done(array)]


def has_unready() -> bool:
    """Whether an array is still being computed. Any thread."""
    return not all(map(_is_done, (*_unready, *jax.live_arrays())))


def on_cpus() -> bool:
    """Whether this rank's devices are CPUs, whose threads use processor time as they compute."""
    return all(device.platform == "cpu" for device in jax.local_devices())


def collective_state() -> CollectiveState:
    """What earlier cells have left of collectives on this rank."""
    note_unready()
    return CollectiveState(under_way=bool(_unready))


def _is_done(array: jax.Array) -> bool:
    return bool(array.is_deleted() or array.is_ready())


def leave() -> None:
    """Forget the other processes and the backend; `build` and `put_back` come next.

    The user's arrays are kept on the host meanwhile.
    """
    global _preserved  # noqa: PLW0603 - from one request to a later one
    if context.current().strategies.pop("pjrt", None) is None:
        return
    _unready.clear()
    abort_collectives()  # a step that nobody waits for any more may be under way, and never end
    _preserved = PreservedArrays.take(engine_shell().user_ns)
    distributed.global_state.client = None
    dispatch.runtime_tokens.clear()  # those of what failed would raise
    gc.collect()
    jax.extend.backend.clear_backends()
    jax.clear_caches()


def put_back() -> tuple[str, ...]:
    """Make the user's arrays again; returns the names that are lost."""
    global _preserved
    preserved, _preserved = _preserved, PreservedArrays()
    return preserved.put_back(engine_shell().user_ns)


def build(wiring: PjrtWiring) -> tuple[Device, ...]:
    """Join the other processes and start the backend; blocks until all are there.

    Returns:
        This rank's own devices.
    """
    _configure(wiring)
    before = gloo_connections.listening()
    _join(wiring)
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
    """In use on each of this rank's devices; left out are those that do not count, as CPUs."""
    counts = (device.memory_stats() for device in jax.local_devices())
    return [counted["bytes_in_use"] for counted in counts if counted]


def _prove_collectives(mesh: jax.sharding.Mesh) -> None:
    """One all-reduce over every device, so that the links are up before a cell needs them."""
    with jax.set_mesh(mesh):
        ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=jax.P("data"))()
        total = int(jax.jit(jnp.sum, out_shardings=jax.P())(ones))
    if total != mesh.size:
        raise RuntimeError(f"an all-reduce of ones over {mesh.size} devices gave {total}")


def _configure(wiring: PjrtWiring) -> None:
    compile_cache.keep_in(wiring.compiled)
    callbacks_patch.apply()
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _gloo_listens_on(wiring.address)
    if wiring.cpu_devices:
        jax.config.update("jax_num_cpu_devices", wiring.cpu_devices)
    if wiring.cpu_devices > 1:
        # Fewer threads than devices in flight deadlock gloo's collectives (docs/facts.md).
        os.environ["NPROC"] = str(max(16, 4 * wiring.cpu_devices))


def _gloo_listens_on(address: str) -> None:
    """Left to itself, it takes what the host's own name resolves to: 127.0.1.1, on many."""
    made = functools.partial(_make_gloo, hostname=address)
    xla_bridge._jax.make_gloo_tcp_collectives = made


def _join(wiring: PjrtWiring) -> None:
    shared = distributed.global_state
    shared.process_id = wiring.rank
    shared.num_processes = wiring.world_size
    shared.coordinator_address = wiring.service
    shared.client = _jax.get_distributed_runtime_client(
        wiring.service,
        wiring.rank,
        init_timeout=_CONNECT_TIMEOUT_S,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        use_compression=True,
        shutdown_on_destruction=False,
    )
    shared.client.connect()
