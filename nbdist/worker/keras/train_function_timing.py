"""What each call of Keras's train function says of its time, whichever backend runs it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Took(Protocol):
    """The times of one call: of one step, or of several with `steps_per_execution`."""

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        """For one step, what is known of `input_s` and `collective_s`.

        Args:
            since_s: when the call before had ended on the devices, on `time.perf_counter`; what
                was waited until then was hidden behind it.
            steps: how many the call made.
        """
        ...


class Unknown:
    """Nothing was timed."""

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        del since_s, steps
        return {}


class TimedFunction:
    """A train function of Keras's that remembers what its calls took. `take` is for any thread.

    Args:
        call: makes one call; returns what Keras is to have of it, and its times.
    """

    def __init__(self, call: Callable[..., tuple[Any, Took]]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._batch = -1
        self._took: dict[int, Took] = {}

    def __call__(self, *args: Any) -> Any:
        outputs, took = self._call(*args)
        with self._lock:
            self._took[self._batch] = took
        return outputs

    def begin(self, batch: int) -> None:
        """The next call begins with that batch of its epoch."""
        self._batch = batch

    def forget(self) -> None:
        """What nobody will take, as of single batches (`train_on_batch`) or after an error."""
        with self._lock:
            self._took.clear()

    @property
    def open(self) -> int:
        """How many calls there were whose times have not been taken."""
        return len(self._took)

    def take(self, batch: int) -> Took:
        """The times of the call that began with `batch`, which are forgotten here."""
        with self._lock:
            return self._took.pop(batch, Unknown())
