"""The topology of a cluster that runs, of what its processes say."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import PlanError
from nbdist.planner.hardware.links import (
    between,
    fills_racks,
    of_hosts,
    of_slices,
    usual_nics,
    written,
)
from nbdist.planner.hardware.lookup import find, host_of, machine_named, unknown
from nbdist.records import Level, Topology

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nbdist.planner.hardware.catalog import Torus
    from nbdist.records import Chip, Link, LocalDevices

# Between processes of one machine: gloo over the loopback device.
_LOOPBACK_S = 50e-6
_LOOPBACK_BYTES_PER_S = 2e9


def live(
    processes: Sequence[LocalDevices],
    *,
    chip: Chip | None = None,
    links: Mapping[str, Link] | None = None,
) -> Topology:
    """The topology of devices that are there.

    Processes are grouped by the host that they name. What was not measured is the table's, or for
    CPUs and unknown chips assumed; `Topology.assumed` says so. Devices are in the order of the
    levels: by slice, host and rank, of TPUs by their coordinates.

    Args:
        processes: by rank.
        chip: of devices that the table has not, as probed.
        links: measured, by the name of the level.

    Raises:
        PlanError: there are none, they differ, hosts or slices do not hold the same, the chip is
            unknown and was not probed, or a level that was measured is not there.
    """
    if not processes:
        raise PlanError("there are no workers whose devices could be planned for: type %dist_start")
    kind = _one("kinds of device", [process.kind for process in processes])
    known = chip or find(kind)
    if known is None:
        raise PlanError(f"{unknown(kind)}or run %dist_devices --bench on the workers")
    levels, assumed = _levels(processes, known)
    levels, measured = _with_measured(levels, links or {})
    return Topology(
        chip=_with_memory(known, processes),
        levels=levels,
        assumed=(*assumed, *_unmeasured(known, levels, measured)),
    )


def _one(what: str, said: Sequence[str]) -> str:
    """The one thing that all say."""
    counted = Counter(said)
    if len(counted) > 1:
        several = ", ".join(f"{value} (of {times})" for value, times in counted.items())
        raise PlanError(f"the workers have different {what}: {several}; start on like machines")
    return said[0]


def _with_memory(chip: Chip, processes: Sequence[LocalDevices]) -> Chip:
    """The least that a runtime tells takes the table's place."""
    told = [process.memory_bytes for process in processes if process.memory_bytes]
    if not told:
        return chip
    source = f"{chip.source}; memory as the runtime tells"
    return msgspec.structs.replace(chip, memory_bytes=min(told), source=source)


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
    """Of GPUs, and what is taken to be like them; racks that are not full are not counted on."""
    per_host: Counter[str] = Counter()
    for process in processes:
        per_host[process.host] += process.devices
    host = host_of(chip)
    if not fills_racks(host, len(per_host)):
        host = msgspec.structs.replace(host, rack=1)
    return of_hosts(host, len(per_host), _even("hosts", per_host), usual_nics(host))


def _of_processes(processes: Sequence[LocalDevices], chip: Chip) -> tuple[Level, ...]:
    """Of CPUs: devices of a process share its memory, processes of a host speak over sockets."""
    devices = {str(rank): process.devices for rank, process in enumerate(processes)}
    inside = _even("workers", devices)
    on_host = _even("hosts", Counter(process.host for process in processes))
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
        between("network", hosts, host, inside * on_host, usual_nics(host)),
    ]
    return tuple(level for level in levels if level.size > 1 or level.name == "process")


def _even(what: str, counts: Mapping[str, int]) -> int:
    """How many each holds."""
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise PlanError(
            f"the {what} do not hold as many devices as each other ({said}), and a mesh needs them "
            "to: start with as many on each"
        )
    return next(iter(counts.values()))


def _out_of_order(processes: Sequence[LocalDevices]) -> tuple[str, ...]:
    """What to say where ranks of a host are not next to each other."""
    hosts = [process.host for process in processes]
    runs = 1 + sum(first != second for first, second in pairwise(hosts))
    if runs == len(set(hosts)):
        return ()
    return ("devices are in the order of hosts, which is not that of ranks",)


def _of_tpus(processes: Sequence[LocalDevices], chip: Chip, torus: Torus) -> tuple[Level, ...]:
    slices: dict[int, set[tuple[int, ...]]] = {}
    for rank, process in enumerate(processes):
        if len(process.coords) != process.devices:
            raise PlanError(
                f"rank {rank} tells the coordinates of {len(process.coords)} of its "
                f"{process.devices} TPUs, and links go by them: give a shape, as in v5e:4x4"
            )
        slices.setdefault(process.slice_index, set()).update(process.coords)
    shapes = {f"slice {index}": _shape(coords, torus) for index, coords in slices.items()}
    if len(set(shapes.values())) > 1:
        said = ", ".join(f"{name} {written(shape)}" for name, shape in shapes.items())
        raise PlanError(f"slices differ ({said}), and a mesh needs them alike: start like slices")
    host = host_of(chip)
    return of_slices(host, torus, next(iter(shapes.values())), len(slices), usual_nics(host))


def _shape(coords: Collection[tuple[int, ...]], torus: Torus) -> tuple[int, ...]:
    """Of the box that the chips fill."""
    lines = list(zip(*coords, strict=True))[: len(torus.longest)]
    sides = [max(line) - min(line) + 1 for line in lines]
    if math.prod(sides) != len(coords):
        raise PlanError(
            f"the slice's {len(coords)} TPUs are no whole box, whose sides are "
            f"{written(tuple(sides))}: start on the whole slice"
        )
    return tuple(sides)


def _with_measured(
    levels: tuple[Level, ...], links: Mapping[str, Link]
) -> tuple[tuple[Level, ...], set[str]]:
    """The levels with what was measured in place of the table's, and which those are."""
    names = [level.name for level in levels]
    missing = sorted(links.keys() - set(names))
    if missing:
        raise PlanError(
            f"links of {', '.join(missing)} were measured, and the levels are {', '.join(names)}"
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
