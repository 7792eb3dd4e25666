"""JAX runtime of an exported program."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import jax

from nbdist.private_api.jax import distributed
from nbdist.records import PjrtWiring
from nbdist.worker.jax import backend
from nbdist.worker.jax.runtime import processes
from nbdist.worker.script import rendezvous

if TYPE_CHECKING:
    from nbdist.worker.script.coordination import Coordinator
    from nbdist.worker.script.placement import Placement

_END = "nbdist/end"
"""Name of the barrier at the end of a program. Shutdown itself waits for no rank."""


def build(
    placement: Placement, cpu_devices: int, coordinator: Coordinator | None
) -> rendezvous.Connection:
    """Join the other processes, and start JAX's backend. Rank 0 has started the coordinator."""
    wiring = PjrtWiring(
        service=coordinator.address() if coordinator is not None else placement.coordinator,
        address=rendezvous.own_address(placement),
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
        if coordinator is not None:
            coordinator.close()

    return rendezvous.Connection(close, processes.gather, devices)
