"""TensorFlow variables that should be equal on all ranks, and their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Iterable


def read(component: Any) -> Any:
    """Return the tensor of one replica's copy. This op is five times as fast as `numpy()`."""
    return tf.raw_ops.ReadVariableOp(resource=component.handle, dtype=component.dtype)


def is_mirrored(value: Any) -> bool:
    """Return True if all replicas should have the same value."""
    if not isinstance(value, tf.distribute.DistributedValues):
        return False
    return bool(value.synchronization != tf.VariableSynchronization.ON_READ)


def variables_of(owner: Any) -> Iterable[Any]:
    """Return the variables of a TensorFlow object that should be equal on all ranks."""
    if isinstance(owner, tf.Module):
        return list(owner.trainable_variables)
    return [owner] if owner.trainable else []
