"""Reports of the batches of `fit` on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

FIT = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("adam", "mse", steps_per_execution=2)
x = np.ones((24, 3), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=2);
"""
STEPS = 6


@pytest.fixture(params=["tensorflow", pytest.param("jax", marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=request.param) as running:
        yield running


@pytest.mark.processes
def test_last_call_of_several_steps_may_have_fewer(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epoch of three batches has three steps, in two calls of the train function."""
    cluster.run(FIT)
    assert f"epoch 2 of 2 · step {STEPS} of {STEPS} " in capsys.readouterr().out
