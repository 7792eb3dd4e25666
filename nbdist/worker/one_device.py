"""Inside a step cell, TensorFlow computes what one device with the global batch would.

Under MultiWorkerMirroredStrategy a cell written for one device goes wrong in two ways. Keras's own
losses are divided by the number of replicas and its optimizers add gradients up, so that a loss of
the user's own (a `tf.reduce_mean`) gives gradients too large by that number; and clipping is done
on each replica's gradients before they are added. Here every gradient with respect to variables is
averaged over replicas where it is taken, in `GradientTape.gradient`; Keras's division and sum are
left out. What is then clipped, measured or applied is the global gradient.

Keras 3.15 and TensorFlow 2.21; elsewhere than in a step, all is as it was.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as keras_loss

if TYPE_CHECKING:
    from collections.abc import Iterator

_gradient_upstream = tf.GradientTape.gradient
_scale_upstream = keras_loss.scale_loss_for_distribution
_sum_upstream = TFOptimizer._all_reduce_sum_gradients


@contextlib.contextmanager
def arithmetic() -> Iterator[None]:
    """Compute as one device would while a step is traced or run."""
    tf.GradientTape.gradient = _mean_gradient
    keras_loss.scale_loss_for_distribution = lambda value: value
    TFOptimizer._all_reduce_sum_gradients = lambda _optimizer, grads_and_vars: grads_and_vars
    try:
        yield
    finally:
        tf.GradientTape.gradient = _gradient_upstream
        keras_loss.scale_loss_for_distribution = _scale_upstream
        TFOptimizer._all_reduce_sum_gradients = _sum_upstream


def _mean_gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """The gradient, averaged over replicas where it is one of variables."""
    gradients = _gradient_upstream(self, target, sources, *args, **kwargs)
    replica = tf.distribute.get_replica_context()
    flat = tf.nest.flatten(gradients)
    of_variables = [isinstance(s, (tf.Variable, keras.Variable)) for s in tf.nest.flatten(sources)]
    chosen = [
        i for i, g in enumerate(flat) if of_variables[i] and g is not None and replica is not None
    ]
    if chosen:
        means = replica.all_reduce(tf.distribute.ReduceOp.MEAN, [flat[i] for i in chosen])
        for i, mean in zip(chosen, means, strict=True):
            flat[i] = mean
    return tf.nest.pack_sequence_as(gradients, flat)
