"""Time that a step under the mirrored strategy waits for its collectives, measured in its graph.

The graph contains two timestamps for each all-reduce: one when its inputs are available, one when
its outputs are. No operation depends on the timestamps, so a gradient is still sent while others
are computed. The measured time is the part that the step cannot overlap.

The timestamps depend on the collectives and not on the means. Otherwise TensorFlow could not merge
the division by the number of replicas with the operations after it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.tensorflow import distribute_lib
from nbdist.worker.runtime import context
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.runtime.spans import covered

if TYPE_CHECKING:
    from collections.abc import Callable

_COLLECTIVES = ("CollectiveReduce", "CollectiveGather")
"""Prefixes of the types of TensorFlow's collective operations."""

_all_reduce_upstream = distribute_lib.ReplicaContext.all_reduce


class NoClock:
    """Null clock, for steps without collectives or whose collectives cannot be timed."""

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for tracing the step on all replicas."""
        return contextlib.nullcontext()

    def around(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call` and time the collectives that it adds to the graph as one."""
        return call()

    def begin(self) -> None:
        """Prepare for the step of a replica."""

    def noted(self) -> list[tf.Tensor]:
        """Return the current graph's timestamps: begin and end of each collective."""
        return []

    def stamps(self) -> dict[str, tf.Tensor]:
        """Return the timestamps that the step reports in addition to the user's values."""
        return {}

    def measured(self, stamps: tf.Tensor | None) -> dict[str, float]:
        """Return the measured times in seconds, by names of `MEASURES`."""
        del stamps
        return {}


class CollectiveClock(NoClock):
    """Clock that records the begin and the end of all-reduces while a step is traced.

    Args:
        name: name of the timestamps in the step's report.
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
            self._noted.append((graph, (time_when_ready(inputs), time_when_ready(collectives))))
        return outcome

    def begin(self) -> None:
        self._noted.clear()

    def noted(self) -> list[tf.Tensor]:
        here = tf.compat.v1.get_default_graph()
        return [stamp for graph, stamps in self._noted if graph is here for stamp in stamps]

    def stamps(self) -> dict[str, tf.Tensor]:
        """Return begin and end of each collective: shape (2 * collectives,), float64, in seconds.

        Collectives within control flow are not included.
        """
        own = self.noted()
        return {self._name: tf.stack(own)} if own else {}

    def measured(self, stamps: tf.Tensor | None) -> dict[str, float]:
        return {} if stamps is None else {"collective_s": covered(stamps.numpy().reshape(-1, 2))}


def choose(strategy: tf.distribute.Strategy, name: str, *, jit: bool) -> NoClock:
    """Return a `CollectiveClock` for several workers with one CPU each, else a `NoClock`.

    XLA has no timestamps, and a GPU operation counts as done once it is queued. Without telemetry,
    nothing is timed.
    """
    worker = context.if_any()
    if strategy.num_replicas_in_sync == 1 or (worker and not worker.identity.telemetry):
        return NoClock()
    devices = strategy.extended.worker_devices
    fits = len(devices) == 1 and "CPU" in devices[0] and not jit
    return CollectiveClock(name) if fits else NoClock()


def time_when_ready(needed: list[Any]) -> tf.Tensor:
    """Return the time at which inputs are done: seconds since 1970, scalar float64."""
    with tf.control_dependencies(needed):
        return tf.timestamp()
