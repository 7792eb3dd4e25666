"""What ranks tell each other under the mirrored strategy, beside the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    import numpy as np


class Gather:
    """Every rank's int32 numbers: from shape (n,) to shape (ranks, n); all have to call it.

    Args:
        strategy: whose ranks.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._local = len(strategy.extended.worker_devices)
        signature = [tf.TensorSpec([None], tf.int32)]
        self._gather = tf.function(self._gathered, signature, autograph=False)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        gathered = self._strategy.experimental_local_results(self._gather(numbers))[0].numpy()
        replicas = self._strategy.num_replicas_in_sync
        one_of_each: np.ndarray = gathered.reshape(replicas, -1)[:: self._local]
        return one_of_each

    def _gathered(self, numbers: tf.Tensor) -> Any:
        def of_all(own: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_gather(tf.identity(own), axis=0)

        return self._strategy.run(of_all, args=(numbers,))
