"""Scaling of Keras learning rates by a variable factor (`--scale-lr`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf

from nbdist.errors import StepError
from nbdist.records import Rate
from nbdist.worker.training.warmup import Factor

if TYPE_CHECKING:
    from nbdist.private_api.keras import BaseOptimizer
    from nbdist.worker.tensorflow.keras_objects import KerasObjects


class Rates(Protocol):
    """Learning rates that may change at each step.

    Attributes:
        factor: current factor of the learning rates.
    """

    @property
    def factor(self) -> float: ...

    def next_step(self) -> None:
        """Update the factor. Call this before each step."""
        ...


class ScaledRates:
    """Learning rates of Keras optimizers, times a factor that grows from 1 at each step.

    Args:
        objects: Keras objects with the optimizers.
        strategy: strategy in whose scope the factor is created.
        factor: final factor, the number of replicas.
        warmup_steps: number of steps until the final factor.
        made: number of earlier steps.
    """

    def __init__(
        self,
        objects: KerasObjects,
        strategy: tf.distribute.Strategy,
        factor: int,
        warmup_steps: int,
        made: int,
    ) -> None:
        self._factor = Factor(factor, warmup_steps, made)
        self._before = [
            (optimizer, optimizer._learning_rate) for _, optimizer in objects.optimizers
        ]
        if not self._before:
            raise StepError("--scale-lr: the step uses no Keras optimizer: remove --scale-lr")
        with strategy.scope():
            self._now = tf.Variable(
                1.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )
        self.rates = tuple(
            Rate(
                name=name,
                before=(rate := float(tf.convert_to_tensor(optimizer.learning_rate))),
                after=rate * factor,
                warmup_steps=warmup_steps,
            )
            for name, optimizer in objects.optimizers
        )
        for optimizer, rate in self._before:
            optimizer._learning_rate = self._scaled(optimizer, rate)

    def _scaled(self, optimizer: BaseOptimizer, rate: Any) -> Any:
        def current() -> tf.Tensor:
            is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
            now = rate(optimizer.iterations) if is_schedule else rate
            base = tf.convert_to_tensor(now() if callable(now) else now)
            return base * tf.cast(self._now, base.dtype)

        return current

    def next_step(self) -> None:
        before, now = self._factor.now, self._factor.next()
        if now != before:
            self._now.assign(now)

    @property
    def factor(self) -> float:
        return self._factor.now

    def restore(self) -> None:
        """Restore the original learning rates."""
        for optimizer, rate in self._before:
            optimizer._learning_rate = rate


class _NoRates:
    """Learning rates that do not change."""

    factor = 1.0

    def next_step(self) -> None: ...


NO_RATES = _NoRates()
