"""Time that a step of `fit` on JAX waits for its data.

Keras reads the next batch in Python while the devices still compute the last step. Waiting counts
only from the end of that step. The profiler times collectives
(`worker/training/trace_schedule.py`).

Requires Keras 3.15; other versions are not timed.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.private_api.keras import JAXTrainer
from nbdist.worker.jax.keras import patch as keras_patch
from nbdist.worker.jax.runtime.step_signals import NAME
from nbdist.worker.keras.train_function_timing import TimedFunction
from nbdist.worker.runtime.signals import Signals, is_recorded, note_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.keras.train_function_timing import CallTimes

_UNKNOWN = (
    "nbdist does not compile the train_step (jit_compile=False, run_eagerly=True or no plan), or "
    "it returns no dict"
)


@functools.cache
def apply() -> None:
    """Patch the tested versions of Keras so that new train functions are timed."""
    if not keras_patch.apply():
        return
    make_train = JAXTrainer.make_train_function

    @functools.wraps(make_train)
    def make_train_function(self: Any, force: bool = False) -> None:
        made = self.train_function is None or force
        make_train(self, force)
        if made:
            self.train_function = TimedFunction(functools.partial(_call, self.train_function))

    JAXTrainer.make_train_function = make_train_function


def _call(
    function: Callable[..., Any], state: Any, batches: Iterator[Any]
) -> tuple[Any, CallTimes]:
    first = _First(batches)
    logs, after = function(state, first)
    found: Callable[[], Signals] = Signals
    if isinstance(logs, dict) and NAME in logs:
        found = logs[NAME]
        logs = {name: value for name, value in logs.items() if name != NAME}
    elif is_recorded():
        note_missing("signals of training", _UNKNOWN)
    return (logs, after), _CallTimes(first.requested_s, first.received_s, found)


class _First:
    """Batches, with the times of request and arrival of the first one, by `time.perf_counter`."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.requested_s = self.received_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.requested_s:
            return next(self._batches)
        self.requested_s = time.perf_counter()
        batch = next(self._batches)
        self.received_s = time.perf_counter()
        return batch


class _CallTimes(msgspec.Struct, frozen=True):
    """Times of one execution: the first step stands for all of its steps.

    Waiting for the other batches overlaps with steps whose end is not known.
    """

    requested_s: float
    received_s: float
    signals: Callable[[], Signals]

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        del steps
        return {"input_s": max(0.0, self.received_s - max(self.requested_s, since_s))}
