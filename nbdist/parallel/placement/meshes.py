"""Meshes from names and sizes of axes, with devices ordered by their links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from nbdist.errors import UsageError
from nbdist.parallel.placement.axes import ROLES, role_of
from nbdist.records import DATA
from nbdist.worker.jax.runtime import platforms, processes
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jax import Device

_SHOWN = 4
"""Names of devices in a line; of more, the first and the last."""


def meshes(axes: Mapping[str, int], devices: Sequence[Device] | None = None) -> Mesh:
    """Return a mesh in which axes that send the most use the fastest links.

    An axis called `model`, `tensor`, `tp` or `mp` is innermost, on devices of one process or host.
    Then follow `sequence`, `fsdp`, `expert`, other names and `data`; `stage` or `pipeline` is
    outermost. On TPUs, `jax.experimental.mesh_utils` assigns devices along the torus, and outermost
    axes cross slices. `nbdist.where(mesh)` shows the links.

    Args:
        axes: Number of devices along each axis, by name. One of them may be -1: the rest.
        devices: The devices. Default: all of the default platform, of all processes.

    Returns:
        `jax.sharding.Mesh` with the axes in the given order and automatic axis types, for
        `jax.set_mesh` and `NamedSharding`.

    Raises:
        UsageError: The product of the sizes is not the number of devices; each fault is named.

    Examples:
        >>> mesh = nbdist.meshes({"data": -1, "model": 2})
        >>> mesh.shape["data"], mesh.shape["model"]
        (4, 2)
        >>> nbdist.where(mesh)["model"].links
        "inside each process: memory, or the host's own links between devices"
    """
    chosen = _chosen(devices)
    sizes = _sizes(axes, len(chosen))
    order = sorted(sizes, key=lambda axis: ROLES.index(role_of(axis)))
    grid = _grid([sizes[axis] for axis in order], chosen)
    turned = grid.transpose([order.index(axis) for axis in sizes])
    return Mesh(turned, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def current_mesh() -> Mesh:
    """Return the mesh of `jax.set_mesh`, else the strategy's, else one axis over all devices."""
    set_one = jax.sharding.get_mesh()
    if not set_one.empty:
        return set_one
    strategy = context.strategies().get("pjrt")
    if strategy is not None:
        own: Mesh = strategy.mesh
        return own
    return flat_mesh(jax.devices())


def flat_mesh(devices: Sequence[Device]) -> Mesh:
    """Return a mesh of one axis, `data`, over these devices."""
    return Mesh(np.array(devices, dtype=object), (DATA,), axis_types=(AxisType.Auto,))


def names_of(devices: Iterable[Device]) -> str:
    """Return the devices' names; of more than four, the first and the last."""
    names = [platforms.name_of(device) for device in devices]
    return ", ".join(names if len(names) <= _SHOWN else (names[0], "...", names[-1]))


def _chosen(devices: Sequence[Device] | None) -> list[Device]:
    chosen = list(jax.devices() if devices is None else devices)
    named = [device for device in chosen if isinstance(device, (str, int))]
    wrong = [f"{device!r} is not a device: use some of jax.devices()" for device in named]
    wrong += [f"{d} is listed {n} times" for d, n in Counter(chosen).items() if n > 1]
    if wrong or not chosen:
        raise UsageError(f"devices={devices!r}: {'; '.join(wrong) or 'there are none'}")
    return chosen


def _sizes(axes: Mapping[str, int], devices: int) -> dict[str, int]:
    if not isinstance(axes, Mapping) or not axes:
        raise UsageError(
            f'axes={axes!r}: meshes needs names and sizes of axes, as in {{"data": -1, "model": 2}}'
        )
    wrong = [
        (
            f"axis {name!r} has size {size!r}: use a whole number from 1, or -1 for "
            "the remaining devices"
        )
        for name, size in axes.items()
        if not isinstance(size, (int, np.integer))
        or isinstance(size, bool)
        or (size < 1 and size != -1)
    ]
    wrong += [
        f"axis {name!r} is not a name: use a string" for name in axes if not isinstance(name, str)
    ]
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        wrong.append(f"{' and '.join(map(repr, open_axes))} are both -1: use it for one axis")
    if wrong:
        raise UsageError("; ".join(wrong))
    given = math.prod(size for size in axes.values() if size != -1)
    if devices % given or (not open_axes and devices != given):
        sizes = " x ".join(f"{name} {size}" for name, size in axes.items())
        fitting = [str(size) for size in range(1, devices + 1) if devices % size == 0]
        raise UsageError(
            f"{sizes} does not multiply out to {devices} devices: sizes that divide them are "
            f"{', '.join(fitting)}, and one axis may be -1"
        )
    return {name: devices // given if size == -1 else int(size) for name, size in axes.items()}


def _grid(shape: list[int], devices: list[Device]) -> np.ndarray:
    """Return devices in this shape, the innermost axis last."""
    if devices[0].platform != "tpu":
        hosts = processes.hosts()
        ordered = sorted(
            devices, key=lambda d: (hosts.index(hosts[d.process_index]), d.process_index, d.id)
        )
        return np.array(ordered, dtype=object).reshape(shape)
    slices = len({slice_of(device) for device in devices})
    if slices == 1:
        one: np.ndarray = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
        return one
    across = _across(shape, slices)
    inside = [size // parts for size, parts in zip(shape, across, strict=True)]
    hybrid: np.ndarray = mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, allow_split_physical_axes=True
    )
    return hybrid


def _across(shape: list[int], slices: int) -> list[int]:
    """Return how often each axis crosses slices: outer axes as often as possible."""
    left, across = slices, []
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    return across


def slice_of(device: Device) -> int:
    """Return the slice of a TPU; see `jax.experimental.mesh_utils`."""
    return int(getattr(device, "slice_index", 0))
