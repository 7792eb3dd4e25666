"""Assignment of layers to stages that do not divide them: some stages have one layer less.

All stages run the same program, so each has room for as many layers as the largest one. The last
place of a smaller stage repeats the layer before. Its results are discarded.

A sharding cannot express stages of different sizes. So stages store a stack of layers by another
dimension that they divide (`shared_dimension`), in its own shape and order. Before the layers run,
each stage receives its layers in an all-to-all; gradients return the same way, once in a step.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nbdist.planner.graph.pipeline_schedule import block_size, shared_dimension
from nbdist.records import STAGE


def real_layers(layers: int, stages: int) -> Any:
    """Return, for each place of each stage, whether it has a layer of its own.

    The first stages are the larger ones.

    Returns:
        Flags, [stages, layers of the largest stage].
    """
    each = block_size(layers, stages)
    larger = layers - (each - 1) * stages
    sizes = np.where(np.arange(stages) < larger, each, each - 1)
    return np.arange(each) < sizes[:, None]


def padded(array: Any, stages: int, *, is_sent: bool) -> Any:
    """Return layers by the places of all stages.

    Args:
        array: [layers, ...], in order.
        stages: number of stages.
        is_sent: True if stages of the mesh send each other the layers.
    """
    layers = array.shape[0]
    places = np.cumsum(real_layers(layers, stages)) - 1
    if not is_sent:
        return array[places]
    dim = shared_dimension(array.shape, stages)

    def own(stored: Any) -> Any:
        blocks = stored[places].reshape(stages, -1, *stored.shape[1:])
        if dim < 0:
            return blocks[jax.lax.axis_index(STAGE)]
        received = jax.lax.all_to_all(blocks, STAGE, 0, dim + 1, tiled=True)
        return received[0]

    return _run(own, _stored(dim), jax.P(STAGE), array)


def unpadded(array: Any, layers: int, stages: int, *, is_sent: bool) -> Any:
    """Undo `padded`.

    Args:
        array: [places of all stages, ...].
        layers: number of layers.
        stages: as in `padded`.
        is_sent: as in `padded`.
    """
    (places,) = np.nonzero(real_layers(layers, stages).reshape(-1))
    if not is_sent:
        return array[places]
    dim = shared_dimension((layers, *array.shape[1:]), stages)

    def own(computed: Any) -> Any:
        if dim < 0:
            return jax.lax.all_gather(computed, STAGE, tiled=True)[places]
        return jax.lax.all_to_all(computed, STAGE, dim, 0, tiled=True)[places]

    return _run(own, jax.P(STAGE), _stored(dim), array)


def _stored(dim: int) -> jax.P:
    """Return how stages store a stack."""
    return jax.P(*[None] * dim, STAGE) if dim > 0 else jax.P()


def _run(own: Any, given: jax.P, made: jax.P, array: Any) -> Any:
    run = jax.shard_map(own, in_specs=given, out_specs=made, axis_names={STAGE}, check_vma=False)
    return run(array)
