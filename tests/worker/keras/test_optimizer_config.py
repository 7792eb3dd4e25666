"""Settings of Keras optimizers as hyperparameters of a run."""

from __future__ import annotations

import keras
import pytest

from nbdist.worker.keras.optimizer_config import hyperparameters_of

SCHEDULE = keras.optimizers.schedules.CosineDecay(0.1, 10)


@pytest.mark.parametrize(
    ("optimizer", "name", "rate"),
    [
        (keras.optimizers.Adam(1e-3), "Adam", 1e-3),
        (keras.optimizers.SGD(SCHEDULE), "SGD", "CosineDecay"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3)), "SGD", 0.3),
    ],
)
def test_class_and_learning_rate_are_named(
    optimizer: keras.optimizers.Optimizer, name: str, rate: float | str
) -> None:
    found = hyperparameters_of({"": optimizer})
    assert found == {"optimizer": name, "learning_rate": rate}


def test_several_optimizers_have_their_own_names() -> None:
    both = {"first": keras.optimizers.SGD(0.1), "second": keras.optimizers.Adam(0.2)}
    assert hyperparameters_of(both) == {
        "optimizer of first": "SGD",
        "learning_rate of first": 0.1,
        "optimizer of second": "Adam",
        "learning_rate of second": 0.2,
    }
