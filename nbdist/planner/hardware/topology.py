"""Topologies from text, descriptions of topologies, and extents of mesh axes in them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.hardware.links import (
    Nics,
    check_shape,
    of_hosts,
    of_slices,
    shape_for,
    usual_nics,
    written,
)
from nbdist.planner.hardware.lookup import host_of, machine_named, normalized, unknown
from nbdist.planner.hardware.machine_types import MACHINE_TYPES, slice_named
from nbdist.planner.hardware.topology_file import SUFFIXES, from_file
from nbdist.records import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.hardware.machine import Machine
    from nbdist.records import Extent, Level

_TIMES = r"\s*[xX*\u00d7]\s*"
_HOSTS = re.compile(rf"(\d+)\s*hosts?{_TIMES}(\d+)(?:{_TIMES}|\s+)(\D.*)", re.IGNORECASE)
_SLICES = re.compile(rf"(?:(\d+){_TIMES})?([^:]+):\s*(\d+(?:{_TIMES}\d+)*)")
_DEVICES = re.compile(rf"(?:(\d+)(?:{_TIMES}|\s+))?(\D.*)")
_RATE = re.compile(
    rf"(?:(\d+){_TIMES})?(\d+(?:\.\d+)?)\s*([KMGTkmgt])(bit/s|bits/s|b/s|bps|B/s|Bps)"
)
_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RACK = "NVL72"
_EXAMPLES = (
    "32xH100, 4 hosts x 8 A100, 25 Gbps, v5e:16x16, 2 x v5e:16x16, v5p-128, p4d.24xlarge, or a "
    "file's path"
)


def parse(text: str) -> Topology:
    """Return the topology that a text describes, or that of a file.

    `32xH100` is hosts of the usual size, or a part of one. `4 hosts x 8 A100, 25 Gbps` sets the
    size, and the bandwidth of a host one way (`8x200 Gb/s` with as many NICs). `v5e:16x16` is a
    slice of TPUs, and `2 x v5e:16x16` two slices over the data center's network. Names of providers
    are `4 x p4d.24xlarge`, `a3-highgpu-8g`, `v5p-128` and `v5litepod-16`.

    Raises:
        PlanError: the text is not understood, or names unknown or unavailable hardware.
    """
    stripped = text.strip()
    if stripped.lower().endswith(SUFFIXES):
        return from_file(Path(stripped).expanduser())
    head, comma, tail = stripped.partition(",")
    nics = _nics(tail.strip()) if comma else None
    head = head.strip()
    if match := _SLICES.fullmatch(head):
        shape = tuple(map(int, re.split(_TIMES, match[3])))
        return _slices(int(match[1] or 1), match[2].strip(), shape, nics)
    if match := _HOSTS.fullmatch(head):
        return _hosts(int(match[1]), int(match[2]), _machine(match[3].strip()), nics)
    if match := _DEVICES.fullmatch(head):
        named = _named_by_provider(int(match[1] or 1), match[2].strip(), nics)
        if named is not None:
            return named
        return _devices(int(match[1] or 1), match[2].strip(), nics)
    raise PlanError(f"{text!r} describes no devices: use {_EXAMPLES}")


def _named_by_provider(count: int, name: str, nics: Nics | None) -> Topology | None:
    """Return `count` machines or slices of a provider's name; None if it is no such name."""
    machine_type, found = MACHINE_TYPES.get(name.lower()), slice_named(name)
    if machine_type is not None:
        network = nics or _nics(machine_type.network)
        return _hosts(count, machine_type.devices, _machine(machine_type.chip), network)
    if found is None:
        return None
    torus = _machine(found.chip).torus
    assert torus is not None
    shape = shape_for(found.chips, torus)
    if not shape:
        raise PlanError(
            f"{found.chip} has no slices of {found.chips} chips ({name}): state the shape, as in "
            f"{found.chip.removeprefix('TPU ')}:{written(torus.shapes[-1])}"
        )
    return _slices(count, found.chip, tuple(map(int, shape.split("x"))), nics)


def _nics(text: str) -> Nics:
    match = _RATE.fullmatch(text)
    if not match or not float(match[2]) or match[1] == "0":
        raise PlanError(
            f"{text!r} is not a network bandwidth: use 25 Gbps, 8x200 Gb/s or 12.5 GB/s"
        )
    unit = 1 if match[4].startswith("B") else 1 / 8
    return Nics(
        count=int(match[1] or 1),
        each_bytes_per_s=float(match[2]) * _SCALES[match[3].lower()] * unit,
    )


def _machine(name: str) -> Machine:
    machine = machine_named(name)
    if machine is None:
        raise PlanError(unknown(name))
    return machine


def _devices(count: int, name: str, nics: Nics | None) -> Topology:
    """Return full hosts of the usual size, or one host that is not full."""
    racked = normalized(name).removeprefix("gb200") == normalized(_RACK)
    machine = _machine("GB200" if racked else name)
    total = count * 72 if racked else count
    _check_shapeless(machine, total)
    usual = machine.host.devices
    if total > usual and total % usual:
        full = total // usual * usual
        raise PlanError(
            f"{total} x {machine.chip.name} do not fill hosts of {usual}: use "
            f"{full}x{machine.chip.name} or {full + usual}x{machine.chip.name}, or "
            f"state the hosts, as in 3 hosts x 4 {machine.chip.name}"
        )
    return _hosts(max(1, total // usual), min(total, usual), machine, nics)


def _check_shapeless(machine: Machine, devices: int) -> None:
    if machine.torus:
        name = machine.chip.name
        proposed = shape_for(devices, machine.torus) or written(machine.torus.longest)
        raise PlanError(f"slices of {name} have a shape: use {name}:{proposed}")


def _hosts(hosts: int, devices: int, machine: Machine, nics: Nics | None) -> Topology:
    name = machine.chip.name
    _check_shapeless(machine, hosts * devices)
    if not hosts or not devices:
        raise PlanError(f"need at least 1 x {name}, got 0: use 1 x {name} or more")
    levels = of_hosts(machine.host, hosts, devices, nics or usual_nics(machine.host))
    return Topology(chip=machine.chip, levels=levels, assumed=_assumed(machine, levels, nics))


def _assumed(machine: Machine, levels: tuple[Level, ...], nics: Nics | None) -> tuple[str, ...]:
    """Return descriptions of the figures that were assumed."""
    host = machine.host
    inner = [level for level in levels if level.alone_bytes_per_s is None and level.size > 1]
    lines = [f"{host.link} {_rate(host.bytes_per_s)} one way ({host.source})"] if inner else []
    if levels[-1].alone_bytes_per_s and nics is None:
        each = _rate(host.nic_bytes_per_s)
        lines.append(f"{host.nics} x {each} a host, to others ({host.usual})")
    return tuple(lines)


def _slices(slices: int, name: str, shape: tuple[int, ...], nics: Nics | None) -> Topology:
    machine = _machine(name)
    torus = machine.torus
    if torus is None:
        raise PlanError(
            f"{machine.chip.name} has no slices with a shape: use "
            f"{max(1, math.prod(shape))}x{machine.chip.name}"
        )
    if not slices:
        raise PlanError(f"need at least 1 slice, got 0: use {name}:{written(shape)}")
    checked = check_shape(machine.chip.name, shape, torus)
    levels = of_slices(machine.host, torus, checked, slices, nics or usual_nics(machine.host))
    rings = f"which axes are closed rings ({torus.source})"
    return Topology(
        chip=machine.chip, levels=levels, assumed=(*_assumed(machine, levels, nics), rings)
    )


def describe(topology: Topology) -> str:
    """Return one line: `32 x H100, 79 GiB each: 4 hosts of 8, NVLink 4 450 GB/s, ...`."""
    chip = topology.chip
    memory = f"{chip.memory_bytes / 2**30:.3g} GiB each"
    parts = ", ".join([_counts(topology), *_links(topology)])
    return f"{topology.devices} x {chip.name}, {memory}: {parts}"


def _counts(topology: Topology) -> str:
    """Return the numbers of hosts and their devices, or of slices and their shape."""
    axes = sorted(level for level in _named(topology) if level[0].startswith("ICI "))
    if axes:
        slices = dict(_named(topology)).get("DCN", 1)
        shape = "x".join(str(size) for _, size in axes)
        return f"{slices} slice{'s' * (slices > 1)} of {shape}"
    if topology.levels[0].name != "host":
        return " x ".join(f"{level.name} of {level.size}" for level in topology.levels)
    inside = topology.levels[0].size
    hosts = topology.devices // inside
    return f"{hosts} host{'s' * (hosts > 1)} of {inside}"


def _named(topology: Topology) -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in topology.levels]


def _links(topology: Topology) -> list[str]:
    """Return the rate of each kind of links, once for equal levels."""
    host = host_of(topology.chip)
    rates: dict[str, str] = {}
    for level in topology.levels:
        if level.ring:
            rates[host.link] = f"{host.link} {_rate(level.bytes_per_s)} a link"
        elif level.name in {"host", "rack"} and level.bytes_per_s == host.bytes_per_s:
            rates[host.link] = f"{host.link} {_rate(level.bytes_per_s)}"
        else:
            rates[level.name] = f"{level.name} {_rate(level.bytes_per_s)} a device"
    return list(rates.values())


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def extents(axes: Mapping[str, int], topology: Topology) -> dict[str, Extent]:
    """Return the extent of each mesh axis: its size within each level.

    Axes are assigned as in `jax.make_mesh` over devices in the order of the levels: the last axis
    is innermost. Let devices of an axis be `stride` apart. An aligned run of `run` of them is
    within a block of a level if `stride * run` divides the block. The longest such run that divides
    the axis is its size within that level and the inner ones. If sizes do not divide each other,
    the extent is the part that is certain to be within. An axis of 6 over hosts of 4 is `(2, 3)`.
    An axis whose stride crosses hosts unevenly is wholly across them.

    Args:
        axes: sizes by name, outermost first.
        topology: the topology, which the axes cover in full.

    Raises:
        PlanError: the product of the sizes is not the number of devices.
    """
    total = math.prod(axes.values())
    if total != topology.devices or min(axes.values(), default=1) < 1:
        product = " x ".join(f"{name} {size}" for name, size in axes.items()) or "no axes"
        raise PlanError(
            f"{product} is {total}, and there are {topology.devices} devices: the "
            f"product of the axes must be {topology.devices}"
        )
    found = {}
    stride = 1
    for name, size in reversed(list(axes.items())):
        found[name] = _extent(size, stride, topology)
        stride *= size
    return {name: found[name] for name in axes}


def _extent(size: int, stride: int, topology: Topology) -> Extent:
    factors = []
    within = block = 1
    for level in topology.levels:
        block *= level.size
        run = 1 if block % stride else math.gcd(size, block // stride)
        factors.append(run // within)
        within = run
    return tuple(factors)
