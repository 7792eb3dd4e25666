"""How long the steps of a `fit` take, and how much of that is waiting and collectives."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import keras

from nbdist.worker.keras.train_function_timing import TimedFunction, Unknown
from nbdist.worker.profiling.trace import NoTracer
from nbdist.worker.runtime import context
from nbdist.worker.training.loop import IN_FLIGHT
from nbdist.worker.training.trace_schedule import Samples, Tracing

if TYPE_CHECKING:
    from nbdist.worker.runtime.context import Worker

_LANDING_S = 10.0
"""How long a step waits for those that are under way."""


def is_of_all_ranks() -> bool:
    """Whether `fit` is on JAX, over the mesh of several ranks."""
    if keras.backend.backend() != "jax" or keras.distribution.distribution() is None:
        return False
    return context.current().world_size > 1


class Pace:
    """The times of one `fit`.

    Args:
        worker: this rank.
        model: that is trained; its train function is made.

    Attributes:
        lock: to be held around `ended`.
    """

    def __init__(self, worker: Worker, model: Any) -> None:
        self.lock = threading.Lock()
        self.settleed = threading.Condition(self.lock)
        self._begun = 0
        self._ended_at = time.perf_counter()
        self._each: int = model.steps_per_execution
        function = model.train_function
        self._function = function if isinstance(function, TimedFunction) else None
        self._together = self._function is not None and is_of_all_ranks()
        self._tracing = self._traced(worker)

    def _traced(self, worker: Worker) -> Tracing:
        """The programs of JAX do not time their collectives: some are traced."""
        if not self._together:
            return Tracing(NoTracer(), (), self.settle)
        from nbdist.worker.profiling.jax_profiler import PjrtTracer

        tracer = PjrtTracer()
        return Tracing(tracer, (Samples(worker, tracer, self._each),), self.settle)

    def restart(self) -> None:
        """An epoch begins: what came before it is no part of a step."""
        with self.lock:
            self._ended_at = time.perf_counter()
        if self._function is not None:
            self._function.forget()

    def begin(self, batch: int, epoch: int) -> None:
        """To be called before each call of the train function, which begins with `batch`."""
        self._begun += 1
        if self._together:
            self.settle(IN_FLIGHT)
        spent = self._tracing.before(self._begun, epoch)
        with self.lock:
            self._ended_at += spent
        if self._function is not None:
            self._function.begin(batch)

    def ended(self, batch: int, step: int, made: int) -> dict[str, float]:
        """What was measured of a step, of `MEASURES`; on any thread.

        Args:
            batch: the last one of the call.
            step: what it is reported as.
            made: how many steps the call made.
        """
        before, self._ended_at = self._ended_at, time.perf_counter()
        first = batch - self._each + 1
        took = Unknown() if self._function is None else self._function.take(first)
        measured = {"step_s": (self._ended_at - before) / made, **took.measured(before, made)}
        self._tracing.step_result(step, measured)
        self.settleed.notify_all()
        return measured

    def cut(self, epoch: int) -> None:
        """What follows is no step."""
        self._tracing.cut(epoch)

    def close(self, epoch: int) -> None:
        """There are no more steps."""
        self._tracing.close(epoch)

    @property
    def is_under_way(self) -> bool:
        """Whether calls were begun that have not ended."""
        return self._together and self._function is not None and self._function.open > 0

    def settle(self, but: int = 0) -> None:
        """Wait until no more calls than that are under way.

        Without, a rank that has its data runs ahead of the others by as many steps as there are:
        it would trace other steps than they do, and stop long after it was asked to.
        """
        function = self._function
        if function is not None and function.open > but:
            with self.settleed:
                self.settleed.wait_for(lambda: function.open <= but, _LANDING_S)
