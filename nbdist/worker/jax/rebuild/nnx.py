"""Objects of Flax NNX, as `worker/jax/rebuild/walk.py` changes them: in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx

if TYPE_CHECKING:
    from nbdist.worker.jax.rebuild.walk import Walk


def renew(value: Any, walk: Walk) -> bool:
    """Whether it was an object of NNX."""
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
