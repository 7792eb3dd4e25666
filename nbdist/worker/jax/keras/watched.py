"""Signals of training of a `fit` with Keras on JAX (`--watch`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import keras

from nbdist.worker.jax.keras.planning import paths
from nbdist.worker.jax.runtime.gradient_marks import evaluated
from nbdist.worker.jax.runtime.step_signals import NAME, JaxSignals, State
from nbdist.worker.runtime import signals

if TYPE_CHECKING:
    from collections.abc import Callable


class KerasSignals:
    """Signals of the train step of a model.

    Args:
        model: model in training.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._signals = JaxSignals()

    def over(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step of a state and a batch, with its signals among its logs."""

        def watched(carried: Any, batch: Any, due: Any = None) -> Any:
            found = evaluated(step, carried, batch)
            logs, after = found.outputs
            if not isinstance(logs, dict):
                return logs, after
            names = (path.removeprefix("model.") for path in paths(self._model))
            state = [State(*one) for one in zip(names, carried[0], after[0], strict=False)]
            rate, scale = self._optimizer(carried[2])
            values = self._signals.values(found, state, {signals.RATE: rate}, due, scale)
            return {**logs, NAME: values}, after

        return watched

    def due(self, steps: int) -> tuple[bool, ...]:
        """Return the last argument of a step: True if it has histograms.

        Args:
            steps: number of steps that run together.
        """
        return (signals.is_due(steps),) if signals.interval() else ()

    def readable(self, logs: Any) -> Any:
        """Replace the arrays of the signals in logs by a function that returns the signals."""
        if not isinstance(logs, dict) or NAME not in logs:
            return logs
        return {**logs, NAME: functools.partial(self._signals.read, logs[NAME], {})}

    def _optimizer(self, values: list[Any]) -> tuple[Any, Any]:
        """Return the learning rate and the scale of the loss, from the optimizer's variables."""
        optimizer = self._model.optimizer
        mapping = list(zip(optimizer.variables, values, strict=True))
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        with keras.StatelessScope(state_mapping=mapping):
            rate = jnp.asarray(keras.ops.convert_to_tensor(optimizer.learning_rate))
            scale = keras.ops.convert_to_tensor(optimizer.dynamic_scale) if scales else 1.0
        return rate, scale
