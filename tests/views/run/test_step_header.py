"""Text at the start of a step cell, and of a training loop in a plain cell."""

from __future__ import annotations

import pytest

from nbdist.records import StepBegun
from nbdist.views.run.step_header import header_lines

TWO_EPOCHS = "; 1,280 samples by element; 2 epochs, 40 steps"
FOUR = f"64 samples a batch, 16 on each of 4 replicas{TWO_EPOCHS}"


def begun(*, replicas: int, epochs: int, batch: int = 64) -> StepBegun:
    return StepBegun(
        replicas=replicas,
        batch=batch,
        samples=1280 if epochs else -1,
        epochs=epochs,
        steps=40 if epochs else -1,
        sharding="by element",
        rates=(),
        rank=0,
        cell=1,
    )


@pytest.mark.parametrize(
    ("replicas", "epochs", "expected"),
    [
        (4, 2, FOUR),
        (1, 2, "64 samples a batch on one replica; 1,280 samples; 2 epochs, 40 steps"),
        (3, 2, f"64 samples a batch, all on each of 3 replicas{TWO_EPOCHS}"),
    ],
)
def test_header_describes_the_split_of_a_batch(replicas: int, epochs: int, expected: str) -> None:
    assert list(header_lines(begun(replicas=replicas, epochs=epochs))) == [expected]


def test_loop_notes_its_split_itself() -> None:
    assert list(header_lines(begun(replicas=4, epochs=0))) == []


def test_step_without_batches_has_no_split() -> None:
    assert list(header_lines(begun(replicas=2, epochs=2, batch=0))) == []
