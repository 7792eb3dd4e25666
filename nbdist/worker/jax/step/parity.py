"""Steps under JAX that `--check` runs on trial."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.worker.data.batches import map_arrays
from nbdist.worker.jax.arrays.checkpoint import on_host
from nbdist.worker.jax.arrays.leaves import gathered
from nbdist.worker.training.parity import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from jax.sharding import Mesh

    from nbdist.worker.data.batches import Batch, Tree
    from nbdist.worker.jax.step.arguments import Arguments
    from nbdist.worker.jax.step.carried import Carried
    from nbdist.worker.training.parity import Values


class PjrtSubject:
    """Trial steps that leave the carried state unchanged.

    Args:
        carried: State that the step carries.
        read: Inputs that it only reads.
        step: Compiled step over all devices.
        pure: The step as a pure function.
        place: Places a batch on the mesh.
        namespace: Namespace of the user; during a trial on one device, `mesh` and other names of
            the step's mesh are a mesh of that device.
        mesh: Mesh of the step.
    """

    def __init__(
        self,
        carried: Sequence[Carried],
        read: Arguments,
        *,
        step: Callable[..., Any],
        pure: Callable[..., Any],
        place: Callable[[Batch], Any],
        namespace: dict[str, Any],
        mesh: Mesh,
    ) -> None:
        self._carried = carried
        self._read = read
        self._step = step
        self._place = place
        self._namespace = namespace
        self._device = jax.make_mesh(
            (1,) * len(mesh.axis_names),
            mesh.axis_names,
            axis_types=mesh.axis_types,
            devices=jax.local_devices()[:1],
        )
        self._meshes = {n for n, value in namespace.items() if value is mesh} | {"mesh"}
        self._alone = jax.jit(functools.partial(pure))  # traced separately from the step

    def state(self) -> Values:
        return self._named([group.arrays for group in self._carried])

    def alone(self, values: tuple[Tree, ...]) -> Outcome:
        state = [group.arrays for group in self._carried]
        arguments = jax.tree.map(self._here, (state, self._read.arrays))
        rows = map_arrays(self._here, values)
        names = {*self._meshes, "strategy"} & self._namespace.keys()
        kept = {name: self._namespace[name] for name in names}
        self._namespace.update(dict.fromkeys(self._meshes, self._device))
        try:
            with jax.set_mesh(self._device):
                report, after = self._alone(*arguments, 1.0, rows)
        finally:
            self._namespace.update(kept)
        return self._outcome(report, after)

    def together(self, batch: Batch) -> Outcome:
        state = [[array.copy() for array in group.arrays] for group in self._carried]
        return self._outcome(*self._step(state, self._read.arrays, 1.0, self._place(batch)))

    def _here(self, array: Any) -> jax.Array:
        """Copy an array to one device of this rank."""
        sharding = jax.NamedSharding(self._device, jax.P())
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            array = gathered(array).addressable_data(0)
        return jax.device_put(array, sharding)

    def _outcome(self, report: dict[str, Any], after: list[list[Any]]) -> Outcome:
        return Outcome({name: _as_numpy(v) for name, v in report.items()}, self._named(after))

    def _named(self, state: list[list[Any]]) -> Values:
        pairs = zip(self._carried, state, strict=True)
        return {
            name: _as_numpy(array)
            for group, arrays in pairs
            for name, array in group.named(arrays).items()
        }


def _as_numpy(array: Any) -> np.ndarray:
    """Copy a whole array to the host; random keys become their data."""
    return on_host(jnp.asarray(array))
