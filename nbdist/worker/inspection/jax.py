"""Reader of JAX's arrays and pytrees, for `worker/inspection/placement.py`."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import default_registry

from nbdist.jaxpr.sharding_constraints import axes_of
from nbdist.records import OWN_RANK, LayoutKind, PlacedDevice
from nbdist.worker.inspection.types import ABSTRACT, DELETED, ArrayLocation, Found, Inside, Mesh
from nbdist.worker.jax.arrays.replicas import PerReplica, Ragged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import NamedSharding, Sharding


class JaxReader:
    """Reader that caches the layout of each sharding: many arrays share one."""

    def __init__(self) -> None:
        self._locations: dict[tuple[Sharding, int, bool], ArrayLocation] = {}
        self._places: dict[str, dict[Any, tuple[int, str]]] = {}

    def read(self, value: Any) -> Found | Inside | None:
        if isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            return Found(value.shape, _written(value.dtype), 0, ABSTRACT)
        if isinstance(value, jax.Array):
            where = DELETED if value.is_deleted() else self._where(value)
            return Found(value.shape, _written(value.dtype), value.nbytes, where)
        if isinstance(value, PerReplica):
            return Inside([((".stacked",), value.stacked)])
        if isinstance(value, Ragged):
            return Inside([((".local()",), value.local())])
        level = default_registry.flatten_one_level_with_keys(value)
        return None if level is None else Inside([((str(key),), part) for key, part in level[0]])

    def _where(self, array: jax.Array) -> ArrayLocation:
        """Return the layout; arrays of one rank share it, except those with an empty dimension."""
        key = array.sharding, array.ndim, 0 in array.shape
        if key not in self._locations:
            self._locations[key] = self._read_sharding(array.sharding, array.shape)
        return self._locations[key]

    def _read_sharding(self, sharding: Sharding, shape: tuple[int, ...]) -> ArrayLocation:
        indices = sharding.devices_indices_map(shape)
        parts, blocks = _blocks(list(indices.values()), shape)
        own = all(device.process_index == jax.process_index() for device in indices)
        devices = tuple(self._device(d, sharding.memory_kind, own=own) for d in indices)
        named = isinstance(sharding, jax.NamedSharding)
        other = not named and len(devices) > 1
        return ArrayLocation(
            kind=_kind(len(devices), math.prod(parts)),
            devices=devices,
            blocks=blocks,
            parts=parts,
            axes=_axes(sharding, len(shape)) if named else (),
            spec=str(sharding.spec) if named else type(sharding).__name__ if other else "",
            mesh=self._mesh(sharding, own=own) if named else None,
        )

    def _mesh(self, sharding: NamedSharding, *, own: bool) -> Mesh:
        mesh = sharding.mesh
        devices = tuple(
            self._device(device, sharding.memory_kind, own=own) for device in mesh.devices.flat
        )
        return Mesh(tuple(map(str, mesh.axis_names)), tuple(mesh.devices.shape), devices)

    def _device(self, device: jax.Device, memory: str | None, *, own: bool) -> PlacedDevice:
        """Number a device within its process; JAX's ids have gaps between processes."""
        if device.platform not in self._places:
            self._places[device.platform] = _numbered(jax.devices(device.platform))
        rank, name = self._places[device.platform][device]
        if memory not in (None, device.default_memory().kind):
            name = f"{name} {memory}"
        return PlacedDevice(OWN_RANK if own else rank, name)


@functools.lru_cache
def _written(dtype: Any) -> str:
    """Format a dtype; cached because NumPy is slow at it."""
    return str(dtype)


def _numbered(devices: Sequence[jax.Device]) -> dict[Any, tuple[int, str]]:
    """Return the rank of each device and its name there."""
    counts: dict[int, int] = {}
    places = {}
    for device in sorted(devices, key=lambda d: d.id):
        number = counts[device.process_index] = counts.get(device.process_index, -1) + 1
        places[device] = device.process_index, f"{device.platform}:{number}"
    return places


def _blocks(
    indices: Sequence[tuple[slice, ...]], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of parts of each dimension, and the block number of each index."""
    starts = [tuple(part.start or 0 for part in index) for index in indices]
    edges = [sorted({start[d] for start in starts}) for d in range(len(shape))]
    order = [{edge: i for i, edge in enumerate(of_one)} for of_one in edges]
    parts = tuple(map(len, edges))
    blocks = []
    for start in starts:
        block = 0
        for dimension, edge in enumerate(start):
            block = block * parts[dimension] + order[dimension][edge]
        blocks.append(block)
    return parts, tuple(blocks)


def _kind(devices: int, pieces: int) -> LayoutKind:
    if devices == 1:
        return "one device"
    return "sharded" if pieces > 1 else "replicated"


def _axes(sharding: NamedSharding, ndim: int) -> tuple[tuple[str, ...], ...]:
    named = [tuple(map(str, axes)) for axes in axes_of(sharding.spec)]
    return (*named, *((),) * (ndim - len(named)))
