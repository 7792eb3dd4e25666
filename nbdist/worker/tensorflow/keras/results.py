"""Combination of a Keras step's results over all replicas by a single all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.private_api.keras import tree
from nbdist.worker.tensorflow.replica import metrics as keras_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.tensorflow.replica.batch_share import Division


class Results:
    """Record of the tensors that are results of metrics while a step is traced on a replica.

    Args:
        shares: division of the global batch over replicas.
    """

    def __init__(self, shares: Division) -> None:
        self._shares = shares
        self._metrics: dict[int, tuple[Any, keras.Metric, int]] = {}

    def of(self, metric: keras.Metric, result: Callable[[], Any]) -> Any:
        """Return the result over this replica's rows, and record its metric."""
        made = result()
        for number, leaf in enumerate(tree.flatten(made)):
            self._metrics.setdefault(id(leaf), (leaf, metric, number))
        return made

    def over_replicas(self, outputs: Any) -> Any:
        """Return values for all rows: metrics from their variables, other scalars as the mean."""
        leaves = [self._tensor(leaf) for leaf in tree.flatten(outputs)]
        own: dict[Any, tf.Tensor] = {}
        for number, leaf in enumerate(leaves):
            if id(leaf) in self._metrics:
                metric = self._metrics[id(leaf)][1]
                own |= {id(v): tf.identity(v) for v in metric.variables if _is_of_replica(v)}
            elif _is_mean(leaf):
                mean = self._shares.here().weighted(tf.convert_to_tensor(leaf))
                own[f"output {number}"] = mean / self._shares.replicas
        summed = _summed(own)
        made = [self._made(n, leaf, summed) for n, leaf in enumerate(leaves)]
        return tree.pack_sequence_as(outputs, made)

    def _tensor(self, leaf: Any) -> Any:
        """Return the value of a variable that a step returns. Metric variables are read later."""
        if isinstance(leaf, keras.Variable) and id(leaf) not in self._metrics:
            return tf.convert_to_tensor(leaf)
        return leaf

    def _made(self, number: int, leaf: Any, summed: dict[Any, tf.Tensor]) -> Any:
        if id(leaf) not in self._metrics:
            return summed.get(f"output {number}", leaf)
        _, metric, part = self._metrics[id(leaf)]
        values = [summed.get(id(v), v) for v in metric.variables]
        values = [
            value / self._shares.replicas if v.aggregation == "mean" else value
            for v, value in zip(metric.variables, values, strict=True)
        ]
        return tree.flatten(keras_metrics.result_of(metric, values))[part]


def _is_of_replica(variable: keras.Variable) -> bool:
    return variable.aggregation in ("sum", "mean")


def _is_mean(leaf: Any) -> bool:
    """Return True for a scalar of this replica's rows, such as a loss."""
    if isinstance(leaf, (bool, int)) or leaf is None:
        return False
    return isinstance(leaf, float) or (
        tf.is_tensor(leaf) and leaf.shape.rank == 0 and leaf.dtype.is_floating
    )


def _summed(values: dict[Any, tf.Tensor]) -> dict[Any, tf.Tensor]:
    """Return sums over replicas, with one collective for each dtype."""
    replica = tf.distribute.get_replica_context()
    by_type: dict[tf.DType, list[Any]] = {}
    for key, value in values.items():
        by_type.setdefault(value.dtype, []).append(key)
    summed: dict[Any, tf.Tensor] = {}
    for keys in by_type.values():
        flat = tf.concat([tf.reshape(values[key], [-1]) for key in keys], 0)
        parts = tf.split(
            replica.all_reduce(tf.distribute.ReduceOp.SUM, flat),
            [values[key].shape.num_elements() for key in keys],
        )
        summed |= {
            key: tf.reshape(part, values[key].shape) for key, part in zip(keys, parts, strict=True)
        }
    return summed
