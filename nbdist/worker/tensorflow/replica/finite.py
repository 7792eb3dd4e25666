"""Agreement of all replicas on whether a step under the mirrored strategy is finite.

If each replica decided alone, one could skip an update or stop, and the others would wait for it in
the next all-reduce forever. A separate all-reduce of a flag costs nearly a millisecond. The flag is
therefore part of the gradients. If the loss is not finite, the smallest gradient is made
non-finite, and so is its mean on all replicas.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.keras import BaseOptimizer
from nbdist.worker.tensorflow.replica.batch_share import replica_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INITIAL_SCALE = 2.0**15
GROWTH_STEPS = 2000
"""Values of Keras's LossScaleOptimizer."""

_apply_upstream = BaseOptimizer.apply


class FiniteWatch:
    """Record of finite losses while a step is traced.

    A thread traces each replica of a rank, and TensorFlow starts new threads for the branches of a
    condition around an update. The records are therefore stored by replica id.

    Attributes:
        reason: possible cause if a rank's own values are finite.
        is_traced: True if the step runs as a graph, so that the inputs of indices are known.
    """

    is_traced = True
    reason = "a gradient, or another rank's loss, is not finite"

    def __init__(self) -> None:
        self._flags_of: dict[int, list[tf.Tensor]] = {}
        self._averaged: set[int] = set()

    @property
    def _flags(self) -> list[tf.Tensor]:
        return self._flags_of.setdefault(replica_id(), [])

    @property
    def has_averaged(self) -> bool:
        """Return True if this replica's step has computed gradients with a tape."""
        return replica_id() in self._averaged

    def variables(self) -> tuple[tf.Variable, ...]:
        """Return the variables that are kept between steps."""
        return ()

    def scaled(self, target: Any) -> Any:
        """Return the factor for the gradient of `target`. None leaves it unchanged."""
        del target

    def before_mean(self, target: Any, gradients: Sequence[Any]) -> list[Any]:
        """Return a replica's gradients. One is made non-finite if the target is not finite."""
        self._averaged.add(replica_id())
        dense = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
        if not dense:
            return list(gradients)
        smallest = min(dense, key=lambda i: _elements(gradients[i]))
        kind = gradients[smallest].dtype
        losses = [tf.cast(tf.reduce_sum(loss), kind) for loss in tf.nest.flatten(target)]
        changed = list(gradients)
        changed[smallest] = gradients[smallest] + 0 * tf.add_n(losses)
        return changed

    def after_mean(self, means: Sequence[Any]) -> list[Any]:
        """Return the gradients for the user."""
        dense = [mean for mean in means if isinstance(mean, tf.Tensor)]
        if dense:
            smallest = min(dense, key=_elements)
            self._flags.append(_all_finite([smallest]))
        return list(means)

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for tracing the step on all replicas."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Prepare for the step of a replica."""
        self._flags.clear()
        self._averaged.discard(replica_id())

    def agreed(self, report: dict[str, tf.Tensor]) -> tf.Tensor:
        """Return True if all values are finite, the same on all replicas.

        A step without gradients, or with gradients in control flow of the graph, needs an
        all-reduce for its reported values.
        """
        graph = tf.compat.v1.get_default_graph()
        flags = [flag for flag in self._flags if flag.graph is graph]
        if flags:
            return tf.reduce_all(tf.stack(flags))
        own = _all_finite([value for value in report.values() if value.dtype.is_floating])
        replica = tf.distribute.get_replica_context()
        bad = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~own, tf.float32))
        return tf.equal(bad, 0)


class LossScaling(FiniteWatch):
    """Scaling of losses, so that small gradients do not vanish in float16.

    The gradients are divided by the scale again. If they are not finite, all replicas skip the
    update and the scale is halved. After `GROWTH_STEPS` finite steps it is doubled (Micikevicius et
    al., 2018, arXiv:1710.03740).
    """

    reason = "gradients overflow float16 at every loss scale"

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__()
        self._strategy = strategy
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with strategy.scope():
            self._scale = tf.Variable(INITIAL_SCALE, trainable=False, aggregation=first)
            self._good = tf.Variable(0, trainable=False, aggregation=first)

    def variables(self) -> tuple[tf.Variable, ...]:
        return self._scale, self._good

    def scaled(self, target: Any) -> Any:
        return tf.nest.map_structure(
            lambda t: tf.fill(tf.shape(t), tf.cast(self._scale, t.dtype)), target
        )

    def after_mean(self, means: Sequence[Any]) -> list[Any]:
        true = [mean / tf.cast(self._scale, mean.dtype) for mean in means]
        values = [mean.values if isinstance(mean, tf.IndexedSlices) else mean for mean in true]
        self._flags.append(_all_finite(values))
        return true

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make optimizers skip the updates of steps whose gradients overflow."""
        BaseOptimizer.apply = self._apply_if_finite()
        try:
            yield
        finally:
            BaseOptimizer.apply = _apply_upstream

    def agreed(self, report: dict[str, tf.Tensor]) -> tf.Tensor:
        """Update the scale. Returns False if it is below 1: smaller scales would not help."""
        finite = super().agreed(report)
        good = tf.where(finite, self._good + 1, 0)
        grown = tf.where(good >= GROWTH_STEPS, self._scale * 2, self._scale)
        self._good.assign(good % GROWTH_STEPS)
        self._scale.assign(tf.where(finite, grown, self._scale / 2))
        return self._scale.read_value() >= 1

    def _apply_if_finite(self) -> Any:
        watch = self

        def apply(optimizer: BaseOptimizer, grads: Any, trainable_variables: Any = None) -> None:
            if not watch._flags:
                _apply_upstream(optimizer, grads, trainable_variables)
                return
            tf.distribute.get_replica_context().merge_call(
                watch._apply_on_all,
                args=(tf.reduce_all(tf.stack(watch._flags)), optimizer, grads, trainable_variables),
            )

        return apply

    def _apply_on_all(
        self, strategy: Any, finite: Any, optimizer: Any, grads: Any, variables: Any
    ) -> None:
        """Apply the update in a condition. TensorFlow requires it outside of the replicas.

        An unbuilt optimizer is built here: in a replica, the first thread would create its
        variables, and the other threads would find it built.
        """
        if not optimizer.built and variables is not None:
            with tf.init_scope(), strategy.scope():
                optimizer.build(list(variables))
        replicas = strategy.extended.call_for_each_replica
        tf.cond(
            strategy.experimental_local_results(finite)[0],
            lambda: _done(replicas(_apply_upstream, args=(optimizer, grads, variables))),
            lambda: _done(None),
        )


def _done(_: object) -> tf.Tensor:
    """Return a constant, because the branches of a condition must return the same type."""
    return tf.constant(0)


def _elements(tensor: tf.Tensor) -> float:
    """Return the number of elements; infinity for an empty tensor or an unknown number."""
    return tensor.shape.num_elements() or math.inf


def _all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]
    return tf.reduce_all(finite) if finite else tf.constant(value=True)
