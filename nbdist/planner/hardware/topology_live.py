"""Topology of a running cluster, from the reports of its processes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import PlanError
from nbdist.planner.hardware.links import (
    fills_racks,
    network_level,
    of_hosts,
    of_slices,
    usual_nics,
    written,
)
from nbdist.planner.hardware.lookup import find, host_of, machine_named, unknown
from nbdist.records import Level, Topology

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nbdist.planner.hardware.machine import Torus
    from nbdist.records import Chip, Link, LocalDevices

# Figures between processes of one machine: gloo over the loopback device.
_LOOPBACK_S = 50e-6
_LOOPBACK_BYTES_PER_S = 2e9

_CHIP = "chip"
"""Level of the devices of a chip: JAX has two for each chip of TPU v2, v3 and v7."""


def live(
    processes: Sequence[LocalDevices],
    *,
    chip: Chip | None = None,
    links: Mapping[str, Link] | None = None,
) -> Topology:
    """Return the topology of present devices.

    Processes are grouped by their host names. Figures that were not measured come from the catalog,
    or are assumed for CPUs and unknown chips; `Topology.assumed` lists them. Devices are in the
    order of the levels: by slice, host and rank, and TPUs by their coordinates.

    Args:
        processes: by rank.
        chip: measured figures of devices that the catalog does not have.
        links: measured links, by the name of the level.

    Raises:
        PlanError: there are no devices, they differ, hosts or slices are unequal, the chip is
            unknown and was not measured, or a measured level does not exist.
    """
    if not processes:
        raise PlanError("there are no workers to plan for: run %dist_start")
    kind = _common_value("kinds of device", [process.kind for process in processes])
    known = chip or find(kind)
    if known is None:
        raise PlanError(f"{unknown(kind)}or run %dist_devices --bench on the workers")
    levels, assumed = _levels(processes, known)
    levels, measured = _with_measured(levels, links or {})
    device = known if chip else _device_of(known, levels)
    return Topology(
        chip=_with_memory(device, processes),
        levels=levels,
        assumed=(*assumed, *_unmeasured(known, levels, measured)),
    )


def _common_value(what: str, values: Sequence[str]) -> str:
    """Return the value that all workers report."""
    counted = Counter(values)
    if len(counted) > 1:
        several = ", ".join(f"{value} (of {times})" for value, times in counted.items())
        raise PlanError(
            f"the workers have different {what}: {several}; start on machines of one kind"
        )
    return values[0]


def _with_memory(chip: Chip, processes: Sequence[LocalDevices]) -> Chip:
    """Return the chip with the smallest memory that a runtime reports."""
    reported = [process.memory_bytes for process in processes if process.memory_bytes]
    if not reported:
        return chip
    source = f"{chip.source}; memory as the runtime reports it"
    return msgspec.structs.replace(chip, memory_bytes=min(reported), source=source)


def _device_of(chip: Chip, levels: Sequence[Level]) -> Chip:
    """Return the figures of a device, of which a TPU chip has two in some generations."""
    cores = math.prod(level.size for level in levels if level.name == _CHIP)
    if cores == 1:
        return chip
    return msgspec.structs.replace(
        chip,
        memory_bytes=chip.memory_bytes // cores,
        flops={dtype: rate / cores for dtype, rate in chip.flops.items()},
        bytes_per_s=chip.bytes_per_s / cores,
        source=f"{chip.source}; divided by {cores} devices of a chip",
    )


def _levels(
    processes: Sequence[LocalDevices], chip: Chip
) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    machine = machine_named(chip.name)
    if machine and machine.torus:
        return _of_tpus(processes, chip, machine.torus), ()
    return (
        _of_processes(processes, chip) if chip.platform == "cpu" else _of_hosts(processes, chip),
        _out_of_order(processes),
    )


def _of_hosts(processes: Sequence[LocalDevices], chip: Chip) -> tuple[Level, ...]:
    """Return the levels of GPUs and similar devices; racks that are not full are ignored."""
    per_host: Counter[str] = Counter()
    for process in processes:
        per_host[process.host] += process.devices
    host = host_of(chip)
    if not fills_racks(host, len(per_host)):
        host = msgspec.structs.replace(host, rack=1)
    return of_hosts(host, len(per_host), _equal_count("hosts", per_host), usual_nics(host))


def _of_processes(processes: Sequence[LocalDevices], chip: Chip) -> tuple[Level, ...]:
    """Return the levels of CPUs: processes share memory inside, and use sockets within a host."""
    devices = {str(rank): process.devices for rank, process in enumerate(processes)}
    inside = _equal_count("workers", devices)
    on_host = _equal_count("hosts", Counter(process.host for process in processes))
    hosts = len(processes) // on_host
    host = host_of(chip)
    levels = [
        Level(
            name="process",
            size=inside,
            latency_s=host.latency_s,
            bytes_per_s=host.bytes_per_s,
        ),
        Level(
            name="host",
            size=on_host,
            latency_s=_LOOPBACK_S,
            bytes_per_s=_LOOPBACK_BYTES_PER_S / (inside * on_host),
            alone_bytes_per_s=_LOOPBACK_BYTES_PER_S,
        ),
        network_level("network", hosts, host, inside * on_host, usual_nics(host)),
    ]
    return tuple(level for level in levels if level.size > 1 or level.name == "process")


def _equal_count(what: str, counts: Mapping[str, int]) -> int:
    """Return the common number of devices."""
    if len(set(counts.values())) > 1:
        texts = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise PlanError(
            f"the {what} have different numbers of devices ({texts}), which a mesh "
            "does not allow: start with equal numbers"
        )
    return next(iter(counts.values()))


def _out_of_order(processes: Sequence[LocalDevices]) -> tuple[str, ...]:
    """Return a note if ranks of a host are not consecutive."""
    hosts = [process.host for process in processes]
    runs = 1 + sum(first != second for first, second in pairwise(hosts))
    if runs == len(set(hosts)):
        return ()
    return ("devices are ordered by host, which differs from the order of ranks",)


def _of_tpus(processes: Sequence[LocalDevices], chip: Chip, torus: Torus) -> tuple[Level, ...]:
    slices: dict[int, set[tuple[int, ...]]] = {}
    for rank, process in enumerate(processes):
        if len(process.coords) != process.devices:
            raise PlanError(
                f"rank {rank} reports the coordinates of {len(process.coords)} of its "
                f"{process.devices} TPUs, which links need: give a shape, as in v5e:4x4"
            )
        slices.setdefault(process.slice_index, set()).update(process.coords)
    shapes = {f"slice {index}": _shape(coords, torus) for index, coords in slices.items()}
    if len(set(shapes.values())) > 1:
        texts = ", ".join(f"{name} {written(shape)}" for name, shape in shapes.items())
        raise PlanError(f"slices differ ({texts}), which a mesh does not allow: start equal slices")
    host = host_of(chip)
    shape = next(iter(shapes.values()))
    levels = of_slices(host, torus, shape, len(slices), usual_nics(host))
    cores = sum(process.devices for process in processes) // (math.prod(shape) * len(slices))
    if cores == 1:
        return levels
    inside = Level(name=_CHIP, size=cores, latency_s=host.latency_s, bytes_per_s=host.bytes_per_s)
    return inside, *(_shared(level, cores) for level in levels)


def _shared(level: Level, devices: int) -> Level:
    """Return the level for chips with several devices, which share the links of their chip."""
    return msgspec.structs.replace(level, bytes_per_s=level.bytes_per_s / devices)


def _shape(coords: Collection[tuple[int, ...]], torus: Torus) -> tuple[int, ...]:
    """Return the shape of the box that the chips fill."""
    lines = list(zip(*coords, strict=True))[: len(torus.longest)]
    sides = [max(line) - min(line) + 1 for line in lines]
    if math.prod(sides) != len(coords):
        raise PlanError(
            f"the slice's {len(coords)} TPUs do not fill the box "
            f"{written(tuple(sides))}: start on the whole slice"
        )
    return tuple(sides)


def _with_measured(
    levels: tuple[Level, ...], links: Mapping[str, Link]
) -> tuple[tuple[Level, ...], set[str]]:
    """Return the levels with measured figures, and the names of the measured levels."""
    names = [level.name for level in levels]
    missing = sorted(links.keys() - set(names))
    if missing:
        raise PlanError(
            f"links of {', '.join(missing)} were measured, but the levels are {', '.join(names)}"
        )
    return tuple(_measured(level, links) for level in levels), set(links)


def _measured(level: Level, links: Mapping[str, Link]) -> Level:
    link = links.get(level.name)
    return msgspec.structs.replace(level, **msgspec.structs.asdict(link)) if link else level


def _unmeasured(
    chip: Chip, levels: tuple[Level, ...], measured: Collection[str]
) -> tuple[str, ...]:
    names = [level.name for level in levels if level.size > 1 and level.name not in measured]
    if not names:
        return ()
    host = host_of(chip)
    return (f"links of {', '.join(names)} were not measured ({host.source}; {host.usual})",)
