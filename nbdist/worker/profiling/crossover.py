"""Measured size from which a transfer to other devices pays."""

from __future__ import annotations

import functools
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from nbdist.records import Crossing, Way
from nbdist.utils.listing import listed
from nbdist.worker.jax.runtime.platforms import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Device
    from jax.sharding import Sharding

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

_SIZES = tuple(32 << power for power in range(8))
_ENOUGH_S = 0.02
"""Seconds after which the series of products ends.

The next product takes eight times as long, and the whole series should take about a second.
"""

_ROUNDS = 5


def without_mesh(
    measured: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs
) -> _Result:
    """Call a function without the cell's mesh, which is set per thread."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(measured, *args, **kwargs).result()


@functools.cache
def crossing(home: Device, there: tuple[Device, ...]) -> Crossing:
    """Compare float32 matrix products at home and on other devices, including one transfer.

    The measurement takes about a second, runs once per process, and is not collective.

    Args:
        home: Device with the matrices.
        there: Other device, or several devices over which the rows are split.
    """
    return without_mesh(_measured, home, there)


def _measured(home: Device, there: tuple[Device, ...]) -> Crossing:
    target = _sharding_over(there) if len(there) > 1 else SingleDeviceSharding(there[0])
    everywhere = _sharding_over(there, whole=True) if len(there) > 1 else target
    ways = []
    for least in _SIZES:
        size = -(-least // len(there)) * len(there)  # a multiple of the number of devices
        way = _way(size, home, target, everywhere)
        ways.append(way)
        if way.home_s > _ENOUGH_S:
            break
    return Crossing(ways=tuple(ways), size=_crossed(ways), home=name_of(home), there=_named(there))


def own_crossing() -> Crossing | None:
    """Return the crossing of this process: to its accelerator, or over its CPU devices.

    Returns None if it has neither an accelerator nor several CPU devices.
    """
    own, host = jax.local_devices(), jax.local_devices(backend="cpu")[0]
    if own[0] is not host and own[0].client is not host.client:
        return crossing(host, (own[0],))
    return crossing(host, tuple(own)) if len(own) > 1 else None


def _named(devices: tuple[Device, ...]) -> str:
    return listed([name_of(device) for device in devices], 1)


def _way(size: int, home: Device, target: Sharding, everywhere: Sharding) -> Way:
    product = jax.jit(jnp.matmul)
    matrix = jax.device_put(np.ones((size, size), np.float32), home)
    weights = jax.device_put(matrix, everywhere)  # parameters are already on the devices

    def moved() -> Any:
        return product(jax.device_put(matrix, target), weights)

    home_s, there_s = _medians([lambda: product(matrix, matrix), moved])
    return Way(size=size, home_s=home_s, there_s=there_s)


def _medians(calls: list[Callable[[], Any]]) -> list[float]:
    """Return the median seconds of each call; calls alternate to share any disturbance."""
    for call in calls:
        jax.block_until_ready(call())
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for call, times in zip(calls, taken, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in taken]


def _crossed(ways: list[Way]) -> float | None:
    """Return the size from which all measured sizes are faster there; None if there is none.

    Interpolates between two sizes, with straight lines on logarithmic axes.
    """
    if not ways[-1].pays:
        return None
    last = float(ways[0].size)
    for before, after in pairwise(ways):
        if not before.pays and after.pays:
            above = max(0.0, math.log(before.there_s / before.home_s))
            below = math.log(after.home_s / after.there_s)
            part = above / (above + below)
            last = before.size * (after.size / before.size) ** part
    return last


def _sharding_over(devices: tuple[Device, ...], *, whole: bool = False) -> NamedSharding:
    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    return NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec("rows"))
