"""Times of the calls of Keras's train function, on any backend."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.worker.runtime.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable


class CallTimes(Protocol):
    """Times of one call: one step, or several with `steps_per_execution`.

    Attributes:
        signals: returns the signals of training of the last step.
    """

    @property
    def signals(self) -> Callable[[], Signals]: ...

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        """Return the known ones of `input_s` and `collective_s`, in seconds for one step.

        Args:
            since_s: time when the previous call ended on the devices (`time.perf_counter`).
                Waiting before that time does not count.
            steps: number of steps in the call.
        """
        ...


class UntimedCall:
    """A call that was not timed."""

    signals = Signals

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        del since_s, steps
        return {}


class TimedFunction:
    """Train function of Keras that records the times of its calls. `take` is thread-safe.

    Args:
        call: runs one call; returns the outputs for Keras, and its times.
    """

    def __init__(self, call: Callable[..., tuple[Any, CallTimes]]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._batch = -1
        self._times: dict[int, CallTimes] = {}

    def __call__(self, *args: Any) -> Any:
        outputs, times = self._call(*args)
        with self._lock:
            self._times[self._batch] = times
        return outputs

    def begin(self, batch: int) -> None:
        """Set the first batch of the next call."""
        self._batch = batch

    def forget(self) -> None:
        """Drop times that are never taken, for example of `train_on_batch` or after an error."""
        with self._lock:
            self._times.clear()

    @property
    def open(self) -> int:
        """Number of calls whose times have not been taken."""
        return len(self._times)

    def take(self, batch: int) -> CallTimes:
        """Remove and return the times of the call that began with `batch`."""
        with self._lock:
            return self._times.pop(batch, UntimedCall())
