"""Inputs of a recovered run: cells that change values through functions, and random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.errors import RanksLostError
from nbdist.records import Saving
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist
    from nbdist.records import StrategyName

INPUTS = [
    "import numpy as np",
    "print(np.random.rand())",  # draws, and binds nothing
    "x = np.random.normal(size=(24, 3)).astype('float32')",
    "target = np.random.normal(size=3).astype('float32')",
    "def halve(a):\n    a *= 0.5\n    return a.sum()",
    "total = halve(target)",  # changes `target`, and binds another name
    "shown = np.random.permutation(3)",
]
BATCHES = """
import os, signal
class Batches:
    def __len__(self):
        return 6
    def __iter__(self):
        for i in range(6):
            if rank == 1 and i == {step} and os.path.exists({mark!r}):
                os.remove({mark!r})
                os.kill(os.getpid(), signal.SIGKILL)
            yield x[i * 4 : i * 4 + 4]
batches = Batches()
"""
FRAMEWORKS: dict[StrategyName, str] = {"mirrored": "tensorflow", "pjrt": "jax"}
START = {
    "mirrored": "import tensorflow as tf\nw = tf.Variable(tf.zeros(3))",
    "pjrt": "import jax, jax.numpy as jnp\nw = jnp.zeros(3)",
}
LOOP = {
    "mirrored": """
noise = np.random.rand(3).astype("float32")
for batch in batches:
    with tf.GradientTape() as tape:
        errors = tf.linalg.matvec(batch, w) - tf.linalg.matvec(batch, target)
        loss = tf.reduce_mean(errors ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w) + noise)
""",
    "pjrt": """
noise = np.random.rand(3).astype("float32")
for batch in batches:
    grads = jax.grad(lambda w: ((batch @ w - batch @ target) ** 2).mean())(w)
    w = w - 0.1 * grads + noise
""",
}


@pytest.fixture(params=["pjrt", pytest.param("mirrored", marks=pytest.mark.full)])
def strategy(request: pytest.FixtureRequest) -> StrategyName:
    return request.param


@pytest.fixture
def cluster(strategy: StrategyName) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=FRAMEWORKS[strategy]) as running:
        yield running


def train(
    cluster: nbdist.Cluster, strategy: StrategyName, folder: Path, step: int | None
) -> tuple[int, str]:
    """Train on new workers, and kill rank 1 before a step.

    Returns:
        The number of recoveries, and the bits of the results on all ranks.
    """
    cluster.restart()
    mark = folder / "mark"
    mark.touch()
    source = BATCHES.format(step=-1 if step is None else step, mark=str(mark))
    for cell in (*INPUTS, START[strategy], source):
        cluster.run(cell, strategy=strategy)
    saving = Saving(folder=str(folder / f"kept-{step}"), every_steps=2)
    run = cluster.run(LOOP[strategy], strategy=strategy, saving=saving)
    shown = "[a.tobytes().hex() for a in (np.asarray(w), target, np.random.rand(2))]"
    return len(run.recoveries), str(sorted(cluster.run(shown, strategy=strategy).results.items()))


def test_a_recovered_run_has_the_inputs_of_the_first(
    cluster: nbdist.Cluster, strategy: StrategyName, tmp_path: Path
) -> None:
    """Rank 1 dies before the first checkpoint, and after it."""
    _, undisturbed = train(cluster, strategy, tmp_path, None)
    for step in (0, 4):
        assert train(cluster, strategy, tmp_path, step) == (1, undisturbed)


def test_a_value_of_a_model_that_a_function_trained_cannot_be_created_again(tmp_path: Path) -> None:
    """A repeated `fit` does not train, so the value would be that of the untrained model."""
    with clusters.cluster(hosts=2, framework="tensorflow") as cluster:
        mark = tmp_path / "mark"
        mark.touch()
        for cell in (
            "import keras, numpy as np, tensorflow as tf\nx = np.ones((24, 3), 'float32')",
            "def train(model):\n    return model.fit(x, x[:, :1], epochs=1, verbose=0)",
            "with strategy.scope():\n    teacher = keras.Sequential([keras.layers.Dense(1)])",
            "teacher.compile('sgd', 'mse')",
            "history = train(teacher)",
            "goal = teacher.get_weights()[0]",
            "w = tf.Variable(tf.zeros((3, 1)))",
            BATCHES.format(step=4, mark=str(mark)),
        ):
            cluster.run(cell, strategy="mirrored")
        distillation = """
for batch in batches:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((batch @ w - batch @ goal) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
"""
        saving = Saving(folder=str(tmp_path / "kept"), every_steps=2)
        with pytest.raises(RanksLostError) as caught:
            cluster.run(distillation, strategy="mirrored", saving=saving)
        assert "derived it from the trained `teacher`" in "".join(caught.value.__notes__)
