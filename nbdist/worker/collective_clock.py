"""How long a step under the mirrored strategy waits for its collectives, told by the step itself.

Beside the collectives of an all-reduce stand two timestamps in the graph: one that is taken once
all that goes into them is there, one once all that comes of them is. Nothing waits for them, so
that a gradient that is ready is still sent while others are computed, and what is told is what the
step could not hide. They hang on the collectives themselves: had they hung on the means, TensorFlow
could no longer merge the division by the number of replicas with what comes after it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from nbdist.worker.one_device import changed
from nbdist.worker.spans import covered

if TYPE_CHECKING:
    from nbdist.records import StepOptions

_COLLECTIVES = ("CollectiveReduce", "CollectiveGather")
"""What the types of TensorFlow's collective operations begin with."""

_all_reduce_upstream = distribute_lib.ReplicaContext.all_reduce


class NoClock:
    """Where collectives cannot be timed, or there are none."""

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Around the tracing of a step on all replicas."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Before the step of a replica."""

    def stamps(self) -> dict[str, tf.Tensor]:
        """What the step reports beside the user's values."""
        return {}

    def measured(self, stamps: tf.Tensor | None) -> dict[str, float]:
        """What was measured, of `MEASURES`."""
        del stamps
        return {}


class CollectiveClock(NoClock):
    """Notes, while a step is traced, when its all-reduces begin and end.

    Args:
        name: under which the step reports the times.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._noted: list[tuple[Any, tuple[tf.Tensor, tf.Tensor]]] = []

    def installed(self) -> contextlib.AbstractContextManager[None]:
        def timed(replica: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            reduced = _all_reduce_upstream(replica, reduce_op, value, options)
            collectives = [
                op for op in graph.get_operations()[before:] if op.type.startswith(_COLLECTIVES)
            ]
            if collectives:
                inputs = [tensor for op in collectives for tensor in op.inputs]
                self._noted.append((graph, (_when_there(inputs), _when_there(collectives))))
            return reduced

        return changed(distribute_lib.ReplicaContext, "all_reduce", timed)

    def begin(self) -> None:
        self._noted.clear()

    def stamps(self) -> dict[str, tf.Tensor]:
        """Begin and end of one after the other: shape (2 * collectives,), float64, in seconds.

        Those within control flow are left out.
        """
        here = tf.compat.v1.get_default_graph()
        own = [stamp for graph, stamps in self._noted if graph is here for stamp in stamps]
        return {self._name: tf.stack(own)} if own else {}

    def measured(self, stamps: tf.Tensor | None) -> dict[str, float]:
        return {} if stamps is None else {"collective_s": covered(stamps.numpy().reshape(-1, 2))}


def choose(strategy: tf.distribute.Strategy, options: StepOptions, name: str) -> NoClock:
    """A clock where there are several workers with a CPU each.

    XLA has no timestamps, and on a GPU an operation counts as done when it has been queued.
    """
    devices = strategy.extended.worker_devices
    alone = len(devices) == strategy.num_replicas_in_sync
    fits = len(devices) == 1 and "CPU" in devices[0] and not options.jit
    return CollectiveClock(name) if fits and not alone else NoClock()


def _when_there(needed: list[Any]) -> tf.Tensor:
    with tf.control_dependencies(needed):
        return tf.timestamp()
