"""Settings of Keras optimizers, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer

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


def _plain(thing: object) -> dict[str, object]:
    return {
        word: value
        for word, value in vars(thing).items()
        if value is None or isinstance(value, (bool, int, float, str))
        if not word.startswith("_") and word != "name"
    }
