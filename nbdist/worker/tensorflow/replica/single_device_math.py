"""Arithmetic of TensorFlow and Keras in replicas, equal to one device with the global batch.

Under MultiWorkerMirroredStrategy, a cell for one device is wrong wherever it computes over the
batch. By convention, a replica's loss is the mean over its rows. The loss of the step is the mean
over all rows: the mean of the replicas' losses, weighted by their rows.

- Keras divides its own losses by the number of replicas, and its optimizers sum gradients that each
  replica has already clipped. nbdist averages every gradient with respect to variables over
  replicas in `GradientTape.gradient`, and skips Keras's division and sum. The gradient that is then
  clipped, measured or applied is the global gradient.
- Keras losses that divide by the sum of a mask or of weights use the sum of the global batch.
  Losses that sum are sums over the global batch.
- Batch normalization and its moving statistics use the moments of the global batch.
- Random numbers: `worker/tensorflow/replica/sample_random.py`. Keras metrics:
  `worker/tensorflow/replica/metrics.py`.

Computations outside of Keras are unchanged. A sum or moments over the batch in the user's code are
the replica's own. So is a gradient with respect to anything but variables, such as the batch.
Gradients without a tape are averaged when an optimizer receives them, unless the step has also used
a tape. Everything outside of step cells, `fit`, `evaluate` and `predict` behaves as upstream.
Written for Keras 3.15 and TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.private_api.keras import TFOptimizer
from nbdist.private_api.keras import loss as keras_loss
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.replica import metrics as keras_metrics
from nbdist.worker.tensorflow.replica import sample_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.tensorflow.replica.batch_share import Division, Share
    from nbdist.worker.tensorflow.replica.finite import FiniteWatch
    from nbdist.worker.tensorflow.replica.sample_random import Draws

_gradient_upstream = tf.GradientTape.gradient
_reduce_upstream = keras_loss.reduce_values
_mask_upstream = keras_loss.apply_mask
_moments_upstream = keras.layers.BatchNormalization._moments
_OF_DATA = ("Iterator", "Random", "StatelessRandom", "Multinomial", "StatelessMultinomial")
"""Prefixes of the types of operations that return other values for each batch."""


@contextlib.contextmanager
def arithmetic(
    shares: Division,
    watch: FiniteWatch,
    draws: Draws,
    find: Callable[[keras.Metric, str], Any] | None = None,
) -> Iterator[None]:
    """Compute as one device would while a step is traced or run.

    Args:
        shares: division of the global batch over replicas.
        watch: receives the gradients before and after they are averaged.
        draws: random draws, known from earlier traces.
        find: looks up attributes of metrics (default: `result()` covers all replicas).
    """

    def gradient(*args: Any, **kwargs: Any) -> Any:
        return _mean_gradient(*args, shares=shares, watch=watch, **kwargs)

    def moments(*args: Any) -> Any:
        return _moments(*args, shares=shares)

    def unscaled(value: Any) -> Any:
        return value

    def unsummed(_optimizer: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if watch.has_averaged else _averaged(grads_and_vars, shares)

    with sample_random.installed(shares, draws), contextlib.ExitStack() as changes:
        for owner, name, ours in [
            (tf.GradientTape, "gradient", gradient),
            (TFOptimizer, "_all_reduce_sum_gradients", unsummed),
            (keras_loss, "scale_loss_for_distribution", unscaled),
            (keras_loss, "unscale_loss_for_distribution", unscaled),
            (keras_loss, "reduce_values", functools.partial(_reduce_values, shares)),
            (keras_loss, "apply_mask", functools.partial(_apply_mask, shares)),
            (keras.layers.BatchNormalization, "_moments", moments),
            (keras.Metric, "__getattribute__", find or keras_metrics.look_up(shares)),
        ]:
            changes.enter_context(replaced(owner, name, ours))
        yield


def _mean_gradient(
    self: Any,
    target: Any,
    sources: Any,
    *args: Any,
    shares: Division,
    watch: FiniteWatch,
    **kwargs: Any,
) -> Any:
    """Return the gradient, averaged over replicas if it is a gradient of variables."""
    replica = tf.distribute.get_replica_context()
    if replica is None or not any(map(_is_variable, tf.nest.flatten(sources))):
        return _gradient_upstream(self, target, sources, *args, **kwargs)
    share = shares.here()
    given = bool(args) or kwargs.get("output_gradients") is not None
    if not given:
        kwargs["output_gradients"] = _part_of_mean(watch.scaled(target), target, share)
    gradients = _gradient_upstream(self, target, sources, *args, **kwargs)
    flat = tf.nest.flatten(gradients)
    chosen = []
    for i, source in enumerate(tf.nest.flatten(sources)):
        if flat[i] is None:
            continue
        if _is_variable(source):
            chosen.append(i)
            flat[i] = _times(flat[i], share.part(flat[i].dtype)) if given else flat[i]
        elif not given:
            flat[i] = _times(flat[i], 1 / share.part(flat[i].dtype))
    if chosen:
        own = watch.before_mean(target, [flat[i] for i in chosen])
        sums = _sums(replica, own, whole=shares.whole, traced=watch.is_traced)
        means = watch.after_mean(sums)
        for i, mean in zip(chosen, means, strict=True):
            flat[i] = mean
    return tf.nest.pack_sequence_as(gradients, flat)


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _part_of_mean(scale: Any, target: Any, share: Share) -> Any:
    """Return factors of targets, so that gradients summed over replicas are those of the mean.

    The rows of a replica then have the same gradients as on one device, in float16 too.
    """
    if scale is None:
        return tf.nest.map_structure(lambda t: tf.fill(tf.shape(t), share.part(t.dtype)), target)
    return tf.nest.map_structure(lambda s: s * share.part(s.dtype), scale)


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _averaged(grads_and_vars: Any, shares: Division) -> Any:
    """Average gradients that no tape has computed, such as those of a closed form."""
    pairs = list(grads_and_vars)
    chosen = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
    replica = tf.distribute.get_replica_context()
    share = shares.here()
    own = [_times(pairs[i][0], share.part(pairs[i][0].dtype)) for i in chosen]
    means = _sums(replica, own, whole=shares.whole)
    for i, mean in zip(chosen, means, strict=True):
        pairs[i] = mean, pairs[i][1]
    return pairs


def _sums(replica: Any, gradients: list[Any], *, whole: bool, traced: bool = True) -> list[Any]:
    """Sum over replicas. IndexedSlices get the same rows as on one device, in the same order.

    Rows for parts of a batch are concatenated. If each replica has all rows (a whole batch, or
    indices that do not depend on the batch), they are added row by row. Repeated rows would change
    the squares of rows: for norms and for Adam, Keras squares the rows of IndexedSlices before it
    adds equal ones.
    """
    rows = [
        isinstance(g, tf.IndexedSlices) and (whole or (traced and _are_constant(g.indices)))
        for g in gradients
    ]
    values = [g.values if by_row else g for g, by_row in zip(gradients, rows, strict=True)]
    sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, values)
    return [
        tf.IndexedSlices(total, g.indices, g.dense_shape) if by_row else total
        for g, total, by_row in zip(gradients, sums, rows, strict=True)
    ]


def _reduce_values(
    shares: Division,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """Reduce over the replica's rows. The mean over replicas is then the reduction over all rows.

    `mean_with_sample_weight` divides by the mean over replicas of the sum of weights.
    """
    loss = _reduce_upstream(values, sample_weight, reduction)
    if not values.shape.rank or tf.distribute.get_replica_context() is None:
        return loss
    if reduction == "sum":
        return shares.here().summed(loss)
    if reduction != "mean_with_sample_weight" or sample_weight is None:
        return loss
    return loss * _to_global(shares, tf.reduce_sum(tf.cast(sample_weight, loss.dtype)))


def _apply_mask(
    shares: Division, sample_weight: Any, mask: Any, dtype: Any, reduction: str | None
) -> Any:
    """Weight a mask's entries by `total / valid`, with `valid` as the mean over replicas."""
    weights = _mask_upstream(sample_weight, mask, dtype, reduction)
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weights
    if tf.distribute.get_replica_context() is None:
        return weights
    return weights * _to_global(shares, tf.reduce_sum(tf.cast(mask, dtype)))


def _to_global(shares: Division, divisor: Any) -> Any:
    """Return a factor that replaces this replica's divisor by the mean divisor of all replicas.

    The factor cancels the weight of the replica, because the loss is multiplied by it later.
    """
    replica = tf.distribute.get_replica_context()
    mean = replica.all_reduce(tf.distribute.ReduceOp.MEAN, divisor)
    factor = tf.math.divide_no_nan(divisor, mean)
    weight = shares.here().weight(factor.dtype)
    return factor if weight is None else factor / weight


def _moments(self: Any, inputs: Any, mask: Any, *, shares: Division) -> tuple[Any, Any]:
    """Return mean and variance over the global batch.

    It takes two passes, because E[x²] - E[x]² would lose digits.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None:
        local: tuple[Any, Any] = _moments_upstream(self, inputs, mask)
        return local
    axes = self._reduction_axes
    over_replicas = tf.distribute.ReduceOp.MEAN if shares.whole else tf.distribute.ReduceOp.SUM
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


def _are_constant(indices: Any) -> bool:
    """Return True if no input of the traced function determines `indices`.

    The gradient of an embedding is IndexedSlices: a list of indices and values. For tokens, the
    list of the global batch is the concatenation of the lists of its parts. For positions
    (`Embedding` of `arange(length)`), the list contains each index once for any number of rows.
    Keras squares the values of a list one by one, so the two lists give different updates.

    The dimensions of a batch, except the first, are the same on all replicas. Eager tensors do not
    record their inputs.
    """
    if not tf.is_symbolic_tensor(indices):
        return False
    pending, seen = [indices], set()
    while pending:
        tensor = pending.pop()
        operation = tensor.op
        if (id(tensor.graph), operation.name) in seen or _is_inner_dimension(operation):
            continue
        seen.add((id(tensor.graph), operation.name))
        if operation.type.startswith(_OF_DATA):
            return False
        if operation.type != "Placeholder":
            pending += operation.inputs
            continue
        outer = [outside for outside, inside in tensor.graph.captures if inside is tensor]
        if not outer:
            return False
        pending += filter(tf.is_symbolic_tensor, outer)
    return True


def _is_inner_dimension(operation: Any) -> bool:
    """Return True if an operation takes a dimension of a tensor's shape other than the first."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    rank = operation.inputs[0].op.inputs[0].shape.rank
    first = tf.get_static_value(operation.inputs[1])
    if rank is None or first is None or not operation.get_attr("shrink_axis_mask"):
        return False
    return bool(int(first[0]) % rank)
