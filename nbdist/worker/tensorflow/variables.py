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


def is_compared(value: Any) -> bool:
    """Return True for numbers or truth values that should be equal on all replicas."""
    return is_mirrored(value) and bool(value.dtype.is_numeric or value.dtype.is_bool)


def variables_of(owner: Any) -> Iterable[Any]:
    """Return the variables of a TensorFlow object that should be equal on all ranks."""
    if isinstance(owner, tf.Module):
        return list(owner.trainable_variables)
    return [owner] if owner.trainable else []


def untrained_of(owner: Any) -> Iterable[Any]:
    """Return the other numbers of a variable or module, which a step may average by itself."""
    if isinstance(owner, tf.Module):
        return list(owner.non_trainable_variables)
    is_bare = isinstance(owner, tf.Variable) and not owner.trainable
    return [owner] if is_bare else []
