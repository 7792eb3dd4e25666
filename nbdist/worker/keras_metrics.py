"""Keras's metrics in a step cell: every sample counts once; `result()` is that of all replicas.

A metric's variables are sums, of which each replica keeps its own; TensorFlow adds them up when
they are read outside of a replica. So in a step: what every replica would count, the first alone
does; and `result()` is made of the sums over replicas. A metric that is given a scalar, such as the
loss, counts the mean over replicas once, as the step's reports do.

Keras 3.15; see `worker/one_device.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras

_OVER_REPLICAS = {
    "sum": tf.distribute.ReduceOp.SUM,
    "mean": tf.distribute.ReduceOp.MEAN,
}
"""By a variable's `aggregation`, for those that each replica has its own of."""


def look_up(*, whole: bool) -> Callable[[keras.Metric, str], Any]:
    """How attributes of metrics are found in a step: every class has methods of its own.

    Args:
        whole: every replica has all rows of the global batch, not a part of them.
    """

    def found(metric: keras.Metric, name: str) -> Any:
        attribute = object.__getattribute__(metric, name)
        if name == "update_state":
            return functools.partial(_update, metric, attribute, whole)
        if name == "result":
            return functools.partial(_result, metric, attribute)
        return attribute

    return found


def _update(
    metric: keras.Metric, update: Callable[..., Any], whole: bool, *args: Any, **kwargs: Any
) -> None:
    """Update on all replicas, and put back what all but the first counted if all counted alike."""
    if in_stateless_scope():
        update(*args, **kwargs)
        return
    given = [*args, *kwargs.values()]
    scalar = len(given) == 1 and _is_scalar(given[0])
    if scalar:
        own = tf.identity(tf.cast(given[0], metric.dtype))
        args, kwargs = (_replica().all_reduce(tf.distribute.ReduceOp.MEAN, own),), {}
    if not (whole or scalar):
        update(*args, **kwargs)
        return
    sums = [v for v in metric.variables if v.aggregation == "sum"]
    before = [tf.identity(v) for v in sums]
    update(*args, **kwargs)
    first = tf.equal(_replica().replica_id_in_sync_group, 0)
    for variable, old in zip(sums, before, strict=True):
        variable.assign(tf.where(first, variable, old))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (tf.is_tensor(value) and value.shape.rank == 0)


def _result(metric: keras.Metric, result: Callable[[], Any]) -> Any:
    """The result, from the variables' values over all replicas."""
    if in_stateless_scope():
        return result()
    return metric.stateless_result([_over_replicas(v) for v in metric.variables])


def _over_replicas(variable: keras.Variable) -> Any:
    value = tf.identity(variable)  # what is read from a variable has no device of its own
    if variable.aggregation not in _OVER_REPLICAS:
        return value
    return _replica().all_reduce(_OVER_REPLICAS[variable.aggregation], value)


def _replica() -> Any:
    return tf.distribute.get_replica_context()
