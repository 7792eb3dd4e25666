"""`fit` on JAX tells how long a step waited for its data.

Keras takes the batch in Python, between two steps that devices make by themselves: what is waited
while the devices still make the last step is no wait of theirs. Collectives are timed by the
profiler (`worker/training/trace_schedule.py`).

Keras 3.15: of other versions nothing is timed.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import keras
import msgspec
from keras.src.backend.jax.trainer import JAXTrainer

from nbdist.worker.jax.keras.patch import PATCHED_SERIES
from nbdist.worker.keras.train_function_timing import TimedFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.keras.train_function_timing import Took


@functools.cache
def apply() -> None:
    """Time every train function that is made from here on."""
    if not keras.__version__.startswith(PATCHED_SERIES):
        return
    make_train = JAXTrainer.make_train_function

    @functools.wraps(make_train)
    def make_train_function(self: Any, force: bool = False) -> None:
        made = self.train_function is None or force
        make_train(self, force)
        if made:
            self.train_function = TimedFunction(functools.partial(_call, self.train_function))

    JAXTrainer.make_train_function = make_train_function


def _call(function: Callable[..., Any], state: Any, batches: Iterator[Any]) -> tuple[Any, Took]:
    first = _First(batches)
    outputs = function(state, first)
    return outputs, _Took(first.asked_s, first.there_s)


class _First:
    """Batches, and when the first was asked for and there, on `time.perf_counter`."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.asked_s = self.there_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.asked_s:
            return next(self._batches)
        self.asked_s = time.perf_counter()
        batch = next(self._batches)
        self.there_s = time.perf_counter()
        return batch


class _Took(msgspec.Struct, frozen=True):
    """A step, or several: then the first stands for all.

    What is waited for the others is hidden behind steps whose end nobody is told of.
    """

    asked_s: float
    there_s: float

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        del steps
        return {"input_s": max(0.0, self.there_s - max(self.asked_s, since_s))}
