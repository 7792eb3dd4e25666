"""Programs contain cells that change values of other cells, as notebooks of others do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import clusters
from tests.end_to_end.test_exported_programs import (
    Training,
    launch,
    run_cells,
    weights,
    with_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

TENSORFLOW = Training(
    "mirrored",
    [
        (cell, {})
        for cell in (
            """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
table = np.ones((64, 1), "float32")
weight = table
""",
            """
base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(5)])
model = keras.Sequential([base, keras.layers.Dense(1)])
opt = keras.optimizers.Adam(0.05)
""",
            "for layer in base.layers[:1]:\n    layer.trainable = False",
            "model.compile(opt, 'mse')\nhead = model.layers[-1]",
            """
def train_model(epochs):
    return model.fit(x, y * table, batch_size=16, epochs=epochs, verbose=0)
def look(model, rows):
    return model.predict(rows, verbose=0).mean()
""",
            "first = train_model(2).history['loss']\nprint(first)",
            "print(look(model, x[:4]))",
            "opt.learning_rate = 0.01",
            "head.set_weights([w * 0.5 for w in head.get_weights()])",
            "model.get_layer(head.name).bias.assign([0.5])",
            "weight *= 0.5",
            "h = train_model(2)",
        )
    ],
    "h.history['loss']",
    "model.get_weights()",
)

JAX = Training(
    "pjrt",
    [
        (cell, {})
        for cell in (
            """
import jax, jax.numpy as jnp, numpy as np
from types import SimpleNamespace
x = np.random.default_rng(0).normal(size=(64, 4))
y = x.sum(1)
rng = np.random.default_rng(7)
hp = SimpleNamespace(lr=0.1)
cfg = hp
log, scale = [], {"v": 1.0}
words = list({"momentum", "decay", "warmup", "beta", "steps", "clip"})
bias = sum(place * len(word) for place, word in enumerate(words)) / 100
""",
            "from jax import config\nconfig.update('jax_enable_x64', True)",
            """
def stream():
    while True:
        rows = rng.permutation(64)[:16]
        yield x[rows], y[rows]
batches = stream()
class Trainer:
    def __init__(self):
        self.w = jnp.zeros(4)
trainer = Trainer()
def add_to_class(cls):
    def add(function):
        setattr(cls, function.__name__, function)
        return function
    return add
@jax.jit
def loss_of(w, x, y):
    return jnp.mean((x @ w + bias - y) ** 2)
""",
            "xb, yb = next(batches)\nprint(xb.shape)",
            "for xb, yb in batches:\n    break",
            "sample = rng.choice(64, 5)\nprint(x[sample])",
            "cfg.lr = 0.02",
            """
@add_to_class(Trainer)
def fit(self, steps):
    losses = []
    for _ in range(steps):
        xb, yb = next(batches)
        loss, g = jax.value_and_grad(loss_of)(self.w, xb, yb)
        self.w = self.w - hp.lr * scale["v"] * g
        losses.append(float(loss))
    return losses
""",
            "before = trainer.fit(3)\nprint(before)",
            "_ = scale.update(v=0.5)",
            "losses = trainer.fit(5)",
        )
    ],
    "losses",
    "[trainer.w]",
)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=request.param) as running:
        yield running


def results_of_run(cluster: nbdist.Cluster, training: Training) -> dict[int, dict[str, Any]]:
    """Return the losses and the trained weights of each rank."""
    cluster.run(f"losses_of_run = list({training.loss})")
    losses, trained = cluster.pull(["losses_of_run"]), weights(cluster, training)
    return {r: {"loss": losses[r]["losses_of_run"], "weights": trained[r]} for r in range(2)}


def check_program(folder: Path, expected: dict[int, dict[str, Any]]) -> None:
    """Run a program, and compare the results of each rank with those of the run."""
    ended = launch(folder)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        found = np.load(folder / f"result{rank}.npz")
        np.testing.assert_array_equal(found["loss"], expected[rank]["loss"])
        np.testing.assert_array_equal(found["weights"], expected[rank]["weights"])


@pytest.mark.parametrize(
    ("cluster", "training", "left_out"),
    [
        pytest.param("tensorflow", TENSORFLOW, "look(model, x[:4])", marks=pytest.mark.full),
        ("jax", JAX, None),
    ],
    indirect=["cluster"],
    ids=["tensorflow", "jax"],
)
def test_program_has_the_changes_of_all_cells(
    cluster: nbdist.Cluster, tmp_path: Path, training: Training, left_out: str | None
) -> None:
    run_cells(cluster, training)
    expected = results_of_run(cluster, training)
    exported = cluster.export(str(tmp_path / "train"))
    assert exported.remarks == ()
    text = (tmp_path / "train" / "train.py").read_text()
    assert left_out is None or left_out not in text
    with_results(tmp_path / "train", training)
    check_program(tmp_path / "train", expected)


@pytest.mark.full  # tests/cells/test_written_files.py
@pytest.mark.parametrize("cluster", ["jax"], indirect=True)
def test_program_writes_the_files_that_it_reads(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    table, words = tmp_path / "x.npy", tmp_path / "words.txt"
    cells = [
        "import jax, jax.numpy as jnp, numpy as np\nrng = np.random.default_rng(3)",
        "raw = rng.normal(size=(64, 4))",
        f"np.save({str(table)!r}, raw * 2)",
        f"with open({str(words)!r}, 'w') as file:\n    file.write('a\\nb\\nc')",
        f"x = jnp.asarray(np.load({str(table)!r}))\ny = x.sum(1)\nw = jnp.zeros(4)",
        f"""
scale = 1 / len(open({str(words)!r}).read().split())
losses = []
for i in range(0, 64, 16):
    xb, yb = x[i : i + 16], y[i : i + 16]
    loss, g = jax.value_and_grad(lambda w: jnp.mean((xb @ w - yb) ** 2))(w)
    w = w - scale * g
    losses.append(float(loss))
""",
    ]
    training = Training("pjrt", [(cell, {}) for cell in cells], "losses", "[w]")
    run_cells(cluster, training)
    expected = results_of_run(cluster, training)
    exported = cluster.export(str(tmp_path / "train"))
    assert exported.remarks == ()
    table.unlink()
    words.unlink()
    with_results(tmp_path / "train", training)
    check_program(tmp_path / "train", expected)
