"""Exchange of small numbers between ranks under the mirrored strategy."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

_NAME = "_nbdist_gather"


def gather_over(strategy: tf.distribute.Strategy) -> Gather:
    """Return the strategy's `Gather`, traced once.

    It is an attribute of the strategy, so both are freed together.
    """
    if _NAME not in vars(strategy):
        setattr(strategy, _NAME, Gather(strategy))
    kept: Gather = getattr(strategy, _NAME)
    return kept


class Gather:
    """Gather int32 numbers from all ranks: shape (n,) to (ranks, n). All ranks must call it.

    Args:
        strategy: strategy of the ranks.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._local = len(strategy.extended.worker_devices)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        summed = self._traced(tf.constant(numbers, tf.int32))
        gathered = self._strategy.experimental_local_results(summed)[0].numpy()
        one_of_each: np.ndarray = gathered[:: self._local]
        return one_of_each

    @functools.cached_property
    def _traced(self) -> Callable[[tf.Tensor], Any]:
        """Concrete function, called directly because a lookup by `tf.function` takes too long."""
        signature = [tf.TensorSpec([None], tf.int32)]
        traced: Callable[[tf.Tensor], Any] = tf.function(
            self._gathered, signature, autograph=False
        ).get_concrete_function()
        return traced

    def _gathered(self, numbers: tf.Tensor) -> Any:
        """Sum arrays that are zero except for each replica's own row.

        `all_gather` would need two collectives. `ReplicaContext.all_reduce` would register a
        gradient, and TensorFlow would keep it and the strategy for the life of the process.
        """

        def of_all(own: tf.Tensor) -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            places = tf.one_hot(
                replica.replica_id_in_sync_group, replica.num_replicas_in_sync, dtype=tf.int32
            )
            return self._strategy.extended._replica_ctx_all_reduce(
                tf.distribute.ReduceOp.SUM, places[:, None] * own
            )

        return self._strategy.run(of_all, args=(numbers,))
