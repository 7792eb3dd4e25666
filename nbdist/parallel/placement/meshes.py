"""Meshes by the names and sizes of their axes, with the devices in the order of their links."""

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
from nbdist.worker.jax.runtime import processes
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Device


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
    """That of `jax.set_mesh`, else the strategy's, else one axis over all devices."""
    set_one = jax.sharding.get_mesh()
    if not set_one.empty:
        return set_one
    strategy = context.strategies().get("pjrt")
    if strategy is not None:
        own: Mesh = strategy.mesh
        return own
    return Mesh(np.array(jax.devices()), (DATA,), axis_types=(AxisType.Auto,))


def _chosen(devices: Sequence[Device] | None) -> list[Device]:
    chosen = list(jax.devices() if devices is None else devices)
    named = [device for device in chosen if isinstance(device, (str, int))]
    wrong = [f"{device!r} is no device: take some of jax.devices()" for device in named]
    wrong += [f"{d} is there {n} times" for d, n in Counter(chosen).items() if n > 1]
    if wrong or not chosen:
        raise UsageError(f"devices={devices!r}: {'; '.join(wrong) or 'there are none'}")
    return chosen


def _sizes(axes: Mapping[str, int], devices: int) -> dict[str, int]:
    if not isinstance(axes, Mapping) or not axes:
        raise UsageError(
            f'axes={axes!r}: meshes needs names and sizes of axes, as in {{"data": -1, "model": 2}}'
        )
    wrong = [
        f"axis {name!r} has size {size!r}: take a whole number from 1, or -1 for what is left"
        for name, size in axes.items()
        if not isinstance(size, (int, np.integer))
        or isinstance(size, bool)
        or (size < 1 and size != -1)
    ]
    wrong += [f"axis {name!r} is no name: take text" for name in axes if not isinstance(name, str)]
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        wrong.append(f"{' and '.join(map(repr, open_axes))} are both -1: one axis may be")
    if wrong:
        raise UsageError("; ".join(wrong))
    given = math.prod(size for size in axes.values() if size != -1)
    if devices % given or (not open_axes and devices != given):
        said = " x ".join(f"{name} {size}" for name, size in axes.items())
        fitting = [str(size) for size in range(1, devices + 1) if devices % size == 0]
        raise UsageError(
            f"{said} does not multiply out to {devices} devices: sizes that divide them are "
            f"{', '.join(fitting)}, and one axis may be -1"
        )
    return {name: devices // given if size == -1 else int(size) for name, size in axes.items()}


def _is_size(size: object) -> bool:
    whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    return whole and (size == -1 or size >= 1)  # type: ignore[operator]  # whole


def _grid(shape: list[int], devices: list[Device]) -> np.ndarray:
    """Devices of this shape, the innermost axis last."""
    if devices[0].platform != "tpu":
        hosts = processes.hosts()
        ordered = sorted(
            devices, key=lambda d: (hosts.index(hosts[d.process_index]), d.process_index, d.id)
        )
        return np.array(ordered, dtype=object).reshape(shape)
    slices = len({_slice_of(device) for device in devices})
    if slices == 1:
        one: np.ndarray = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
        return one
    across = _across(shape, slices)
    inside = [size // cut for size, cut in zip(shape, across, strict=True)]
    hybrid: np.ndarray = mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, allow_split_physical_axes=True
    )
    return hybrid


def _across(shape: list[int], slices: int) -> list[int]:
    """How often each axis crosses slices: the outermost as often as they can."""
    left, across = slices, []
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    return across


def _slice_of(device: Device) -> int:
    """Of TPUs in several slices, which; see `jax.experimental.mesh_utils`."""
    return int(getattr(device, "slice_index", 0))
