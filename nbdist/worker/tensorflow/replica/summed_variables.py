"""Assignments to variables with one share on each replica, such as the variables of metrics.

The value of such a variable (`ON_READ`, `SUM`) is the sum of the replicas' shares. TensorFlow
divides an assigned value by the number of replicas and drops the remainder of integers: 7 becomes 3
+ 3. It gives each replica the whole initial value: 1 becomes 2. In nbdist the first replica gets
the value and the others get zero.

Tested with TensorFlow 2.21.0 and Keras 3.15.1. `tests/worker/tensorflow/keras/test_fit.py` fails if
the patch is no longer needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.tensorflow import values_util

if TYPE_CHECKING:
    from collections.abc import Callable

_assign_upstream = values_util.on_read_assign_cross_replica


def apply() -> None:
    """Patch assignments to variables that are sums over replicas."""
    values_util.on_read_assign_cross_replica = _assign


def initialized(upstream: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap `keras.Variable._initialize` so that the shares add up to the initial value."""

    def initialize(self: Any, value: Any) -> None:
        upstream(self, value)
        made = self._value
        if is_summed(made) and tf.distribute.in_cross_replica_context():
            with tf.init_scope():
                made.assign(made.values[0].read_value(), read_value=False)

    return initialize


def is_summed(variable: Any) -> bool:
    """Return True if each replica has a share of the variable."""
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    )


def _assign(var: Any, value: Any, read_value: bool = True) -> Any:
    """Assign the value on the first replica and zero on the others."""
    if not is_summed(var) or not tf.distribute.in_cross_replica_context():
        return _assign_upstream(var, value, read_value)
    resolver = var.distribute_strategy.cluster_resolver
    has_first = resolver is None or not resolver.task_id
    whole = tf.cast(value, var.dtype)
    given = [whole if has_first and not n else tf.zeros_like(whole) for n in range(len(var.values))]
    update = tf.group(*(part.assign(own) for part, own in zip(var.values, given, strict=True)))
    if not read_value:
        return update
    with tf.control_dependencies([update] if update else []):
        return var.read_value()
