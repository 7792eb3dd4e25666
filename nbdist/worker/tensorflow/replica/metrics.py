"""Keras metrics in a step: each sample counts once, and `result()` covers all replicas.

Each replica has a share of a metric's variables. TensorFlow adds up the shares when they are read
outside of a replica, and `result()` in a step uses the same sums. If all replicas receive the same
values, as with a whole batch, only the first replica counts them. A metric of a scalar, such as the
loss, counts the mean over replicas once, as the step's reports do.

The state of a user's metric may be something other than a sum, for example a minimum. If all
replicas receive the same values, each updates the whole state, and the first replica keeps it.

Written for Keras 3.15. See `worker/tensorflow/replica/single_device_math.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from nbdist.private_api.keras import LIBRARY, in_stateless_scope, tree

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras

    from nbdist.worker.tensorflow.replica.batch_share import Division

_SOURCE = f"{LIBRARY.path('source')}."
_OVER_REPLICAS = {
    "sum": tf.distribute.ReduceOp.SUM,
    "mean": tf.distribute.ReduceOp.MEAN,
}
"""Reductions by a variable's `aggregation`, for variables with one copy on each replica."""


def look_up(
    shares: Division, result: Callable[..., Any] | None = None
) -> Callable[[keras.Metric, str], Any]:
    """Return a lookup for attributes of metrics in a step, because every class has its own methods.

    Args:
        shares: division of the global batch over replicas.
        result: takes a metric and its method `result`, and returns the result (default: the result
            over all replicas).
    """

    def found(metric: keras.Metric, name: str) -> Any:
        attribute = object.__getattribute__(metric, name)
        if name not in ("update_state", "result") or in_stateless_scope() or _replica() is None:
            return attribute
        if name == "update_state":
            return functools.partial(_update, metric, attribute, shares)
        return functools.partial(result or over_replicas, metric, attribute)

    return found


def _update(
    metric: keras.Metric, update: Callable[..., Any], shares: Division, *args: Any, **kwargs: Any
) -> None:
    """Update with this replica's rows. Only the first replica counts rows that all have."""
    if in_stateless_scope():
        update(*args, **kwargs)
        return
    given = [value for value in (*args, *kwargs.values()) if value is not None]
    scalar = len(given) == 1 and _is_scalar(given[0])
    if scalar:
        own = tf.identity(tf.cast(given[0], metric.dtype))
        args, kwargs = (mean(own, shares),), {}
    if not (shares.whole or scalar):
        update(*args, **kwargs)
        return
    is_known = is_of_keras(type(metric))  # the lookup also applies to the metrics that it contains
    variables = metric._variables if is_known else metric.variables
    shares_of = [v for v in variables if v.aggregation == "sum"]
    kept = [tf.identity(v) for v in shares_of]
    if not is_known and shares_of:
        wholes = _replica().all_reduce(tf.distribute.ReduceOp.SUM, kept)
        kept = [tf.zeros_like(share) for share in kept]
        for variable, whole in zip(shares_of, wholes, strict=True):
            variable.assign(whole)
    update(*args, **kwargs)
    first = tf.equal(_replica().replica_id_in_sync_group, 0)
    for variable, old in zip(shares_of, kept, strict=True):
        variable.assign(tf.where(first, variable, old))


def is_of_keras(what: Any) -> bool:
    """Return True for a class or function of Keras itself."""
    module = getattr(what, "__module__", "") or ""
    return module.startswith(_SOURCE)


def mean(own: tf.Tensor, shares: Division) -> tf.Tensor:
    """Return the mean over all rows, from scalars that are means over the rows of a replica."""
    share = shares.here()
    weighted = share.weighted(own)
    return _replica().all_reduce(tf.distribute.ReduceOp.MEAN, weighted)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, (int, float, np.generic, np.ndarray)):
        return np.ndim(value) == 0
    return bool(tf.is_tensor(value) and value.shape.rank == 0)


def over_replicas(metric: keras.Metric, result: Callable[[], Any]) -> Any:
    """Return the result of a metric from the values of its variables over all replicas."""
    if in_stateless_scope():
        return result()
    return result_of(metric, [_over_replicas(v) for v in metric.variables])


def result_of(metric: keras.Metric, values: list[Any]) -> Any:
    """Return the result of a metric for given variable values. It may be a variable itself."""
    by_variable = {id(v): value for v, value in zip(metric.variables, values, strict=True)}
    return tree.map_structure(
        lambda leaf: by_variable.get(id(leaf), leaf), metric.stateless_result(values)
    )


def _over_replicas(variable: keras.Variable) -> Any:
    value = tf.identity(variable)  # a plain read of a variable has no device of its own
    if variable.aggregation not in _OVER_REPLICAS:
        return value
    return _replica().all_reduce(_OVER_REPLICAS[variable.aggregation], value)


def _replica() -> Any:
    return tf.distribute.get_replica_context()
