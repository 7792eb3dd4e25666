"""Settings of Keras optimizers as hyperparameters of a run. A process of its own imports Keras."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.references import plainly

pytestmark = pytest.mark.processes

PROGRAM = """
from keras.optimizers import SGD, Adam, LossScaleOptimizer, schedules
from nbdist.worker.keras.optimizer_config import hyperparameters_of

outcome = [
    hyperparameters_of({"": Adam(1e-3)}),
    hyperparameters_of({"": SGD(schedules.CosineDecay(0.1, 10))}),
    hyperparameters_of({"": LossScaleOptimizer(SGD(0.3))}),
    hyperparameters_of({"first": SGD(0.1), "second": Adam(0.2)}),
]
"""


@cache
def outcome() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plainly({"settings": PROGRAM}, "tensorflow", "keras")["settings"]
    return found


@pytest.mark.parametrize(
    ("number", "name", "rate"), [(0, "Adam", 1e-3), (1, "SGD", "CosineDecay"), (2, "SGD", 0.3)]
)
def test_class_and_learning_rate_are_named(number: int, name: str, rate: float | str) -> None:
    assert outcome()[number] == {"optimizer": name, "learning_rate": pytest.approx(rate)}


def test_several_optimizers_have_their_own_names() -> None:
    assert outcome()[3] == {
        "optimizer of first": "SGD",
        "learning_rate of first": pytest.approx(0.1),
        "optimizer of second": "Adam",
        "learning_rate of second": pytest.approx(0.2),
    }
