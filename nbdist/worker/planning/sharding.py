"""Plan on live devices: its mesh, the shardings of arrays, and the placement of batches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeGuard

import jax

from nbdist.jaxpr.pipeline.schedule import row_axes
from nbdist.jaxpr.sharding_constraints import MeshLayout, axes_of
from nbdist.records import DATA, STAGE
from nbdist.worker.data.batches import map_arrays
from nbdist.worker.jax.arrays.leaves import Spread
from nbdist.worker.planning.rewrite import rewriting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax.sharding import AbstractMesh, Mesh, NamedSharding

    from nbdist.records import Plan, Spec
    from nbdist.worker.data.batches import Batch


class Lowered:
    """Plan lowered to live devices.

    Batches arrive split over all devices, whatever the plan. The step gathers them along the model
    axis. Devices on that axis therefore always have equal rows, and no error goes unnoticed.
    Pipeline stages have separate rows, except in the pipelined layers.

    Attributes:
        mesh: Mesh of the plan; the strategy's own if neither the model nor its layers are split.
        replicas: Number of replicas that share a global batch.

    Args:
        plan: The plan.
        whole: Mesh of the strategy, over all devices, with the single axis `data`.
    """

    def __init__(self, plan: Plan, whole: Mesh) -> None:
        self.mesh = whole
        self.replicas = plan.replicas
        rows: Any = DATA
        self._is_split = plan.devices > plan.axes[DATA]
        if self._is_split:
            rows, sizes = tuple(plan.axes), tuple(plan.axes.values())
            auto = (jax.sharding.AxisType.Auto,) * len(rows)
            self.mesh = jax.sharding.Mesh(whole.devices.reshape(sizes), rows, axis_types=auto)
        self._plan = plan
        self.replicated = jax.NamedSharding(self.mesh, jax.P())
        self._specs = {tensor.path: tensor.spec for tensor in plan.tensors}
        self._by_row = Spread(jax.NamedSharding(self.mesh, jax.P(rows)))
        self._whole = Spread(self.replicated)

    def sharding(self, path: str) -> NamedSharding:
        """Return the sharding of the array at a path; replicated if it is not in the plan."""
        spec: list[tuple[str, ...] | None] = [axes or None for axes in self._specs.get(path, ())]
        while spec and spec[-1] is None:
            spec.pop()
        return jax.NamedSharding(self.mesh, jax.P(*spec))

    def batch(self, batch: Batch) -> Any:
        """Place a batch on the devices."""
        return map_arrays(self._whole if batch.whole else self._by_row, batch.values)

    def over(self, step: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
        """Adapt a step to the plan; its last argument is a batch as it arrives on the devices.

        Args:
            step: The step.
            shardings: Tree with the shardings of the other arguments.
        """
        specs = [
            axes_of(sharding.spec) if is_over(sharding, self.mesh) else ()
            for sharding in jax.tree.leaves(shardings)
        ]
        plan, layout = self._plan, mesh_layout_of(self._plan, self.mesh, specs)
        if plan.remat or plan.micro > 1 or layout is not None:
            stages = plan.axes.get(STAGE, 1)
            places = places_of(plan, self.mesh)
            step = rewriting(step, plan.remat, plan.micro, stages, layout, plan.staging, places)
        if not self._is_split:
            return step

        def lowered(*others: Any) -> Any:
            batch = jax.tree.map(lambda rows: put_together(rows, self.mesh.shape), others[-1])
            return step(*others[:-1], batch)

        return lowered

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which to trace the step."""
        return jax.set_mesh(self.mesh) if self._is_split else contextlib.nullcontext()


def mesh_layout_of(
    plan: Plan, mesh: Mesh | AbstractMesh, specs: Sequence[Spec]
) -> MeshLayout | None:
    """Return the shardings of a step's products and kernels; None if XLA needs none."""
    by_rows = plan.zero == 3 or plan.devices > plan.axes[DATA]
    products, kernels = by_rows or plan.zero > 0, plan.kernels and STAGE not in mesh.shape
    is_needed = products or (kernels and plan.devices > 1)
    layout = MeshLayout(mesh, specs, by_rows, plan.sequence, products, kernels)
    return layout if is_needed else None


def places_of(plan: Plan, mesh: Mesh | AbstractMesh) -> int:
    """Return the number of replicas if each keeps its own sums over microbatches; otherwise 1.

    XLA decides about the places only if the axes of the mesh are automatic.
    """
    is_auto = all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    return plan.replicas if plan.sums_once and is_auto else 1


def put_together(array: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """Gather a batch array along the model axis inside a step, if its rows permit it.

    Args:
        array: Array of a batch.
        sizes: Sizes of the mesh axes.
    """
    axes = row_axes(array.shape[0] if array.ndim else 1, sizes)
    return jax.lax.with_sharding_constraint(array, jax.P(axes)) if axes else array


def is_sharded(array: Any, mesh: Mesh) -> bool:
    """Return True if an array is sharded over the devices of a mesh."""
    if not isinstance(array, jax.Array) or array.is_fully_replicated:
        return False
    return bool(array.sharding.device_set == set(mesh.devices.flat))


def is_over(sharding: jax.sharding.Sharding, mesh: Mesh) -> TypeGuard[jax.NamedSharding]:
    """Return True if a sharding uses the axes of this mesh."""
    return isinstance(sharding, jax.NamedSharding) and sharding.mesh == mesh


def spec_of(array: jax.Array) -> Spec:
    """Return the mesh axes of each dimension of an array."""
    assert isinstance(array.sharding, jax.NamedSharding)
    spec = [*axes_of(array.sharding.spec), *((),) * array.ndim]
    return tuple(spec[: array.ndim])
