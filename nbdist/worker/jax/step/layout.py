"""Layout of a step under JAX: planned for its first batch, and applied to its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax

from nbdist.errors import StepError
from nbdist.records import Planning
from nbdist.worker.data.batches import map_arrays
from nbdist.worker.jax.arrays.leaves import placed
from nbdist.worker.jax.step.names import check_numbers
from nbdist.worker.jax.step.own_mesh import OwnMesh, mesh_name, mesh_of
from nbdist.worker.planning.plan_step import (
    MeshWithTarget,
    mesh_to_trace,
    outline,
    plan_of,
    target_of,
)
from nbdist.worker.planning.query import PlanQuery
from nbdist.worker.planning.sharding import is_over, is_sharded, spec_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import Plan, Spec, StepOptions
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.jax.step.function import StepFunction
    from nbdist.worker.planning.sharding import Lowered


class PlannedMesh(MeshWithTarget, Protocol):
    """Part of `PjRTStrategy` that a step uses.

    Attributes:
        outer_mesh: Context mesh that the user has set; None or empty without one.
    """

    outer_mesh: Any

    def note_sharded(self, arrays: Iterable[jax.Array]) -> None:
        """Record that a plan sharded these arrays."""
        ...

    def has_sharded(self, array: jax.Array) -> bool:
        """Return True if a plan, not the user, sharded the array."""
        ...


class StepLayout:
    """Planner of a step's layout; shards its arrays accordingly.

    Args:
        function: Function of the step.
        options: Options of the step.
        strategy: Strategy over all devices of all ranks.
    """

    def __init__(self, function: StepFunction, options: StepOptions, strategy: PlannedMesh) -> None:
        self._function = function
        self._options = options
        self._strategy = strategy
        self._traced_for = mesh_to_trace(options.planning, strategy.mesh)

    def on_own_mesh(self, batch: Batch) -> OwnMesh | None:
        """Return the shardings over the user's mesh that the step's arrays have; None if none.

        The mesh stays the context mesh until the cell ends.

        Raises:
            StepError: The arrays have different meshes, or the cell has options of the planner.
        """
        arrays = self._arrays()
        own = {path: array for path, array in arrays.items() if not self._is_planned(array)}
        mesh = mesh_of(own, self._strategy.mesh, self._strategy.outer_mesh)
        if mesh is None:
            return None
        if self._options.planning != Planning():
            raise StepError(
                f"the step's arrays are over {mesh_name(mesh)}, so that nbdist plans no layout: "
                "remove the layout options, or use arrays without a mesh"
            )
        jax.set_mesh(mesh)
        check_numbers(batch)
        lowered = OwnMesh(mesh, own.values())
        self._function.trace(mesh, lowered.outline(batch))
        return lowered

    def plan(self, batch: Batch) -> Plan:
        """Plan the layout for batches like this one; moves no data.

        Raises:
            PlanError: No layout fits on these devices.
        """
        check_numbers(batch)
        whole = map_arrays(lambda array: outline(array, self._traced_for), batch.everything())
        traced = self._function.trace(self._traced_for, whole)
        full = self._full(whole, batch.rows)
        if full is not whole:
            traced = self._function.trace(self._traced_for, full)
        planning = self._options.planning
        target = target_of(planning, self._strategy)
        return plan_of(
            PlanQuery(traced, self._function.inputs(full), target, planning, self._pinned())
        )

    def place(self, lowered: Lowered | OwnMesh) -> None:
        """Move all arrays of the step to their shardings."""
        held = self._function.names.held

        def at(path: str, array: Any) -> jax.Array:
            stays = self._stays(array, lowered)
            return array if stays else placed(array, lowered.sharding(path))

        def donated(path: str, array: Any) -> jax.Array:
            """Place an array for donation, as a copy if it has other references."""
            leaf = at(path, array)
            if id(leaf) in held or id(array) in held:
                leaf = leaf.copy()
            held.update((id(leaf), id(array)))
            return leaf

        for group in self._function.carried:
            group.place(donated)
        self._function.names.read.place(at)

    def _full(self, batch: Any, rows: int) -> Any:
        """Return the batch with the usual number of rows, since it may be the last of an epoch.

        A run that resumes with such a batch keeps its layout.
        """
        usual = self._options.batch
        if usual in (0, rows):
            return batch

        def larger(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (usual, *leaf.shape[1:]) if leaf.shape[:1] == (rows,) else leaf.shape
            return leaf.update(shape=shape)

        return map_arrays(larger, batch)

    def _pinned(self) -> dict[str, Spec]:
        """Return the specs of arrays that the user sharded over the strategy's mesh."""
        return {
            path: spec_of(array)
            for path, array in self._arrays().items()
            if self._stays(array) and is_over(array.sharding, self._strategy.mesh)
        }

    def _arrays(self) -> dict[str, Any]:
        """Return the arrays that the step carries and reads, by path."""
        read = self._function.names.read
        arrays: dict[str, Any] = dict(self._function.named_arrays())
        for paths, own in zip(read.paths, read.arrays, strict=True):
            arrays |= zip(paths, own, strict=True)
        return arrays

    def _is_planned(self, array: Any) -> bool:
        return isinstance(array, jax.Array) and self._strategy.has_sharded(array)

    def _stays(self, array: Any, lowered: Lowered | OwnMesh | None = None) -> bool:
        """Return True if the user sharded the array; one that an earlier plan sharded may move."""
        if isinstance(lowered, OwnMesh):
            return isinstance(array, jax.Array) and is_over(array.sharding, lowered.mesh)
        return is_sharded(array, self._strategy.mesh) and not self._strategy.has_sharded(array)
