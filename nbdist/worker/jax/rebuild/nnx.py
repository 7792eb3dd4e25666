"""Renewal of Flax NNX objects, in place, for `worker/jax/rebuild/walk.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx

if TYPE_CHECKING:
    from nbdist.worker.jax.rebuild.walk import Walk


def renew(value: Any, walk: Walk) -> bool:
    """Renew an object of NNX; returns whether it was one."""
    if isinstance(value, nnx.Variable):
        old = value.get_raw_value()
        new = walk(old)
        if new is not old:
            value.set_raw_value(new)
        return True
    if isinstance(value, nnx.Pytree):
        walk.items(vars(value))
        return True
    return False
