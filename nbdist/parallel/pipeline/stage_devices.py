"""Where the stages of a pipeline run: each on a device, or on a mesh of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.records import DATA
from nbdist.worker.jax.runtime import platforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax import Device
    from jax.sharding import Sharding


@dataclass(frozen=True)
class StagePlace:
    """A stage's function and its place.

    Attributes:
        number: of the stage, from 0.
        function: its name.
        mesh: that it runs on; of one device where it has only that.
    """

    number: int
    function: str
    mesh: Mesh

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset(self.mesh.devices.flat)

    @property
    def where(self) -> str:
        """The names of its devices; of many, the first and the last."""
        names = [platforms.name_of(device) for device in self.mesh.devices.flat]
        return ", ".join(names) if len(names) < 5 else f"{names[0]} ... {names[-1]}"

    @property
    def title(self) -> str:
        return f"stage {self.number} ({self.function}, on {self.where})"

    def of_params(self, leaf: Any) -> Sharding:
        """A leaf's own sharding, where that is over this mesh; else whole on each device."""
        if isinstance(leaf, jax.Array):
            own = leaf.sharding
            if isinstance(own, NamedSharding) and own.mesh == self.mesh:
                return own
        return self._over(PartitionSpec())

    def of_rows(self, leaf: Any) -> Sharding:
        """Rows cut over the first axis; whole on each device where they do not divide."""
        axis = self.mesh.axis_names[0]
        shape = np.shape(leaf)
        cut = bool(shape) and shape[0] % self.mesh.shape[axis] == 0
        return self._over(PartitionSpec(axis) if cut else PartitionSpec())

    def _over(self, spec: PartitionSpec) -> Sharding:
        if self.mesh.size == 1:  # so that arrays are as those of a plain `device_put`
            return SingleDeviceSharding(self.mesh.devices.flat[0])
        return NamedSharding(self.mesh, spec)


def stage_places_of(
    functions: Sequence[Callable[..., Any]], places: Sequence[Device | Mesh] | None
) -> tuple[StagePlace, ...]:
    """A seat for each function.

    Args:
        functions: at least one.
        places: one for each; this process's devices in order, evenly, if None.

    Raises:
        UsageError: there are more or less places, or they are none that this process drives.
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
    """As many devices for each stage; or of stages for each device, within one, next to it."""
    each = len(devices) // stages
    if each:
        return [_mesh(devices[each * stage : each * (stage + 1)]) for stage in range(stages)]
    return [_mesh([devices[stage * len(devices) // stages]]) for stage in range(stages)]


def _mesh(devices: Sequence[Device]) -> Mesh:
    return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))


def _mesh_of(place: Device | Mesh) -> Mesh:
    return place if isinstance(place, Mesh) else _mesh([place])


def _faults(stages: int, places: Sequence[Any]) -> Iterator[str]:
    if isinstance(places, (Mesh, jax.Device)):
        yield f"devices is one {type(places).__name__}: give a list with one for each stage"
        return
    if len(places) != stages:
        yield (
            f"devices has {len(places)} entries for {stages} stages: give one for each, or leave "
            "it out"
        )
    for number, place in enumerate(places):
        if not isinstance(place, (jax.Device, Mesh)):
            yield (
                f"devices[{number}]={place!r} is a {type(place).__name__}: give a jax.Device, or a "
                "jax.sharding.Mesh of several"
            )
        elif not all(map(platforms.is_own, _mesh_of(place).devices.flat)):
            yield (
                f"devices[{number}] is another process's: stages run on devices of their own "
                "process; nbdist.pipelined cuts layers over a mesh of all"
            )
