"""Fits that a recovery or a resumed cell repeats without training: their data and histories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.records import Saving
from tests import clusters
from tests.end_to_end.test_saved_fits import KILL_RANK_1, SETUP, strategy_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet

    import nbdist

DATA = {
    "dataset": """
class Drawn(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.rng, self.order = np.random.default_rng(3), np.arange(48)
    def __len__(self):
        return 4
    def __getitem__(self, i):
        rows = self.order[12 * i : 12 * i + 12]
        return x[rows], y[rows]
    def on_epoch_end(self):
        self.rng.shuffle(self.order)
data, held = Drawn(), Drawn()
options = {}
""",
    "generator": """
def drawn(rng):
    while True:
        rows = rng.permutation(48)[:12]
        yield x[rows], y[rows]
data, held = drawn(np.random.default_rng(3)), drawn(np.random.default_rng(4))
options = dict(steps_per_epoch=4, validation_steps=2)
""",
    "global generator": """
def drawn():
    while True:
        rows = np.random.permutation(48)[:12]
        yield x[rows], y[rows]
data = drawn()
""",
    "shuffled": """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=1).batch(12)
held = data.shuffle(4, seed=2).take(2)
options = {}
""",
    "arrays": """
data, held, options = x, None, dict(y=y, batch_size=12)
""",
}
FIRST = "history = first.fit(data, epochs=3, validation_data=held, verbose=0, **options)\n"
STOPPED = """
class Stops(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = (self.epoch, batch) == (2, 1)
history = first.fit(
    data, epochs=9, validation_data=held, verbose=0, callbacks=[Stops()], **options
)
"""
SECOND = """
done = len(history.epoch)
later = first.fit(
    data, initial_epoch=done, epochs=done + 4, validation_data=held, verbose=0, callbacks=[At()],
    **options,
)
"""
KILL = KILL_RANK_1.replace("other.name and epoch == 2", "first.name and epoch == 5")
TRAINED = "history.epoch, history.history, later.epoch, later.history, digest(first)"
RESULTS = f"{TRAINED}, np.random.randint(1 << 30)"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=request.param) as running:
        yield running


def results_of(
    cluster: nbdist.Cluster,
    cells: list[str],
    saving: Saving | None = None,
    *,
    recoveries: int = 0,
    results: str = RESULTS,
) -> dict[int, str]:
    """Run the cells, the last one with checkpoints, and return what they computed."""
    strategy = strategy_of(cluster)
    for cell in cells[:-1]:
        cluster.run(cell, strategy=strategy, seed=5 if cell is cells[0] else None)
    run = cluster.run(cells[-1], strategy=strategy, saving=saving)
    assert len(run.recoveries) == recoveries
    return cluster.run(results, strategy=strategy).results


def kinds(*params: ParameterSet | tuple[str, str]) -> pytest.MarkDecorator:
    """Parametrize a test with frameworks and kinds of data."""
    return pytest.mark.parametrize(("cluster", "kind"), params, indirect=["cluster"])


def full(framework: str, kind: str) -> ParameterSet:
    return pytest.param(framework, kind, marks=pytest.mark.full)


@kinds(
    ("jax", "dataset"),
    full("jax", "generator"),
    full("jax", "arrays"),
    full("tensorflow", "dataset"),
    full("tensorflow", "shuffled"),
    full("tensorflow", "arrays"),
)  # Keras on TensorFlow reads ahead in generators
def test_fit_of_an_earlier_cell_is_repeated_with_its_data_and_history(
    cluster: nbdist.Cluster, kind: str, tmp_path: Path
) -> None:
    undisturbed = results_of(cluster, [SETUP + DATA[kind], FIRST, SECOND])
    saving = Saving(str(tmp_path / "kept"), every_steps=3)
    cells = [SETUP + DATA[kind] + KILL.format(mark=str(tmp_path / "mark")), FIRST, SECOND]
    assert results_of(cluster, cells, saving, recoveries=1) == undisturbed


@kinds(
    ("jax", "generator"),
    full("jax", "dataset"),
    full("tensorflow", "dataset"),
    full("tensorflow", "shuffled"),
)
def test_fits_of_one_cell_are_repeated_with_their_data_and_history(
    cluster: nbdist.Cluster, kind: str, tmp_path: Path
) -> None:
    """A callback ended the first fit within an epoch."""
    undisturbed = results_of(cluster, [SETUP + DATA[kind], STOPPED + SECOND])
    saving = Saving(str(tmp_path / "kept"), every_steps=3)
    cells = [SETUP + DATA[kind] + KILL.format(mark=str(tmp_path / "mark")), STOPPED + SECOND]
    assert results_of(cluster, cells, saving, recoveries=1) == undisturbed
    resuming = Saving(saving.folder, every_steps=3, resume=True)
    assert results_of(cluster, cells, resuming) == undisturbed


@kinds(
    full("jax", "generator"),
    full("jax", "global generator"),
    full("tensorflow", "generator"),
    full("tensorflow", "global generator"),
)  # the second fits above have an initial epoch too
def test_fit_with_an_initial_epoch_resumes_at_its_position_in_a_generator(
    cluster: nbdist.Cluster, kind: str, tmp_path: Path
) -> None:
    cell = (
        "history = later = first.fit(data, steps_per_epoch=4, initial_epoch=3, epochs=7, verbose=0,"
        " callbacks=[At()])"
    )
    undisturbed = results_of(cluster, [SETUP + DATA[kind], cell], results=TRAINED)
    saving = Saving(str(tmp_path / "kept"), every_steps=3)
    cells = [SETUP + DATA[kind] + KILL.format(mark=str(tmp_path / "mark")), cell]
    found = results_of(cluster, cells, saving, recoveries=1, results=TRAINED)
    assert found == undisturbed
