"""Keras 3 on JAX over the mesh of a strategy: what is set in its scope.

Variables are on every device; a planner's choice of shardings enters in `scope`. Batches are cut
over the mesh, and everything that `fit`, `evaluate` and `predict` are given is the same on every
process, unless it came from `distribute_datasets_from_function`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import keras

from nbdist.worker import keras_jax_patch, keras_jax_save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.distributed_data import Placement


@contextlib.contextmanager
def scope(placement: Placement) -> Iterator[None]:
    """Keras's distribution is ours; the one that was set before is set again afterwards.

    The only place that decides how a variable is sharded: `DataParallel` replicates all. With
    `keras.distribution.ModelParallel` instead, a `LayoutMap` of paths and axes would decide.
    """
    if not keras_jax_patch.apply():
        yield
        return
    keras_jax_save.apply()
    mesh = placement.whole.mesh
    devices = keras.distribution.DeviceMesh(mesh.devices.shape, list(mesh.axis_names), mesh.devices)
    distribution = keras.distribution.DataParallel(device_mesh=devices, auto_shard_dataset=False)
    with keras_jax_patch.over(distribution, placement), distribution.scope():
        yield
