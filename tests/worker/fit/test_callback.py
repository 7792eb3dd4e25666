"""Reports of `fit` on real engines: losses of ranks, and numbers of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

FIT = """
import numpy as np, keras
from keras import ops
keras.utils.set_random_seed(1)
x = np.sin(np.arange(80 * 3, dtype="float32")).reshape(80, 3)
class Centred(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x - ops.mean(x, axis=0))  # depends on all rows of the batch
model = Centred()
model.compile("sgd", "mse", steps_per_execution=3)
model.fit(x, x[:, :1], batch_size=16, epochs=2, validation_data=(x[:16], x[:16, :1]))
0
"""
"""A fit of 5 steps in each epoch, of which rank 0 alone counts the rows."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        yield running


def test_whole_batches_have_losses_of_training_and_numbers_of_batches(
    cluster: nbdist.Cluster,
) -> None:
    run = cluster.run(FIT)
    of_epochs = [m for m in run.metrics if m.step < 0]
    assert [m.own for m in of_epochs if m.rank == 1] == [{}, {}]
    counted = [(m.own["loss"], m.shared["loss"]) for m in of_epochs if m.rank == 0]
    np.testing.assert_allclose(*zip(*counted, strict=True), rtol=1e-6)
    assert "epoch 2 of 2, step 10 of 10," in repr(run)
