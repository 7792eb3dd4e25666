"""A step under MultiWorkerMirroredStrategy: `tf.function` around `strategy.run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api

from nbdist.records import BATCH_NAME
from nbdist.worker import one_device, steps
from nbdist.worker.data import map_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import StepRequest
    from nbdist.worker.data import Batch


class MirroredStep:
    """The body of the step on every replica, with the arithmetic of one device.

    Args:
        request: the step.
        define: makes a function of a source, in the user's namespace, under the cell's name.
        strategy: the strategy.
    """

    reduced = False

    def __init__(
        self,
        request: StepRequest,
        define: Callable[[str], Callable[..., Any]],
        strategy: tf.distribute.Strategy,
    ) -> None:
        self.replicas: int = strategy.num_replicas_in_sync
        self._strategy = strategy
        self._request = request
        # As tf.function converts what it calls; tf.autograph.to_graph loses the user's lines.
        self._body = api.tf_convert(
            define(steps.function_source(request, (BATCH_NAME,))),
            ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED),
        )
        self._run = tf.function(self._all_replicas, autograph=False)

    def step(self, batch: Batch) -> Any:
        return self._run(self._for_replicas(batch), whole=batch.whole)

    def read(self, report: Any) -> dict[str, float]:
        """The mean over this rank's own replicas."""
        return {
            name: float(tf.add_n(parts) / len(parts))
            for name, value in report.items()
            if (parts := self._strategy.experimental_local_results(value))
        }

    def finish(self) -> None:
        """State is in variables, which stay where they are."""

    def _for_replicas(self, batch: Batch) -> Any:
        """This rank's rows; cut once more where it has several replicas."""
        local = len(self._strategy.extended.worker_devices)
        if local == 1 or batch.whole:
            return map_arrays(tf.convert_to_tensor, batch.values)
        each = batch.rows // self.replicas

        def part_of(context: Any) -> Any:
            start = context.replica_id_in_sync_group % local * each
            return map_arrays(
                lambda array: tf.convert_to_tensor(array[start : start + each]), batch.values
            )

        return self._strategy.experimental_distribute_values_from_function(part_of)

    def _all_replicas(self, batch: Any, *, whole: bool) -> Any:
        """Traced once for parts of batches, once for whole ones: shapes may be the same."""
        with one_device.arithmetic(whole=whole):
            return self._strategy.run(self._replica, args=(batch,))

    def _replica(self, batch: Any) -> dict[str, tf.Tensor]:
        report, _ = self._body(batch)
        return steps.scalars(self._request, report, tf.convert_to_tensor)
