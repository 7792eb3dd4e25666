"""Keras distribution of a strategy's scope, for Keras 3 on JAX.

Variables are replicated until `fit` shards them (`worker/jax/keras/layout.py`); large variables are
sharded from the start. Batches are split over the mesh. The inputs of `fit`, `evaluate` and
`predict` are equal on every process, unless they come from `distribute_datasets_from_function`.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import keras

from nbdist.worker.jax.keras import patch as keras_patch
from nbdist.worker.jax.keras import saving as keras_saving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.jax.arrays.distributed_dataset import Placement

LARGE = 2**28
"""Size in bytes from which a variable is sharded before its layout is planned."""


@contextlib.contextmanager
def scope(placement: Placement) -> Iterator[None]:
    """Set the Keras distribution of this strategy, and restore the previous one afterwards."""
    if not keras_patch.apply():
        yield
        return
    keras_saving.apply()
    mesh = placement.whole.mesh
    devices = keras.distribution.DeviceMesh(mesh.devices.shape, list(mesh.axis_names), mesh.devices)
    distribution = _Distribution(device_mesh=devices, auto_shard_dataset=False)
    with keras_patch.over(distribution, placement), distribution.scope():
        yield


class _Distribution(keras.distribution.DataParallel):  # type: ignore[misc]
    """Distribution that chooses the layout of new variables."""

    def get_variable_layout(self, variable: Any) -> Any:
        if variable._layout is not None:
            return variable._layout
        sizes, devices = variable.shape, self.device_mesh.devices.size
        fitting = [dim for dim, size in enumerate(sizes) if size and size % devices == 0]
        nbytes = math.prod(sizes) * jnp.dtype(variable.dtype).itemsize
        if devices == 1 or nbytes < LARGE or not fitting:
            return super().get_variable_layout(variable)
        axes: list[str | None] = [None] * len(sizes)
        axes[max(fitting, key=lambda dim: (sizes[dim], -dim))] = self.batch_dim_name
        return keras.distribution.TensorLayout(axes, self.device_mesh)
