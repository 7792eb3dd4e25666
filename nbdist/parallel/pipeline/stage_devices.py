"""Devices of the stages of `nbdist.stages`: one device or one mesh for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.meshes import flat_mesh, names_of
from nbdist.worker.jax.runtime import platforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax import Device
    from jax.sharding import Sharding


@dataclass(frozen=True)
class StagePlace:
    """A stage's function and its devices.

    Attributes:
        number: number of the stage, from 0.
        function: name of the function.
        mesh: its mesh, which may have one device.
    """

    number: int
    function: str
    mesh: Mesh

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset(self.mesh.devices.flat)

    @property
    def where(self) -> str:
        """Names of its devices; of many, the first and the last."""
        return names_of(self.mesh.devices.flat)

    @property
    def title(self) -> str:
        return f"stage {self.number} ({self.function}, on {self.where})"

    def of_params(self, leaf: Any) -> Sharding:
        """Return a leaf's own sharding if it is over this mesh; else a replicated one."""
        if isinstance(leaf, jax.Array):
            own = leaf.sharding
            if isinstance(own, NamedSharding) and own.mesh == self.mesh:
                return own
        return self._over(PartitionSpec())

    def of_rows(self, leaf: Any) -> Sharding:
        """Return a sharding of rows over the first axis; a replicated one if they do not divide."""
        axis = self.mesh.axis_names[0]
        shape = np.shape(leaf)
        divides = bool(shape) and shape[0] % self.mesh.shape[axis] == 0
        return self._over(PartitionSpec(axis) if divides else PartitionSpec())

    def _over(self, spec: PartitionSpec) -> Sharding:
        if self.mesh.size == 1:  # the same as from a plain `device_put`
            return SingleDeviceSharding(self.mesh.devices.flat[0])
        return NamedSharding(self.mesh, spec)


def stage_places_of(
    functions: Sequence[Callable[..., Any]], places: Sequence[Device | Mesh] | None
) -> tuple[StagePlace, ...]:
    """Return the devices of each function.

    Args:
        functions: at least one.
        places: one device or mesh for each; this process's devices in equal parts if None.

    Raises:
        UsageError: the numbers differ, or other processes own the devices.
    """
    if places is None:
        meshes = _shared_out(jax.local_devices(), len(functions))
    else:
        wrong = list(_faults(len(functions), places))
        if wrong:
            raise UsageError("; ".join(wrong))
        meshes = [_mesh_of(place) for place in places]
    return tuple(
        StagePlace(number, getattr(function, "__name__", type(function).__name__), mesh)
        for number, (function, mesh) in enumerate(zip(functions, meshes, strict=True))
    )


def _shared_out(devices: Sequence[Device], stages: int) -> list[Mesh]:
    """Divide devices among stages equally; if stages are more, several use one device."""
    each = len(devices) // stages
    if each:
        return [flat_mesh(devices[each * stage : each * (stage + 1)]) for stage in range(stages)]
    return [flat_mesh([devices[stage * len(devices) // stages]]) for stage in range(stages)]


def _mesh_of(place: Device | Mesh) -> Mesh:
    return place if isinstance(place, Mesh) else flat_mesh([place])


def _faults(stages: int, places: Sequence[Any]) -> Iterator[str]:
    if isinstance(places, (Mesh, jax.Device)):
        yield f"devices is one {type(places).__name__}: give a list with an entry for each stage"
        return
    if len(places) != stages:
        yield (
            f"devices has {len(places)} entries for {stages} stages: give one for each, or omit it"
        )
    for number, place in enumerate(places):
        if not isinstance(place, (jax.Device, Mesh)):
            yield (
                f"devices[{number}]={place!r} has type {type(place).__name__}: give a jax.Device, "
                "or a jax.sharding.Mesh of several"
            )
        elif not all(map(platforms.is_own, _mesh_of(place).devices.flat)):
            yield (
                f"devices[{number}] belongs to another process, and stages use devices of "
                "one process: use nbdist.pipelined to shard layers over a mesh of all"
            )
