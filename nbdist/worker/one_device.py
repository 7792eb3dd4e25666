"""Inside a step cell, TensorFlow computes what one device with the global batch would.

Under MultiWorkerMirroredStrategy a cell written for one device goes wrong wherever something is
taken over the batch. By convention here, a replica's loss is the mean over its rows, and the
step's is the mean over replicas:

- Keras divides its own losses by the number of replicas, and its optimizers add gradients up, each
  clipped before. Here every gradient with respect to variables is averaged over replicas where it
  is taken, in `GradientTape.gradient`; Keras's division and sum are left out. What is then clipped,
  measured or applied is the global gradient.
- Keras's losses that divide by a mask's or by weights' sum divide by that of the global batch.
- Batch normalisation takes the moments of the global batch, and so do its moving statistics.
- Keras's metrics: `worker/keras_metrics.py`.

What Keras does not compute stays as it is: a sum over the batch, or moments of it, that a cell
takes itself are the replica's own, and so is a gradient with respect to something else than
variables, such as the batch. Gradients that come from no tape are averaged where an optimizer is
given them, unless the step has also used a tape. Keras 3.15 and TensorFlow 2.21; elsewhere than in
a step, all is as it was.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as keras_loss

from nbdist.worker import keras_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.finite import FiniteWatch

_gradient_upstream = tf.GradientTape.gradient
_reduce_upstream = keras_loss.reduce_values
_mask_upstream = keras_loss.apply_mask


@contextlib.contextmanager
def arithmetic(*, whole: bool, watch: FiniteWatch) -> Iterator[None]:
    """Compute as one device would while a step is traced or run.

    Args:
        whole: every replica has all rows of the global batch, not a part of them.
        watch: sees the gradients before and after they are averaged.
    """

    def gradient(*args: Any, **kwargs: Any) -> Any:
        return _mean_gradient(*args, whole=whole, watch=watch, **kwargs)

    def moments(*args: Any) -> Any:
        return _moments(*args, whole=whole)

    def unscaled(value: Any) -> Any:
        return value

    def unsummed(_optimizer: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if watch.has_averaged else _averaged(grads_and_vars, whole=whole)

    with contextlib.ExitStack() as changes:
        for owner, name, ours in [
            (tf.GradientTape, "gradient", gradient),
            (TFOptimizer, "_all_reduce_sum_gradients", unsummed),
            (keras_loss, "scale_loss_for_distribution", unscaled),
            (keras_loss, "reduce_values", _reduce_values),
            (keras_loss, "apply_mask", _apply_mask),
            (keras.layers.BatchNormalization, "_moments", moments),
            (keras.Metric, "__getattribute__", keras_metrics.look_up(whole=whole)),
        ]:
            changes.enter_context(changed(owner, name, ours))
        yield


@contextlib.contextmanager
def changed(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """Another value of an attribute, for a while."""
    own = name in vars(owner)
    upstream = getattr(owner, name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, upstream)
        else:
            delattr(owner, name)


def _mean_gradient(
    self: Any,
    target: Any,
    sources: Any,
    *args: Any,
    whole: bool,
    watch: FiniteWatch,
    **kwargs: Any,
) -> Any:
    """The gradient, averaged over replicas where it is one of variables."""
    scale = watch.scaled(target)
    if scale is not None and not args:
        kwargs.setdefault("output_gradients", scale)
    gradients = _gradient_upstream(self, target, sources, *args, **kwargs)
    replica = tf.distribute.get_replica_context()
    flat = tf.nest.flatten(gradients)
    of_variables = [isinstance(s, (tf.Variable, keras.Variable)) for s in tf.nest.flatten(sources)]
    chosen = [
        i for i, g in enumerate(flat) if of_variables[i] and g is not None and replica is not None
    ]
    if chosen:
        own = watch.before_mean(target, [flat[i] for i in chosen])
        means = watch.after_mean(_means(replica, own, whole=whole))
        for i, mean in zip(chosen, means, strict=True):
            flat[i] = mean
    return tf.nest.pack_sequence_as(gradients, flat)


def _averaged(grads_and_vars: Any, *, whole: bool) -> Any:
    """Gradients that no tape has taken, as those of a closed form."""
    pairs = list(grads_and_vars)
    chosen = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
    replica = tf.distribute.get_replica_context()
    means = _means(replica, [tf.identity(pairs[i][0]) for i in chosen], whole=whole)
    for i, mean in zip(chosen, means, strict=True):
        pairs[i] = mean, pairs[i][1]
    return pairs


def _means(replica: Any, gradients: list[Any], *, whole: bool) -> list[Any]:
    """Over replicas; IndexedSlices get the rows that one device's would have, in their order.

    Those of parts of a batch are put one after the other. Of a whole batch each replica has all:
    they are averaged row by row, for repeated rows would change what is a square of theirs (Keras
    squares the rows of IndexedSlices, for norms and for Adam, before it adds up equal ones).
    """
    rows = [whole and isinstance(g, tf.IndexedSlices) for g in gradients]
    values = [g.values if by_row else g for g, by_row in zip(gradients, rows, strict=True)]
    means = replica.all_reduce(tf.distribute.ReduceOp.MEAN, values)
    return [
        tf.IndexedSlices(mean, g.indices, g.dense_shape) if by_row else mean
        for g, mean, by_row in zip(gradients, means, rows, strict=True)
    ]


def _reduce_values(
    values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
) -> Any:
    """`mean_with_sample_weight` divides by the mean over replicas of the weights' sum."""
    loss = _reduce_upstream(values, sample_weight, reduction)
    if reduction != "mean_with_sample_weight" or sample_weight is None or not values.shape.rank:
        return loss
    return loss * _to_global(tf.reduce_sum(tf.cast(sample_weight, loss.dtype)))


def _apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
    """A mask's entries weigh `total / valid`, with the mean over replicas of `valid`."""
    weights = _mask_upstream(sample_weight, mask, dtype, reduction)
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weights
    return weights * _to_global(tf.reduce_sum(tf.cast(mask, dtype)))


def _to_global(divisor: Any) -> Any:
    """What makes of a division by this replica's divisor one by the mean over replicas."""
    replica = tf.distribute.get_replica_context()
    mean = replica.all_reduce(tf.distribute.ReduceOp.MEAN, divisor)
    return tf.math.divide_no_nan(divisor, mean)


def _moments(self: Any, inputs: Any, mask: Any, *, whole: bool) -> tuple[Any, Any]:
    """Mean and variance over the global batch, in two passes: E[x²] - E[x]² would lose digits."""
    replica = tf.distribute.get_replica_context()
    over_replicas = tf.distribute.ReduceOp.MEAN if whole else tf.distribute.ReduceOp.SUM
    axes = self._reduction_axes
    if mask is None:
        kept, guard = tf.ones_like(inputs, dtype=tf.bool), 0.0
    else:
        kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        guard = keras.backend.epsilon()  # as upstream

    def totals(*values: Any) -> Any:
        own = [tf.reduce_sum(tf.where(kept, v, 0), axis=axes, keepdims=True) for v in values]
        return replica.all_reduce(over_replicas, own)

    total, count = totals(inputs, tf.ones_like(inputs))
    mean = total / (count + guard)
    (squares,) = totals(tf.square(tf.where(kept, inputs - mean, 0)))
    return tf.squeeze(mean, axes), tf.squeeze(squares / (count + guard), axes)
