"""Devices of a cluster: properties, links and measured rates."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from nbdist.errors import UsageError
from nbdist.records import DeviceState
from nbdist.views.cluster.devices import DevicesPicture
from nbdist.worker.remote import devices as rank_devices

if TYPE_CHECKING:
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.records import Topology

_BENCH_S = 300.0
_NO_JAX = (
    "--bench measures JAX's devices, and these workers do not run JAX: run %dist_start with "
    "--framework jax"
)


def look(worker_group: WorkerGroup, *, bench: bool) -> DevicesPicture:
    """Return the devices of all ranks, and the links between them.

    Args:
        worker_group: the ranks. None of them may run a cell.
        bench: measure the devices first. Later plans of steps use the measurements.

    Raises:
        UsageError: the workers do not run JAX, and `bench` needs it.
        WorkerError: a rank failed or died.
    """
    has_jax = "pjrt" in worker_group.collectives.strategies
    if bench and not has_jax:
        raise UsageError(_NO_JAX)
    if bench:
        with worker_group.engines.within(_BENCH_S):
            worker_group.collectives.bench = worker_group.engines.apply(rank_devices.bench)[0]
    topology: Topology | str | None = None
    if has_jax:
        topology = worker_group.engines.apply(rank_devices.topology)[0]
        devices = tuple(itertools.chain(*worker_group.engines.apply(rank_devices.devices)))
    else:
        devices = _of_tensorflow(worker_group)
    return DevicesPicture(
        devices=devices,
        topology=None if isinstance(topology, str) else topology,
        fault=topology if isinstance(topology, str) else "",
        bench=worker_group.collectives.bench,
    )


def _of_tensorflow(worker_group: WorkerGroup) -> tuple[DeviceState, ...]:
    """Return the devices as TensorFlow listed them when it created the strategy."""
    return tuple(
        DeviceState(
            name=device.name,
            platform=device.platform,
            kind=device.kind,
            process=worker.rank,
            host=worker.host,
            plugin=f"tensorflow {worker.versions.get('tensorflow', '')}".rstrip(),
            memory_bytes=device.memory_bytes,
        )
        for worker in worker_group.states((), measure=False)
        for device in worker.devices
    )
