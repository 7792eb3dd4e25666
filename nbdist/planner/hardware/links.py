"""Levels of links: of usual hosts, and of slices of TPUs."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.records import Level
from nbdist.records.base import Record

if TYPE_CHECKING:
    from nbdist.planner.hardware.machine import Host, Torus

AXES = "xyz"


class Nics(Record, frozen=True):
    """Network interfaces of a host; `each_bytes_per_s` one way."""

    count: int
    each_bytes_per_s: float


def usual_nics(host: Host) -> Nics:
    return Nics(count=host.nics, each_bytes_per_s=host.nic_bytes_per_s)


def of_hosts(host: Host, hosts: int, devices: int, nics: Nics) -> tuple[Level, ...]:
    """Return the levels of `hosts` with `devices` each: host, rack if links join more, network.

    Raises:
        PlanError: the hosts do not fill racks.
    """
    if not fills_racks(host, hosts):
        full = hosts // host.rack * host.rack
        raise PlanError(
            f"{hosts} hosts do not fill racks of {host.rack}: take {full} or {full + host.rack}"
        )
    racked = min(hosts, host.rack)
    rest = hosts // racked
    inside = _inside("host", devices, host)
    rack = (_inside("rack", racked, host),) if racked > 1 else ()
    network = (network_level("network", rest, host, devices, nics),) if rest > 1 else ()
    return (inside, *rack, *network)


def fills_racks(host: Host, hosts: int) -> bool:
    """Return True if all racks are full, or there is only one."""
    return hosts < host.rack or hosts % host.rack == 0


def _inside(name: str, size: int, host: Host) -> Level:
    return Level(name=name, size=size, latency_s=host.latency_s, bytes_per_s=host.bytes_per_s)


def network_level(name: str, size: int, host: Host, devices: int, nics: Nics) -> Level:
    """Return the level between hosts or slices; each host has `devices` devices.

    One device alone is limited by a NIC, or by its link to the NIC. If all send, they share the
    NICs of the host.
    """
    alone = min(nics.each_bytes_per_s, host.pcie_bytes_per_s)
    shared = nics.count * nics.each_bytes_per_s / devices
    return Level(
        name=name,
        size=size,
        latency_s=host.network_latency_s,
        bytes_per_s=min(shared, alone),
        alone_bytes_per_s=alone,
    )


def of_slices(
    host: Host, torus: Torus, shape: tuple[int, ...], slices: int, nics: Nics
) -> tuple[Level, ...]:
    """Return the levels of slices: an axis each, closed rings innermost, and the network (DCN).

    Axes of one chip are no levels, unless all axes are.
    """
    axes = [_axis(index, shape, host, torus) for index in range(len(shape))]
    long = [axis for axis in axes if axis.size > 1] or axes[:1]
    inner = sorted(long, key=lambda axis: not axis.wraps)
    devices = min(host.devices, math.prod(shape))
    outer = (network_level("DCN", slices, host, devices, nics),) if slices > 1 else ()
    return (*inner, *outer)


def _axis(index: int, shape: tuple[int, ...], host: Host, torus: Torus) -> Level:
    return Level(
        name=f"{host.link} {AXES[index]}",
        size=shape[index],
        latency_s=host.latency_s,
        bytes_per_s=host.bytes_per_s,
        ring=True,
        wraps=wraps(index, shape, torus),
    )


def wraps(index: int, shape: tuple[int, ...], torus: Torus) -> bool:
    """Return True if the last chip of an axis is the neighbour of the first one.

    Optical switches close the rings of slices made of whole cubes. Without them, only an axis as
    long as the pod's is closed. Source: jax-ml/scaling-book tpus.md.
    """
    if torus.cube:
        return all(size % torus.cube == 0 for size in shape)
    return shape[index] == torus.longest[index]


def check_shape(name: str, shape: tuple[int, ...], torus: Torus) -> tuple[int, ...]:
    """Return the shape as published: the shortest axis first if there are no cubes.

    Raises:
        PlanError: slices of `name` have no such shape.
    """
    dimensions = len(torus.longest)
    if len(shape) != dimensions:
        raise PlanError(
            f"{name} has {dimensions} axes, and {written(shape)} has {len(shape)}: {_shapes(torus)}"
        )
    found = shape if torus.cube else tuple(sorted(shape))
    if found not in torus.shapes and not _of_cubes(found, torus):
        raise PlanError(f"{name} has no slices of {written(shape)}: {_shapes(torus)}")
    return found


def _of_cubes(shape: tuple[int, ...], torus: Torus) -> bool:
    fits = all(
        size <= most for size, most in zip(sorted(shape), sorted(torus.longest), strict=True)
    )
    return bool(torus.cube) and fits and all(size and size % torus.cube == 0 for size in shape)


def _shapes(torus: Torus) -> str:
    small = "its slices are " + ", ".join(map(written, torus.shapes))
    if not torus.cube:
        return small
    return f"{small}, and multiples of {torus.cube} up to {written(torus.longest)}"


def written(shape: tuple[int, ...]) -> str:
    """Return the shape as text, `4x4x8`."""
    return "x".join(map(str, shape))


def shape_for(devices: int, torus: Torus) -> str:
    """Return a shape of this number of chips, `4x4`; empty if no slice has it.

    Of several shapes made of cubes, it is the one whose axes differ least.
    """
    fitting = [shape for shape in torus.shapes if math.prod(shape) == devices]
    if not fitting and torus.cube:
        side, most = torus.cube, sorted(torus.longest)
        lengths = (range(side, longest + 1, side) for longest in most)
        of_cubes = (tuple(sorted(shape)) for shape in itertools.product(*lengths))
        found = (shape for shape in of_cubes if math.prod(shape) == devices)
        fitting = [min(found, key=lambda shape: shape[-1] - shape[0], default=())]
    return written(fitting[0]) if fitting else ""
