"""What ranks tell each other under the mirrored strategy, beside the training."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

_NAME = "_nbdist_gather"


def gather_over(strategy: tf.distribute.Strategy) -> Gather:
    """The strategy's one gather, traced once; it is an attribute, to be freed with the strategy."""
    if _NAME not in vars(strategy):
        setattr(strategy, _NAME, Gather(strategy))
    kept: Gather = getattr(strategy, _NAME)
    return kept


class Gather:
    """Every rank's int32 numbers: from shape (n,) to shape (ranks, n); all have to call it.

    Args:
        strategy: whose ranks.
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
        """Called itself, as `tf.function` takes longer to look for it than the ranks to meet."""
        signature = [tf.TensorSpec([None], tf.int32)]
        traced: Callable[[tf.Tensor], Any] = tf.function(
            self._gathered, signature, autograph=False
        ).get_concrete_function()
        return traced

    def _gathered(self, numbers: tf.Tensor) -> Any:
        """A sum of zeros and one row of each: `all_gather` takes two collectives.

        `ReplicaContext.all_reduce` would register a gradient, and TensorFlow keeps that for the
        life of the process, with the strategy.
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
