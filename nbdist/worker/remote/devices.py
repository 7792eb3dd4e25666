"""What the session asks of ranks about their devices, by ipyparallel's `apply`, of all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from nbdist.records import Bench, DeviceState, Topology


def topology() -> Topology | str:
    """What steps are planned for; why nothing can be, where nobody knows the devices."""
    try:
        found: Topology = context.current().strategies["pjrt"].target.topology
    except PlanError as error:
        return str(error)
    return found


def devices() -> list[DeviceState]:
    """Those of this rank, as JAX tells of them now."""
    from nbdist.worker.jax.runtime import platforms

    return platforms.own_states()


def bench() -> Bench:
    """Measure the devices, and plan with that from here on."""
    from nbdist.worker.planning.plan_step import local_devices
    from nbdist.worker.profiling.device_bench import measure

    strategy = context.current().strategies["pjrt"]
    found = measure(strategy.mesh, local_devices())
    strategy.take_bench(found)
    return found
