"""JAX runtime of an exported program. Rank 0 hosts the coordination service."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import jax
from jax._src import distributed

from nbdist.records import PjrtWiring
from nbdist.worker.jax import backend
from nbdist.worker.jax.runtime import coordinator, processes
from nbdist.worker.script import rendezvous

if TYPE_CHECKING:
    from nbdist.worker.script.placement import Placement

_END = "nbdist/end"
"""Name of the barrier at the end of a program. Shutdown itself waits for no rank."""


def build(placement: Placement, cpu_devices: int) -> rendezvous.Connection:
    """Join the other processes, and start JAX's backend."""
    service = None
    address, at = rendezvous.own_address(placement), placement.coordinator
    if placement.rank == 0:
        port = at.rpartition(":")[2]
        service, at = coordinator.serve(address, placement.world_size, int(port or 0))
    wiring = PjrtWiring(
        service=at,
        address=address,
        rank=placement.rank,
        world_size=placement.world_size,
        cpu_devices=cpu_devices,
        compiled=os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
    )
    devices = backend.build(wiring)

    def close() -> None:
        jax.effects_barrier()
        client = distributed.global_state.client
        client.wait_at_barrier(_END, int(1000 * rendezvous.LIMIT_S))
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # rank 0 may have ended the service
            client.shutdown()
        if service is not None:
            service.shutdown()

    return rendezvous.Connection(close, processes.gather, devices)
