"""Questions of the session about a rank's devices, sent to all ranks through `apply`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from nbdist.records import Bench, DeviceState, Topology


def topology() -> Topology | str:
    """Return the devices for which steps are planned, or the reason why they are unknown."""
    try:
        found: Topology = context.current().strategies["pjrt"].target.topology
    except PlanError as error:
        return str(error)
    return found


def devices() -> list[DeviceState]:
    """Return the current states of this rank's devices, as JAX reports them."""
    from nbdist.worker.jax.runtime import platforms

    return platforms.own_states()


def bench() -> Bench:
    """Measure the devices, and use the result for later plans."""
    from nbdist.worker.planning.plan_step import local_devices
    from nbdist.worker.profiling.device_bench import measure

    strategy = context.current().strategies["pjrt"]
    found = measure(strategy.mesh, local_devices())
    strategy.take_bench(found)
    return found
