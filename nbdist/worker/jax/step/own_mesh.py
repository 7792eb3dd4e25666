"""Step over a mesh of the user: its arrays keep their shardings, and nothing is planned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType

from nbdist.errors import StepError
from nbdist.records import DATA, MODEL, REPLICATE, STAGE
from nbdist.worker.data.batches import map_arrays
from nbdist.worker.jax.arrays.leaves import Spread
from nbdist.worker.jax.runtime.platforms import by_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from jax.sharding import Mesh, NamedSharding

    from nbdist.worker.data.batches import Batch

_PLANNED_AXES = {DATA, MODEL, REPLICATE, STAGE}


class OwnMesh:
    """Shardings of a step over a mesh of the user, with the methods of `Lowered`.

    Batches arrive split over all devices. The step then shards their rows over the axes that its
    other arrays do not use. If these use all axes, it shards the rows over all axes.

    Attributes:
        mesh: The mesh.
        replicated: Sharding of an array that is whole on every device.
        replicas: Number of parts of a batch.

    Args:
        mesh: Mesh of the user over all devices.
        arrays: Arrays that the step carries and reads.
    """

    def __init__(self, mesh: Mesh, arrays: Iterable[Any]) -> None:
        self.mesh = mesh
        self.replicated = jax.NamedSharding(mesh, jax.P())
        used = {axis for array in arrays for axis in _axes(array, mesh)}
        self._rows = tuple(axis for axis in mesh.axis_names if axis not in used) or mesh.axis_names
        self.replicas = math.prod(mesh.shape[axis] for axis in self._rows)
        self._by_row = _ByRow(mesh)
        self._whole = Spread(self.replicated)

    def sharding(self, path: str) -> NamedSharding:
        """Return the sharding of an array that the user has not put on this mesh."""
        del path
        return self.replicated

    def batch(self, batch: Batch) -> Any:
        """Place a batch on the devices."""
        return map_arrays(self._whole if batch.whole else self._by_row, batch.values)

    def outline(self, batch: Batch) -> Any:
        """Return the shapes and shardings of a batch in the step."""
        rows = self.replicated if batch.whole else jax.NamedSharding(self.mesh, self._spec)
        return map_arrays(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, jax.dtypes.canonicalize_dtype(array.dtype), sharding=rows
            ),
            batch.everything(),
        )

    def over(self, step: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
        """Shard the rows of a step's last argument, a batch as it arrives on the devices."""
        del shardings
        if self._rows == self.mesh.axis_names:
            return step

        def sharded(*others: Any) -> Any:
            batch = jax.tree.map(self._by_rows, others[-1])
            return step(*others[:-1], batch)

        return sharded

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which to trace the step."""
        context: AbstractContextManager[object] = jax.set_mesh(self.mesh)
        return context

    @property
    def _spec(self) -> jax.P:
        return jax.P(self._rows)

    def _by_rows(self, array: Any) -> Any:
        if array.ndim == 0 or jax.typeof(array).shape[0] % self.mesh.size:
            return array
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.sharding.reshard(array, self._spec)
        return jax.lax.with_sharding_constraint(array, self._spec)


class _ByRow:
    """Placement of a process's rows of a batch on a mesh, over all its axes.

    If the mesh does not have the devices in the order of processes, as one along a torus of TPUs,
    the rows arrive in this order and are then moved. Each row keeps its place in the batch.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._sharding = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        devices = np.array(by_process(list(mesh.devices.flat)), dtype=object)
        self._moves = devices.tolist() != list(mesh.devices.flat)
        arrival = jax.NamedSharding(jax.sharding.Mesh(devices, (DATA,)), jax.P(DATA))
        self._spread = Spread(arrival if self._moves else self._sharding)

    def __call__(self, array: Any) -> jax.Array:
        placed = self._spread(array)
        return jax.device_put(placed, self._sharding) if self._moves else placed


def mesh_of(arrays: Mapping[str, Any], ours: Mesh, default: Mesh | None) -> Mesh | None:
    """Return the user's mesh that a step runs over; None for nbdist's.

    A planned step supports arrays over automatic meshes with the axis names of plans.

    Args:
        arrays: Arrays of the step that no plan has sharded, by path.
        ours: Mesh of nbdist over all devices.
        default: Mesh that the user has set, for arrays without a mesh.

    Raises:
        StepError: The arrays are over different meshes, or over some of the devices only.
    """
    found: dict[Mesh, str] = {}
    for path, array in arrays.items():
        mesh = _own(array, ours)
        if mesh is not None:
            found.setdefault(mesh, path)
    if not found and default is not None and not default.empty:
        found = {default: "jax.set_mesh"} if default != ours else {}
    if all(_is_planned(mesh) for mesh in found):
        return None
    shared = {
        array.sharding.mesh: path
        for path, array in arrays.items()
        if isinstance(array, jax.Array)
        and isinstance(array.sharding, jax.NamedSharding)
        and array.sharding.mesh == ours
        and not array.is_fully_replicated
    }
    (first, path), *others = [*found.items(), *shared.items()]
    if others:
        raise StepError(
            f"the step uses arrays over two meshes: `{path}` over {mesh_name(first)} and "
            f"`{others[0][1]}` over {mesh_name(others[0][0])}. Move one: "
            "jax.device_put(x, jax.NamedSharding(mesh, jax.P(...)))"
        )
    if {*first.devices.flat} != {*ours.devices.flat}:
        raise StepError(
            f"`{path}` is over {mesh_name(first)}, with {first.size} of {ours.size} devices, but a "
            "step runs on all: make the mesh of all devices, jax.make_mesh((jax.device_count(),), "
            '("data",))'
        )
    return first


def _own(array: Any, ours: Mesh) -> Mesh | None:
    """Return the mesh of an array over several devices, other than nbdist's."""
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, jax.NamedSharding):
        return None
    mesh = array.sharding.mesh
    is_own = isinstance(mesh, jax.sharding.Mesh) and mesh.size > 1 and mesh != ours
    return mesh if is_own else None


def _is_planned(mesh: Mesh) -> bool:
    """Return True if a planned step supports arrays over this mesh."""
    is_auto = all(kind == AxisType.Auto for kind in mesh.axis_types)
    return is_auto and {*mesh.axis_names} <= _PLANNED_AXES


def _axes(array: Any, mesh: Mesh) -> Iterable[str]:
    """Return the axes of a mesh that an array is sharded over."""
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, jax.NamedSharding):
        return ()
    if array.sharding.mesh != mesh:
        return ()
    parts = (part for part in array.sharding.spec if part is not None)
    return [axis for part in parts for axis in ((part,) if isinstance(part, str) else part)]


def mesh_name(mesh: Mesh) -> str:
    """Describe a mesh: `the mesh (data: 2; Auto)`."""
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    kinds = ", ".join(dict.fromkeys(str(kind.name) for kind in mesh.axis_types))
    return f"the mesh ({axes}; {kinds})"
