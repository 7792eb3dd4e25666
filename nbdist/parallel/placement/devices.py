"""Devices that this process knows, with their measured rates.

As a program (`python -m nbdist.parallel.placement.devices [--bench]`), it writes the devices for a
notebook whose kernel has not imported JAX. JAX in the kernel would take most of a GPU's memory, and
workers need that memory.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from nbdist.errors import PlanError, UsageError
from nbdist.records import DevicesSeen
from nbdist.views.cluster.devices import DevicesPicture

if TYPE_CHECKING:
    from nbdist.records import Bench, Topology

_LOOK_S = 60.0
_BENCH_S = 300.0


def devices(*, bench: bool = False) -> DevicesPicture:
    """Return the devices that JAX knows in this process, of all platforms and hosts.

    Memory in use of devices of other processes is unknown here, and so are links unless they are
    measured. `%dist_devices` and `Cluster.devices` ask each worker.

    Args:
        bench: Measure products by size and type, copies, transfers and links first (medians after
            warm-ups). With several processes, each must call it. Later calls show the result.

    Returns:
        A sequence with one row (`DeviceState`) for each device, memory in bytes. Its keys are the
        names of the devices. `.topology` and `.bench` contain links and measurements.

    Examples:
        >>> found = nbdist.devices()
        >>> len(found), found[0].name, found["cpu:3"].platform
        (8, 'cpu:0', 'cpu')
        >>> found.to_dataframe().groupby("kind").size()
        kind
        cpu    8
        dtype: int64
    """
    return _picture(_see(bench=bench))


def devices_apart(*, bench: bool) -> DevicesPicture:
    """Return `devices` from another process if this one has not imported JAX.

    Raises:
        UsageError: that process failed.
    """
    if "jax" in sys.modules:
        return devices(bench=bench)
    if importlib.util.find_spec("jax") is None:
        raise UsageError('%dist_devices needs JAX: run %pip install "nbdist[jax]"')
    command = [sys.executable, "-m", __name__, *(["--bench"] if bench else [])]
    try:
        ended = subprocess.run(
            command, capture_output=True, timeout=_BENCH_S if bench else _LOOK_S, check=True
        )
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or str(error).encode()
        last = output.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(f"JAX cannot list this machine's devices: {''.join(last)}") from None
    seen = msgspec.msgpack.decode(ended.stdout, type=DevicesSeen)
    _benched[:] = [seen.bench] if seen.bench else _benched
    return _picture(structs.replace(seen, bench=_benched[-1] if _benched else None))


_benched: list[Bench] = []
"""Last measurements of this process."""


def _see(*, bench: bool) -> DevicesSeen:
    import jax

    from nbdist.worker.jax.runtime import platforms

    if bench:
        _benched[:] = [_measured()]
    alone = jax.process_count() == 1  # otherwise every process must look, as for `bench`
    topology, fault = _topology() if alone or bench else (None, "")
    return DevicesSeen(
        devices=tuple(platforms.states()),
        topology=topology,
        fault=fault,
        bench=_benched[-1] if _benched else None,
    )


def _measured() -> Bench:
    from nbdist.worker.jax.strategy import PjRTStrategy
    from nbdist.worker.planning.plan_step import local_devices
    from nbdist.worker.profiling.device_bench import measure
    from nbdist.worker.runtime import context

    strategy = context.strategies().get("pjrt") or PjRTStrategy()
    return measure(strategy.mesh, local_devices())


def _topology() -> tuple[Topology | None, str]:
    """Return the topology of this process's own devices, or None and the reason."""
    from nbdist.worker.planning.plan_step import live_target, local_devices

    try:
        target = live_target(local_devices(), _benched[-1] if _benched else None)
    except PlanError as error:
        return None, str(error)
    return target.topology, ""


def _picture(seen: DevicesSeen) -> DevicesPicture:
    return DevicesPicture(seen.devices, seen.topology, seen.fault, seen.bench, of_cluster=False)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.msgpack.encode(_see(bench="--bench" in sys.argv)))
