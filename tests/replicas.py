"""A step on two replicas of this process. Their parts of the batch have 3 and 2 rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

ROWS = 5
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=ROWS).astype("float32")
WEIGHTS = np.array([1, 0, 2, 3, 0.5], "float32")


class Replicas:
    """Runs a function on both replicas, under the arithmetic of a step.

    Args:
        strategy: strategy of the two replicas.
        whole: True if both replicas have all rows.
        total: number of rows of the global batch.
        watch: record of finite losses (default: a new one).
    """

    def __init__(
        self, strategy: Any, *, whole: bool = False, total: int = ROWS, watch: Any = None
    ) -> None:
        from nbdist.worker.tensorflow.replica.batch_share import Shares
        from nbdist.worker.tensorflow.replica.finite import FiniteWatch

        self.strategy = strategy
        self.shares = Shares(total, 2, whole=whole, even=total % 2 == 0)
        self.watch = watch or FiniteWatch()

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return the context in which a step is traced."""
        from nbdist.worker.tensorflow.replica.sample_random import Draws
        from nbdist.worker.tensorflow.replica.single_device_math import arithmetic

        return arithmetic(self.shares, self.watch, Draws())

    def run(self, function: Callable[..., Any], *inputs: Any) -> list[Any]:
        """Return the results of both replicas, from the rows of each and the step's inputs."""
        import tensorflow as tf

        def replica(*given: Any) -> Any:
            self.watch.begin()
            share = self.shares.here()
            return function(slice(share.offset, share.offset + share.rows), *given)

        @tf.function(autograph=False)
        def every(*given: Any) -> Any:
            with self.arithmetic(), self.watch.installed():
                return self.strategy.run(replica, args=given)

        local = self.strategy.experimental_local_results
        results = every(*map(tf.constant, inputs))
        flat = [local(value) for value in tf.nest.flatten(results)]
        return [
            tf.nest.pack_sequence_as(results, [np.asarray(parts[replica]) for parts in flat])
            for replica in (0, 1)
        ]


def close(found: list[Any], expected: Any) -> None:
    """Compare the results of replicas with those of one device, up to rounding."""
    for own in found:
        np.testing.assert_allclose(own, expected, rtol=2e-6, atol=1e-6)
