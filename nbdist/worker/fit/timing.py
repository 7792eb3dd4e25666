"""Times of the steps of a `fit`: in total, waiting for data, and in collectives."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import keras

from nbdist.worker.keras.train_function_timing import TimedFunction, UntimedCall
from nbdist.worker.profiling.trace import NoTracer
from nbdist.worker.runtime import context
from nbdist.worker.training.steps_in_flight import IN_FLIGHT
from nbdist.worker.training.trace_schedule import Samples, Tracing

if TYPE_CHECKING:
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.runtime.signals import Signals

_SETTLE_TIMEOUT_S = 10.0
"""Seconds that a step waits for the steps under way."""


def is_of_all_ranks() -> bool:
    """Return True if `fit` trains on JAX over the mesh of several ranks."""
    if keras.backend.backend() != "jax" or keras.distribution.distribution() is None:
        return False
    return context.current().world_size > 1


class Pace:
    """Times of one `fit`.

    Args:
        worker: this rank.
        model: model in training, with its train function.

    Attributes:
        lock: lock that a caller of `ended` holds.
    """

    def __init__(self, worker: Worker, model: Any) -> None:
        self.lock = threading.Lock()
        self.settled = threading.Condition(self.lock)
        self._begun = 0
        self._ended_at = time.perf_counter()
        self._each: int = model.steps_per_execution
        function = model.train_function
        self._function = function if isinstance(function, TimedFunction) else None
        self._together = self._function is not None and is_of_all_ranks()
        self._tracing = self._traced(worker)

    def _traced(self, worker: Worker) -> Tracing:
        """Return the tracing of steps. JAX's programs do not time their collectives."""
        if not self._together or not worker.identity.telemetry:
            return Tracing(NoTracer(), (), self.settle)
        from nbdist.worker.profiling.jax_profiler import PjrtTracer

        tracer = PjrtTracer()
        return Tracing(tracer, (Samples(worker.reporter, tracer, self._each),), self.settle)

    def restart(self) -> None:
        """Restart the clock at the begin of an epoch; the time before belongs to no step."""
        with self.lock:
            self._ended_at = time.perf_counter()
        if self._function is not None:
            self._function.forget()

    def begin(self, batch: int, epoch: int) -> None:
        """Prepare a call of the train function whose first batch is `batch`."""
        self._begun += 1
        if self._together:
            self.settle(IN_FLIGHT)
        spent = self._tracing.before(self._begun, epoch)
        with self.lock:
            self._ended_at += spent
        if self._function is not None:
            self._function.begin(batch)

    def ended(self, batch: int, step: int, made: int) -> tuple[dict[str, float], Signals]:
        """Return the measurements of a step (`MEASURES`) and its signals of training.

        Thread-safe if the lock is held.

        Args:
            batch: last batch of the call.
            step: number under which the step is reported.
            made: number of steps in the call.
        """
        before, self._ended_at = self._ended_at, time.perf_counter()
        first = batch - self._each + 1
        took = UntimedCall() if self._function is None else self._function.take(first)
        measured = {"step_s": (self._ended_at - before) / made, **took.measured(before, made)}
        self._tracing.step_result(step, measured)
        self.settled.notify_all()
        return measured, took.signals()

    def stop_trace(self, epoch: int) -> None:
        """Stop a trace under way, before work that is no step."""
        self._tracing.stop(epoch)

    def close(self, epoch: int) -> None:
        """End the tracing; no more steps follow."""
        self._tracing.close(epoch)

    @property
    def is_under_way(self) -> bool:
        """True if a call has begun and not ended."""
        return self._together and self._function is not None and self._function.open > 0

    def settle(self, but: int = 0) -> None:
        """Wait until at most `but` calls are under way.

        Otherwise a rank whose data are ready would run many steps ahead of the others. It would
        trace other steps than they do, and stop long after an interrupt.
        """
        function = self._function
        if function is not None and function.open > but:
            with self.settled:
                self.settled.wait_for(lambda: function.open <= but, _SETTLE_TIMEOUT_S)
