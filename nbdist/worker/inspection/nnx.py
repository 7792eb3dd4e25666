"""Flax NNX objects, as `placement.py` looks at them; JAX's registry opens most of them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.tree_util import default_registry

from nbdist.worker.inspection.types import Inside


def read(value: Any) -> Inside | None:
    """A variable's array, and the variables of modules that were made with `pytree=False`."""
    if isinstance(value, nnx.Variable):
        return Inside([((), value.get_raw_value())])
    if not nnx.graph.is_graph_node(value):
        return None
    if default_registry.flatten_one_level_with_keys(value) is not None:  # it is a pytree
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
