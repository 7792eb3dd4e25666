"""Reader of Flax NNX objects, for `placement.py`. JAX's registry handles most of them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.tree_util import default_registry

from nbdist.worker.inspection.types import Inside


def read(value: Any) -> Inside | None:
    """Return the array of a variable, or the variables of a module with `pytree=False`."""
    if isinstance(value, nnx.Variable):
        return Inside([((), value.get_raw_value())])
    if not nnx.graph.is_graph_node(value):
        return None
    if (
        default_registry.flatten_one_level_with_keys(value) is not None
    ):  # a pytree: JaxReader reads it
        return None
    return Inside(
        [
            (tuple(map(_written, path)), part)
            for path, part in nnx.iter_graph(value, graph=True)
            if isinstance(part, (nnx.Variable, jax.Array))
        ]
    )


def _written(key: Any) -> str:
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"
