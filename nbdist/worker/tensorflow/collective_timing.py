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

from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.runtime.spans import covered

if TYPE_CHECKING:
    from collections.abc import Callable

_COLLECTIVES = ("CollectiveReduce", "CollectiveGather")
"""What the types of TensorFlow's collective operations begin with."""

_all_reduce_upstream = distribute_lib.ReplicaContext.all_reduce


class NoClock:
    """Where collectives cannot be timed, or there are none."""

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Around the tracing of a step on all replicas."""
        return contextlib.nullcontext()

    def around(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; the collectives that it places in the graph are timed as one."""
        return call()

    def begin(self) -> None:
        """Before the step of a replica."""

    def noted(self) -> list[tf.Tensor]:
        """Begin and end of one after the other, of those in the graph that is made: scalars."""
        return []

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
            return self.around(lambda: _all_reduce_upstream(replica, reduce_op, value, options))

        return replaced(distribute_lib.ReplicaContext, "all_reduce", timed)

    def around(self, call: Callable[[], Any]) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        outcome = call()
        collectives = [
            op for op in graph.get_operations()[before:] if op.type.startswith(_COLLECTIVES)
        ]
        if collectives:
            inputs = [tensor for op in collectives for tensor in op.inputs]
            self._noted.append((graph, (when_there(inputs), when_there(collectives))))
        return outcome

    def begin(self) -> None:
        self._noted.clear()

    def noted(self) -> list[tf.Tensor]:
        here = tf.compat.v1.get_default_graph()
        return [stamp for graph, stamps in self._noted if graph is here for stamp in stamps]

    def stamps(self) -> dict[str, tf.Tensor]:
        """Begin and end of one after the other: shape (2 * collectives,), float64, in seconds.

        Those within control flow are left out.
        """
        own = self.noted()
        return {self._name: tf.stack(own)} if own else {}

    def measured(self, stamps: tf.Tensor | None) -> dict[str, float]:
        return {} if stamps is None else {"collective_s": covered(stamps.numpy().reshape(-1, 2))}


def choose(strategy: tf.distribute.Strategy, name: str, *, jit: bool) -> NoClock:
    """A clock where there are several workers with a CPU each.

    XLA has no timestamps, and on a GPU an operation counts as done when it has been queued.
    """
    if strategy.num_replicas_in_sync == 1:
        return NoClock()
    devices = strategy.extended.worker_devices
    fits = len(devices) == 1 and "CPU" in devices[0] and not jit
    return CollectiveClock(name) if fits else NoClock()


def when_there(needed: list[Any]) -> tf.Tensor:
    """Seconds since 1970, once tensors and operations are there: a scalar, float64."""
    with tf.control_dependencies(needed):
        return tf.timestamp()
