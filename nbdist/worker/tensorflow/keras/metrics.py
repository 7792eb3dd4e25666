"""Keras's metrics in a step: every sample counts once; `result()` is that of all replicas.

Each replica has a share of a metric's variables. TensorFlow adds the shares up when they are read
outside of a replica, and `result()` in a step is made of the sums too. If all replicas are given
the same, as with a whole batch, the first replica alone counts it. A metric that is given a scalar,
such as the loss, counts the mean over replicas once, as the step's reports do.

The state of a metric of the user's need not be a sum: it may be a minimum. If all replicas are
given the same, each updates the whole state, and the first keeps it.

Keras 3.15; see `worker/tensorflow/replica/single_device_math.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from keras.src import tree
from keras.src.backend.common.stateless_scope import in_stateless_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras

    from nbdist.worker.tensorflow.replica.batch_share import Division

_OVER_REPLICAS = {
    "sum": tf.distribute.ReduceOp.SUM,
    "mean": tf.distribute.ReduceOp.MEAN,
}
"""By a variable's `aggregation`, for those that each replica has its own of."""


def look_up(
    shares: Division, result: Callable[..., Any] | None = None
) -> Callable[[keras.Metric, str], Any]:
    """How attributes of metrics are found in a step: every class has methods of its own.

    Args:
        shares: how the rows of the global batch are divided over replicas.
        result: takes a metric and its method `result`, and makes the result; left out, it is that
            of all replicas.
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
    """Update by own rows; by rows that all replicas have, keep the update on the first alone."""
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
    is_known = is_of_keras(type(metric))  # the metrics in it, which it updates, are looked up too
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
    """Return True for a class or function of Keras's own."""
    module = getattr(what, "__module__", "") or ""
    return module.startswith("keras.src.")


def mean(own: tf.Tensor, shares: Division) -> tf.Tensor:
    """The mean over all rows, of scalars that are means over the rows of a replica."""
    share = shares.here()
    weighted = share.weighted(own)
    return _replica().all_reduce(tf.distribute.ReduceOp.MEAN, weighted)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (tf.is_tensor(value) and value.shape.rank == 0)


def over_replicas(metric: keras.Metric, result: Callable[[], Any]) -> Any:
    """The result of a metric, from the values of its variables over all replicas."""
    if in_stateless_scope():
        return result()
    return result_of(metric, [_over_replicas(v) for v in metric.variables])


def result_of(metric: keras.Metric, values: list[Any]) -> Any:
    """The result of a metric whose variables have `values`; it may be a variable itself."""
    by_variable = {id(v): value for v, value in zip(metric.variables, values, strict=True)}
    return tree.map_structure(
        lambda leaf: by_variable.get(id(leaf), leaf), metric.stateless_result(values)
    )


def _over_replicas(variable: keras.Variable) -> Any:
    value = tf.identity(variable)  # what is read from a variable has no device of its own
    if variable.aggregation not in _OVER_REPLICAS:
        return value
    return _replica().all_reduce(_OVER_REPLICAS[variable.aggregation], value)


def _replica() -> Any:
    return tf.distribute.get_replica_context()
