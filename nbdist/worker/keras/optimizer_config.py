"""Settings of Keras optimizers, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from nbdist.private_api.keras import BaseOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping


def flags(owners: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of the optimizers among `owners` and of their learning-rate schedules.

    Optimizers' own names are left out: Keras numbers them, so they may differ between ranks.
    """
    settings: dict[str, object] = {}
    for name, owner in owners.items():
        if isinstance(owner, BaseOptimizer):
            rate = owner._learning_rate
            is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
            for part in (owner, rate) if is_schedule else (owner,):
                settings |= {f"{name}: {word}": value for word, value in _plain(part).items()}
    return settings


def hyperparameters_of(optimizers: Mapping[str, Any]) -> dict[str, float | str]:
    """Return class and learning rate of Keras optimizers, as `optimizer` and `learning_rate`.

    With several optimizers, the names contain theirs: `optimizer of NAME`.
    """
    found: dict[str, float | str] = {}
    for name, optimizer in optimizers.items():
        suffix = f" of {name}" if len(optimizers) > 1 else ""
        found[f"optimizer{suffix}"] = type(_inner(optimizer)).__name__
        found[f"learning_rate{suffix}"] = _rate(_inner(optimizer))
    return found


def _inner(optimizer: Any) -> Any:
    """Return the optimizer in one that scales the loss."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if scales else optimizer


def _rate(optimizer: Any) -> float | str:
    """Return the learning rate, or the class of its schedule."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return float(f"{float(rate.numpy()):.7g}")  # the digits of float32
    return type(rate).__name__


def _plain(thing: object) -> dict[str, object]:
    return {
        word: value
        for word, value in vars(thing).items()
        if value is None or isinstance(value, (bool, int, float, str))
        if not word.startswith("_") and word != "name"
    }
