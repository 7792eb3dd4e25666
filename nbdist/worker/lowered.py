"""A plan on live devices: its mesh, how each array lies on it, and how batches come there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax

from nbdist.records import DATA, MODEL
from nbdist.worker.data import map_arrays
from nbdist.worker.leaves import Spread
from nbdist.worker.rewritten import rewriting

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh, NamedSharding

    from nbdist.records import Plan, Spec
    from nbdist.worker.data import Batch


class Lowered:
    """What a plan comes to.

    Batches are cut over all devices, whatever the plan, and put together again in the step along
    the model's axis: so its devices cannot have different rows, which nothing would notice.

    Attributes:
        mesh: the strategy's own where the model is not cut.

    Args:
        plan: the plan.
        whole: the strategy's mesh, over all devices, with the one axis `data`.
    """

    def __init__(self, plan: Plan, whole: Mesh) -> None:
        self._data, model = plan.axes[DATA], plan.axes[MODEL]
        self.mesh = whole
        rows: Any = DATA
        if model > 1:
            devices = whole.devices.reshape(self._data, model)
            auto = (jax.sharding.AxisType.Auto,) * 2
            rows = DATA, MODEL
            self.mesh = jax.sharding.Mesh(devices, rows, axis_types=auto)
        self._is_split = model > 1
        self._remat, self._micro = plan.remat, plan.micro
        self.replicated = jax.NamedSharding(self.mesh, jax.P())
        self._specs = {tensor.path: tensor.spec for tensor in plan.tensors}
        self._by_row = Spread(jax.NamedSharding(self.mesh, jax.P(rows)))
        self._whole = Spread(self.replicated)

    def sharding(self, path: str) -> NamedSharding:
        """Of an array of the plan; replicated if it is none."""
        spec: list[tuple[str, ...] | None] = [axes or None for axes in self._specs.get(path, ())]
        while spec and spec[-1] is None:
            spec.pop()
        return jax.NamedSharding(self.mesh, jax.P(*spec))

    def batch(self, batch: Batch) -> Any:
        """A batch on the devices."""
        return map_arrays(self._whole if batch.whole else self._by_row, batch.values)

    def over(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, of which the last argument is a batch as it comes to the devices."""
        if self._remat or self._micro > 1:
            step = rewriting(step, self._remat, self._micro)
        if not self._is_split:
            return step

        def lowered(*others: Any) -> Any:
            batch = jax.tree.map(lambda array: by_data(array, self._data), others[-1])
            return step(*others[:-1], batch)

        return lowered

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Within it the step is traced."""
        return jax.set_mesh(self.mesh) if self._is_split else contextlib.nullcontext()


def by_data(array: jax.Array, data: int) -> jax.Array:
    """An array of a batch, cut over the axis `data` alone, where its rows can be: in a step."""
    if not array.ndim or array.shape[0] % data:
        return array
    return jax.lax.with_sharding_constraint(array, jax.P(DATA))


def is_cut(array: Any, mesh: Mesh) -> bool:
    """Whether an array is cut over the devices of a mesh."""
    if not isinstance(array, jax.Array) or array.is_fully_replicated:
        return False
    return bool(array.sharding.device_set == set(mesh.devices.flat))


def is_over(array: jax.Array, mesh: Mesh) -> bool:
    """Whether it is laid out by the axes of this mesh."""
    return isinstance(array.sharding, jax.NamedSharding) and array.sharding.mesh == mesh


def spec_of(array: jax.Array) -> Spec:
    """How an array is cut, dimension by dimension."""
    assert isinstance(array.sharding, jax.NamedSharding)
    spec = [*array.sharding.spec, *(None,) * array.ndim][: array.ndim]
    return tuple(
        (axes,) if isinstance(axes, str) else tuple(axes) if axes is not None else ()
        for axes in spec
    )
