"""Microbenchmarks of the devices of all processes, for the planner and for reports.

All devices work at the same time, as in a step: virtual devices of one host share its cores.
`measure` is collective.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.planner.cost.measured import benched_chip
from nbdist.planner.hardware.topology_live import live
from nbdist.records import Bench, Link, Product
from nbdist.worker.jax.runtime import processes
from nbdist.worker.profiling.crossover import own_crossing, without_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Level, LocalDevices

_SIZES = tuple(256 << power for power in range(6))
_DTYPES = ("float32", "bfloat16", "float16")
_ENOUGH_S = 0.05
"""Seconds of a matrix product after which the series of sizes ends."""

_LEAST_S = 0.02
_ROUNDS = 5
_COPIED_BYTES = 64 << 20
_CALLS = 10
"""Calls of a collective per round: equal on all ranks, and each call waits for the one before."""

_SENT_BYTES = {"cpu": 4 << 20}
_SENT_USUALLY = 64 << 20


def measure(mesh: jax.sharding.Mesh, per_process: list[LocalDevices]) -> Bench:
    """Measure the devices of a mesh. Collective.

    Args:
        mesh: Mesh over all devices.
        per_process: Local devices of each process.

    Raises:
        PlanError: The devices form no supported topology; see `planner.hardware.topology_live`.
    """
    return without_mesh(_measured, mesh, per_process)


def _measured(mesh: jax.sharding.Mesh, per_process: list[LocalDevices]) -> Bench:
    products = _products()
    copied = _agreed([_copy()])[0]
    alone = Bench(devices=mesh.size, products=products, bytes_per_s=copied, links={})
    topology = live(per_process, chip=benched_chip(alone, per_process[0]))
    return Bench(
        devices=mesh.size,
        products=products,
        bytes_per_s=copied,
        links=_links(mesh.devices, topology.levels),
        transfers=_transfers(),
        dispatch_s=_slowest([_dispatch_s()])[0],
        crossing=own_crossing(),
    )


def _products() -> tuple[Product, ...]:
    """Measure matrix products; returns the sizes that every rank measured."""
    kinds = [(dtype, size) for dtype in _DTYPES for size in _SIZES]
    reached = dict.fromkeys(kinds, 0.0)
    for dtype in _DTYPES:
        for size in _SIZES:
            seconds = _product_s(dtype, size)
            reached[dtype, size] = 2 * size**3 / seconds
            if seconds > _ENOUGH_S:
                break
    agreed = _agreed(list(reached.values()))
    return tuple(
        Product(dtype=dtype, size=size, flops=flops)
        for (dtype, size), flops in zip(kinds, agreed, strict=True)
        if flops
    )


def _product_s(dtype: str, size: int) -> float:
    ones = np.ones((size, size), dtype=jnp.dtype(dtype))
    each = [jax.device_put(ones, device) for device in jax.local_devices()]
    product = jax.jit(jnp.matmul)
    return _own_seconds(lambda: [product(array, array) for array in each])


def _copy() -> float:
    """Return the bytes per second that each device reads and writes."""
    ones = np.ones(_COPIED_BYTES // 4, np.float32)
    each = [jax.device_put(ones, device) for device in jax.local_devices()]
    copy = jax.jit(lambda array: array + 1)
    return 2 * _COPIED_BYTES / _own_seconds(lambda: [copy(array) for array in each])


def _dispatch_s() -> float:
    device = jax.local_devices()[0]
    one, add = jax.device_put(np.float32(1), device), jax.jit(lambda number: number + 1)
    return _own_seconds(lambda: add(one))


def _transfers() -> dict[str, Link]:
    """Measure transfers of `_COPIED_BYTES` on all devices at once; CPUs skip host transfers."""
    devices = jax.local_devices()
    ways: dict[str, Callable[[int], Callable[[], Any]]] = {}
    if devices[0].platform != "cpu":
        ways |= {"to device": _to_devices, "to host": _to_host}
    if len(devices) > 1:
        ways["device to device"] = _to_the_next
    sizes = 4, _COPIED_BYTES
    measured = [_own_seconds(way(nbytes)) for way in ways.values() for nbytes in sizes]
    slowest = _slowest(measured)
    return {
        name: Link(
            latency_s=slowest[2 * index],
            bytes_per_s=_COPIED_BYTES / (slowest[2 * index + 1] - slowest[2 * index]),
        )
        for index, name in enumerate(ways)
    }


def _to_devices(nbytes: int) -> Callable[[], Any]:
    ones = np.ones(nbytes // 4, np.float32)
    return lambda: [jax.device_put(ones, d, may_alias=False) for d in jax.local_devices()]


def _to_host(nbytes: int) -> Callable[[], Any]:
    ones = np.ones(nbytes // 4, np.float32)
    each = [jax.device_put(ones, device) for device in jax.local_devices()]
    # An array caches its copy on the host, but new views of its data do not.
    return lambda: [np.asarray(array.addressable_data(0)) for array in each]


def _to_the_next(nbytes: int) -> Callable[[], Any]:
    devices, ones = jax.local_devices(), np.ones(nbytes // 4, np.float32)
    each = [jax.device_put(ones, device) for device in devices]
    return lambda: [
        jax.device_put(array, device, may_alias=False)
        for array, device in zip(each, (*devices[1:], devices[0]), strict=True)
    ]


def _own_seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call over several rounds, without its compilation."""
    jax.block_until_ready(call())
    calls, rounds = 0, []
    began = time.perf_counter()
    while time.perf_counter() - began < _LEAST_S:
        jax.block_until_ready(call())
        calls += 1
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(call())
        rounds.append((time.perf_counter() - began) / calls)
    return statistics.median(rounds)


def _links(devices: np.ndarray, levels: tuple[Level, ...]) -> dict[str, Link]:
    """Measure the links of each level by all-reduces in all groups of the level at once.

    A ring all-reduce over n devices sends 2 (n - 1) messages with 1/n of the bytes each: see
    `planner.cost.collectives`.
    """
    names = tuple(level.name for level in reversed(levels))
    shaped = devices.reshape([level.size for level in reversed(levels)])
    mesh = jax.sharding.Mesh(shaped, names)
    sent = _SENT_BYTES.get(devices.flat[0].platform, _SENT_USUALLY)
    links = {}
    for level in levels:
        if level.size > 1:
            none_s = _all_reduce_s(mesh, level.name, 4)
            all_s = _all_reduce_s(mesh, level.name, sent)
            messages = 2 * (level.size - 1)
            moved = messages / level.size * sent
            links[level.name] = Link(
                latency_s=none_s / messages,
                bytes_per_s=moved / max(all_s - none_s, all_s / 10),
            )
    return links


def _all_reduce_s(mesh: jax.sharding.Mesh, axis: str, nbytes: int) -> float:
    """Return the seconds of an all-reduce of `nbytes` per device, on the slowest rank."""
    spec = jax.P(mesh.axis_names)
    whole = jax.NamedSharding(mesh, spec)
    own = np.zeros((1, nbytes // 4), np.float32)
    array = jax.make_array_from_callback((mesh.size, nbytes // 4), whole, lambda _: own)

    def total(part: jax.Array) -> Any:
        return jax.lax.psum(part, axis)

    reduce = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec))
    rounds = []
    for _ in range(_ROUNDS + 1):  # the first round compiles
        began = time.perf_counter()
        for _ in range(_CALLS):
            array = reduce(array)
        array.block_until_ready()
        rounds.append((time.perf_counter() - began) / _CALLS)
    slowest: float = processes.gather(np.float32(statistics.median(rounds[1:]))).max()
    return float(slowest)


def _agreed(figures: list[float]) -> list[float]:
    """Return the minimum of each figure over all ranks."""
    least: list[float] = processes.gather(np.asarray(figures, np.float32)).min(axis=0).tolist()
    return least


def _slowest(seconds: list[float]) -> list[float]:
    """Return the maximum of each time over all ranks."""
    return [-least for least in _agreed([-each for each in seconds])]
