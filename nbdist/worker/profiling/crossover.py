"""From which size on the way to other devices is worth it, measured on these devices."""

from __future__ import annotations

import functools
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from nbdist.records import Crossing, Way
from nbdist.worker.jax.runtime.platforms import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Device
    from jax.sharding import Sharding

_SIZES = tuple(32 << power for power in range(8))
_ENOUGH_S = 0.02
"""A product that takes longer where the matrices are is the last one: the next takes eight times as
long, and all of it is to take a second or so."""

_ROUNDS = 5


@functools.cache
def crossing(home: Device, there: tuple[Device, ...]) -> Crossing:
    """Square products of float32 at home, against there with the way of one matrix to it.

    Measured once in a process, in about a second; nobody else is waited for.

    Args:
        home: where the matrices are.
        there: one other device; or several, over which the rows are cut.
    """
    with ThreadPoolExecutor(1) as apart:  # under no mesh: that of a cell is its thread's
        return apart.submit(_measured, home, there).result()


def _measured(home: Device, there: tuple[Device, ...]) -> Crossing:
    target = _cut(there) if len(there) > 1 else SingleDeviceSharding(there[0])
    everywhere = _cut(there, whole=True) if len(there) > 1 else target
    ways = []
    for least in _SIZES:
        size = -(-least // len(there)) * len(there)  # rows that divide
        way = _way(size, home, target, everywhere)
        ways.append(way)
        if way.home_s > _ENOUGH_S:
            break
    return Crossing(ways=tuple(ways), size=_crossed(ways), home=name_of(home), there=_named(there))


def own_crossing() -> Crossing | None:
    """Of this process: to its accelerator, or where CPUs are all it has, over all of these."""
    own, host = jax.local_devices(), jax.local_devices(backend="cpu")[0]
    if own[0] is not host and own[0].client is not host.client:
        return crossing(host, (own[0],))
    return crossing(host, tuple(own)) if len(own) > 1 else None


def _named(devices: tuple[Device, ...]) -> str:
    first = name_of(devices[0])
    return f"{first} and {len(devices) - 1} more" if len(devices) > 1 else first


def _way(size: int, home: Device, target: Sharding, everywhere: Sharding) -> Way:
    product = jax.jit(jnp.matmul)
    matrix = jax.device_put(np.ones((size, size), np.float32), home)
    weights = jax.device_put(matrix, everywhere)  # parameters stay where they are

    def moved() -> Any:
        return product(jax.device_put(matrix, target), weights)

    home_s, there_s = _medians([lambda: product(matrix, matrix), moved])
    return Way(size=size, home_s=home_s, there_s=there_s)


def _medians(calls: list[Callable[[], Any]]) -> list[float]:
    """Seconds of each, taken in turns, so that other work on the machine meets all alike."""
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
    """The size from which on all that were measured are quicker there, between two of them.

    Where both lines are straight on logarithmic axes, they meet in proportion to their distance.
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


def _cut(devices: tuple[Device, ...], *, whole: bool = False) -> NamedSharding:
    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    return NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec("rows"))
