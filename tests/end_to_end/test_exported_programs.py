"""Exported programs give the numbers of the notebook's run, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.jobs import folder
from tests import clusters
from tests.brought import NOTEBOOKS, Notebook

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

LIMIT_S = 240

RESULTS = """
numpy.savez(f"result{{job.rank}}.npz", loss={loss}, weights=numpy.concatenate([
    numpy.ravel(w) for w in {weights}]))
job.close()
"""
"""End of a program in the tests: it stores the losses and the weights of its rank."""


@dataclass(frozen=True)
class Training:
    """A training in cells.

    Attributes:
        cells: source and options of each cell; the last one trains.
        loss: code of the losses in the program.
        weights: code of a list of the trained arrays.
    """

    strategy: str
    cells: Sequence[tuple[str, Mapping[str, Any]]]
    loss: str
    weights: str


IMPORTS = "import keras\nimport numpy as np\nimport tensorflow as tf"
MIRRORED_MODEL = """
model = keras.Sequential([
    keras.Input((4,)),
    keras.layers.Dense(8, activation="tanh"),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(1),
])
optimizer = keras.optimizers.Adam(learning_rate=0.01)
"""
MIRRORED_STEP = """
x, y = batch
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
grads = tape.gradient(loss, model.trainable_variables)
optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""
JAX_MODEL = '''
import jax
import jax.numpy as jnp
import optax

def loss_of(params, x, y):
    """Return the mean squared error
    of a batch."""
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)
'''
JAX_STATE = """
keys = jax.random.split(jax.random.key(3), 2)
params = {
    "w": jax.random.normal(keys[0], (4, 8)),
    "b": jnp.zeros(8),
    "v": jax.random.normal(keys[1], (8, 1)),
}
tx = optax.adam(1e-2)
opt_state = tx.init(params)
"""
JAX_STEP = """
x, y = batch
loss, grads = jax.value_and_grad(loss_of)(params, x, y)
updates, opt_state = tx.update(grads, opt_state)
params = optax.apply_updates(params, updates)
{"loss": loss, "largest": jnp.max(jnp.abs(params["w"]))}
"""
ARRAYS = """
rng = np.random.default_rng(0)
train = rng.normal(size=(100, 4)).astype("float32"), rng.normal(size=(100, 1)).astype("float32")
"""
FIT = """
model.compile(optimizer=optimizer, loss="mse")
history = model.fit(*train, epochs=2, batch_size=16, verbose=0)
"""
STEP = {"data": "train", "batch": 16, "epochs": 2, "shuffle": 5}

FUNCTIONS = """
loss_of = keras.losses.MeanSquaredError()

@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

class Trainer:
    def __init__(self):
        self.losses = []

    def epoch(self, batches):
        for x, y in batches:
            self.losses.append(float(train_step(x, y)))
"""
MIRRORED_LOOP = """
dataset = tf.data.Dataset.from_tensor_slices(train).shuffle(100).batch(20)
trainer = Trainer()
epochs = 2
for epoch in range(epochs):
    trainer.epoch(dataset)
for x, y in dataset:
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_of(y, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    trainer.losses.append(float(loss))
"""
JAX_LOOP = """
@jax.jit
def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss

losses = []
for epoch in range(2):
    for i in range(0, 100, 20):
        x, y = train[0][i : i + 20], train[1][i : i + 20]
        params, opt_state, loss = update(params, opt_state, x, y)
        losses.append(float(loss))
    print(f"epoch {epoch}: {losses[-1]:.4f}")
"""

TRAININGS = {
    "mirrored fit and loop": Training(
        "mirrored",
        [
            (IMPORTS, {}),
            (ARRAYS, {}),
            (MIRRORED_MODEL, {}),
            (FUNCTIONS, {}),
            (FIT + MIRRORED_LOOP, {}),
        ],
        'history.history["loss"] + trainer.losses',
        "model.get_weights()",
    ),
    "pjrt fit and loop": Training(
        "pjrt",
        [
            (JAX_MODEL, {}),
            ("import keras\nimport numpy as np" + ARRAYS, {}),
            (JAX_STATE, {}),
            (MIRRORED_MODEL, {}),
            (FIT + JAX_LOOP, {}),
        ],
        'history.history["loss"] + losses',
        "model.get_weights() + jax.tree.leaves(params)",
    ),
    "mirrored step": Training(
        "mirrored",
        [(IMPORTS, {}), (ARRAYS, {}), (MIRRORED_MODEL, {}), (MIRRORED_STEP, STEP)],
        'job_history["loss"]',
        "model.get_weights()",
    ),
    "pjrt step": Training(
        "pjrt",
        [(JAX_MODEL, {}), ("import numpy as np" + ARRAYS, {}), (JAX_STATE, {}), (JAX_STEP, STEP)],
        'job_history["loss"]',
        "jax.tree.leaves(params)",
    ),
}
SINGLE_TRAININGS = {
    "mirrored fit": Training(
        "mirrored",
        [(IMPORTS, {}), (ARRAYS, {}), (MIRRORED_MODEL, {}), (FIT, {})],
        'history.history["loss"]',
        "model.get_weights()",
    ),
    "mirrored loop": Training(
        "mirrored",
        [(IMPORTS, {}), (ARRAYS, {}), (MIRRORED_MODEL, {}), (FUNCTIONS, {}), (MIRRORED_LOOP, {})],
        "trainer.losses",
        "model.get_weights()",
    ),
    "pjrt fit": Training(
        "pjrt",
        [("import keras\nimport numpy as np" + ARRAYS, {}), (MIRRORED_MODEL, {}), (FIT, {})],
        'history.history["loss"]',
        "model.get_weights()",
    ),
    "pjrt loop": Training(
        "pjrt",
        [(JAX_MODEL, {}), ("import numpy as np" + ARRAYS, {}), (JAX_STATE, {}), (JAX_LOOP, {})],
        "losses",
        "jax.tree.leaves(params)",
    ),
}
"""Cells with one training. Checkpoints contain only the first training of a cell."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=request.param) as running:
        yield running


def run_cells(cluster: nbdist.Cluster, training: Training) -> nbdist.Run:
    """Run the cells on fresh workers, and return the run of the last one."""
    cluster.restart()
    for number, (source, options) in enumerate(training.cells, 1):
        named = {"strategy": training.strategy, **options}
        run = cluster.run(source, label=number, header="%%dist_run", **named)
    return run


def weights(cluster: nbdist.Cluster, training: Training) -> dict[int, np.ndarray]:
    """Return the trained weights of each rank, as one array."""
    source = (
        f"import numpy\nfound = numpy.concatenate([numpy.ravel(w) for w in {training.weights}])"
    )
    cluster.run(source, strategy=training.strategy)
    return {rank: pulled["found"] for rank, pulled in cluster.pull(["found"]).items()}


def export(cluster: nbdist.Cluster, target: Path, **chosen: Any) -> str:
    """Export a training to a folder, and return the text of its program."""
    cluster.export(str(target), **chosen)
    return (target / folder.PROGRAM).read_text()


def command(*words: str, hosts: int = 2) -> list[str]:
    return [
        sys.executable,
        "-m",
        "nbdist.cli",
        "run",
        folder.PROGRAM,
        "--hosts",
        str(hosts),
        *words,
    ]


def launch(
    target: Path, *words: str, hosts: int = 2, **env: str
) -> subprocess.CompletedProcess[str]:
    return started(target, command(*words, hosts=hosts), **env)


def alone(target: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in one process, without a launcher."""
    return started(target, [sys.executable, folder.PROGRAM, *words])


def started(target: Path, words: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=target,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def with_results(target: Path, training: Training) -> None:
    """Let a program store its losses and weights."""
    path = target / folder.PROGRAM
    text = path.read_text().replace("job.train(", "job_history = job.train(")
    end = RESULTS.format(loss=training.loss, weights=training.weights)
    path.write_text("import numpy\n" + text.replace("\njob.close()\n", end))


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        pytest.param("tensorflow", "mirrored step", marks=pytest.mark.full),  # tested below
        ("tensorflow", "mirrored fit and loop"),
        pytest.param("jax", "pjrt step", marks=pytest.mark.full),  # tested below
        pytest.param("jax", "pjrt fit and loop", marks=pytest.mark.full),
        pytest.param("both", "mirrored fit and loop", marks=pytest.mark.full),
        pytest.param("both", "pjrt fit and loop", marks=pytest.mark.full),
    ],
    indirect=["cluster"],
)
def test_program_gives_the_losses_and_weights_of_the_run(
    cluster: nbdist.Cluster, tmp_path: Path, name: str
) -> None:
    training = TRAININGS[name]
    run = run_cells(cluster, training)
    expected = weights(cluster, training)
    if "step" not in name:
        cluster.run(f"losses = {training.loss}", strategy=training.strategy)
        losses = {rank: found["losses"] for rank, found in cluster.pull(["losses"]).items()}
    else:
        losses = dict(enumerate(run.history["loss"]))
    text = export(cluster, tmp_path / "train", run="", cell=len(training.cells))
    with_results(tmp_path / "train", training)
    ended = launch(tmp_path / "train")
    assert ended.returncode == 0, f"{ended.stderr}\n{text}"
    for rank in range(2):
        found = np.load(tmp_path / "train" / f"result{rank}.npz")
        np.testing.assert_array_equal(found["loss"], losses[rank if len(losses) > 1 else 0])
        np.testing.assert_array_equal(found["weights"], expected[rank])


def in_float64(training: Training) -> Training:
    """Return a training that computes in double precision."""
    cells = [
        (source.replace('astype("float32")', 'astype("float64")'), options)
        for source, options in training.cells
    ]
    head, options = cells[0]
    if training.strategy == "pjrt":
        head += '\nimport jax\njax.config.update("jax_enable_x64", True)'
    if "import keras" in head:
        head += '\nkeras.config.set_floatx("float64")'
    cells[0] = (head, options)
    return replace(training, cells=cells)


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("tensorflow", "mirrored step"),
        pytest.param("tensorflow", "mirrored fit", marks=pytest.mark.full),
        pytest.param("jax", "pjrt step", marks=pytest.mark.full),
        pytest.param("tensorflow", "mirrored loop", marks=pytest.mark.full),
        pytest.param("jax", "pjrt fit", marks=pytest.mark.full),
        pytest.param("jax", "pjrt loop", marks=pytest.mark.full),
    ],
    indirect=["cluster"],
)
def test_program_gives_the_same_weights_on_other_numbers_of_workers(
    cluster: nbdist.Cluster, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    training = in_float64({**TRAININGS, **SINGLE_TRAININGS}[name])
    run_cells(cluster, training)
    expected = weights(cluster, training)[0]
    export(cluster, tmp_path / "train")
    cluster.restart()  # without double precision
    with_results(tmp_path / "train", training)
    for hosts in (1, 2, 4) if request.config.getoption("--full") else (1,):
        ended = launch(tmp_path / "train", hosts=hosts) if hosts > 1 else alone(tmp_path / "train")
        assert ended.returncode == 0, ended.stderr
        found = np.load(tmp_path / "train" / "result0.npz")["weights"]
        assert found.dtype == expected.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


BROUGHT = [
    pytest.param("tensorflow", "tensorflow/loop_top_level", marks=pytest.mark.full),
    pytest.param("tensorflow", "tensorflow/tfrecord_pipeline", marks=pytest.mark.full),
    pytest.param("tensorflow", "tensorflow/transfer_learning", marks=pytest.mark.full),
    pytest.param("tensorflow", "tensorflow/wgan_gradient_penalty", marks=pytest.mark.full),
    pytest.param("jax", "jax/maml_sinusoid", marks=pytest.mark.full),
    pytest.param("jax", "jax/shard_map_step", marks=pytest.mark.full),
]
"""Notebooks whose last cell trains."""

OUTCOME = """
with job.cell():
{cell}
if job.rank == 0:
    import json
    with open("outcome.json", "w") as file:
        json.dump(outcome, file)
job.close()
"""


@pytest.mark.parametrize(("cluster", "name"), BROUGHT, indirect=["cluster"])
def test_program_of_a_notebook_of_others_gives_its_numbers(
    cluster: nbdist.Cluster, tmp_path: Path, name: str
) -> None:
    notebook = Notebook(NOTEBOOKS[name])
    cells = [(cell, {}) for cell in notebook.cells]
    strategy = "mirrored" if name.startswith("tensorflow") else "pjrt"
    run_cells(cluster, Training(strategy, cells, "", ""))
    exported = cluster.export(str(tmp_path / "train"))
    assert (exported.cell, exported.remarks) == (len(cells), ())
    cluster.run(notebook.outcome, strategy=strategy)
    expected = cluster.pull(["outcome"], ranks="0")[0]["outcome"]
    path = tmp_path / "train" / folder.PROGRAM
    end = OUTCOME.format(cell=textwrap.indent(notebook.outcome, "    "))
    path.write_text(path.read_text().replace("\njob.close()\n", end))
    ended = launch(tmp_path / "train")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "train" / "outcome.json").read_text()) == expected


OWN_MODULE = """
import jax
import jax.numpy as jnp

def loss_of(w, x, y):
    return jnp.mean((x @ w - y) ** 2)

def train(w, batches):
    losses = []
    for x, y in batches:
        loss, grad = jax.value_and_grad(loss_of)(w, x, y)
        w = w - 0.1 * grad
        losses.append(float(loss))
    return w, losses
"""
OF_OWN_MODULE = Training(
    "pjrt",
    [
        (f"import numpy as np\n{ARRAYS}", {}),
        (
            """
from own_training import train as train_own
batches = [tuple(a[i:i + 20] for a in train) for i in range(0, 100, 20)]
w, losses = train_own(np.zeros((4, 1), "float32"), batches)
""",
            {},
        ),
    ],
    "losses",
    "[w]",
)


@pytest.mark.parametrize("cluster", ["jax"], indirect=True)
def test_program_has_the_modules_of_the_workers(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own_training.py"
    module.write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    cluster.restart()
    for cell, _ in OF_OWN_MODULE.cells:
        cluster.run(cell)
    expected = cluster.pull(["losses"], ranks="0")[0]["losses"]
    assert cluster.export(str(tmp_path / "before")).remarks == ()
    module.write_text("raise ImportError('edited')\n")
    (edited,) = cluster.export(str(tmp_path / "edited")).remarks
    assert edited.startswith("own_training.py was edited after the last cell: the program has the")
    module.unlink()
    exported = cluster.export(str(tmp_path / "train"))
    assert exported.remarks == (edited,)
    with_results(tmp_path / "train", OF_OWN_MODULE)
    ended = launch(tmp_path / "train")
    assert ended.returncode == 0, ended.stderr
    assert "own_training.py, line" in ended.stdout, "its loop is divided"
    assert np.load(tmp_path / "train" / "result1.npz")["loss"].tolist() == expected
    module.write_text(OWN_MODULE.replace("0.1", "0.2"))
    cluster.run("1")
    (newer,) = cluster.export(str(tmp_path / "newer")).remarks
    assert re.match(r"the module `own_training` was edited after \[\d+\] ran", newer)
    assert "0.2" in (tmp_path / "newer" / "own_training.py").read_text()


READER = """
import importlib.resources, pathlib
from own_plug import SCALE

def words():
    path = pathlib.Path(__file__).parent / "vocab.txt"
    text = importlib.resources.files("own_words").joinpath("vocab.txt").read_text()
    assert text == path.read_text()
    return text.split()
"""
OF_PACKAGE = Training(
    "pjrt",
    [
        (
            """
import jax, jax.numpy as jnp, own_words, importlib
plugin = importlib.import_module("own_" + "hidden")
w = jnp.zeros(len(own_words.words())) + own_words.SCALE + plugin.SHIFT
""",
            {},
        ),
        (
            """
losses = []
for i in range(3):
    losses.append(float(w.sum()))
    w = w - 0.1 * jax.grad(lambda w: (w**2).sum())(w)
""",
            {},
        ),
    ],
    "losses",
    "[w]",
)


@pytest.mark.full  # tests/cells/test_own_modules.py
def test_program_has_data_of_packages_and_modules_of_further_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    for folder_of, name, text in (
        (tmp_path, "own_words/__init__.py", READER),
        (tmp_path, "own_words/vocab.txt", "a b c"),
        (tmp_path, "own_words/weights.bin", "x"),
        (library, "own_plug.py", "SCALE = 2.0\n"),
        (library, "own_hidden.py", "SHIFT = 0.5\n"),
    ):
        (folder_of / name).parent.mkdir(exist_ok=True)
        (folder_of / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    sync = nbdist.Sync(folders=(str(library),), exclude=("*.bin",))
    with clusters.cluster(hosts=2, framework="jax", sync=sync) as cluster:
        for cell, _ in OF_PACKAGE.cells:
            cluster.run(cell)
        expected = cluster.pull(["losses"], ranks="0")[0]["losses"]
        assert cluster.export(str(tmp_path / "train")).remarks == ()
        with (tmp_path / "own_words" / "large.npy").open("wb") as file:
            file.truncate(65 << 20)
        with pytest.raises(UsageError, match=r"copies at most 64 MiB: move the largest, .*large"):
            cluster.export(str(tmp_path / "large"))
    assert {
        str(path.relative_to(tmp_path / "train")) for path in tmp_path.glob("train/**/own*")
    } == {*("own_words", "own_plug.py", "own_hidden.py")}
    files = {path.name for path in (tmp_path / "train" / "own_words").iterdir()}
    assert files == {"__init__.py", "vocab.txt"}
    for path in (tmp_path / "own_words", library):
        path.rename(path.with_name(f"{path.name}-moved"))
    with_results(tmp_path / "train", OF_PACKAGE)
    ended = launch(tmp_path / "train")
    assert ended.returncode == 0, ended.stderr
    assert np.load(tmp_path / "train" / "result0.npz")["loss"].tolist() == expected


OF_NOTEBOOK = Training(
    "pjrt",
    [
        (
            """
import jax, jax.numpy as jnp, numpy as np
columns = sorted(vocabulary, key=vocabulary.get)[:4]
train = (frame[columns].to_numpy(), frame["y"].to_numpy()[:, None] * scale)
w = jnp.zeros((4, 1))
""",
            {},
        ),
        (
            """
x, y = batch
loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
w = w - 0.1 * grad
""",
            {"data": "train", "batch": 20, "epochs": 2, "shuffle": 1},
        ),
    ],
    'job_history["loss"]',
    "[w]",
)


@pytest.mark.parametrize("cluster", ["jax"], indirect=True)
def test_program_has_the_tables_and_vocabularies_of_the_notebook(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    vocabulary = {f"word{i}": i for i in range(500)}
    values = np.random.default_rng(0).normal(size=(100, 5)).astype("float32")
    frame = pd.DataFrame(values, columns=[*list(vocabulary)[:4], "y"], index=range(5, 105))
    cluster.restart()
    cluster.push({"frame": frame, "vocabulary": vocabulary, "scale": np.float32(2)})
    for number, (source, options) in enumerate(OF_NOTEBOOK.cells, 1):
        run = cluster.run(source, label=number, strategy="pjrt", **options)
    text = export(cluster, tmp_path / "train")
    assert "frame = pandas.read_feather(args.data /" in text
    named = {path.name for path in (tmp_path / "train").glob("data*")}
    assert named == {"data.npz", "data_frame.arrow", "data_vocabulary.json"}
    required = (tmp_path / "train" / "requirements.txt").read_text()
    assert {"pandas", "pyarrow"} <= {line.split("==")[0] for line in required.splitlines()}
    with_results(tmp_path / "train", OF_NOTEBOOK)
    ended = alone(tmp_path / "train")
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "elsewhere").mkdir()
    for name in named:
        (tmp_path / "train" / name).rename(tmp_path / "elsewhere" / name)
    ended = launch(tmp_path / "train", "--data", str(tmp_path / "elsewhere"))
    assert ended.returncode == 0, ended.stderr
    found = np.load(tmp_path / "train" / "result1.npz")["loss"]
    np.testing.assert_array_equal(found, run.history["loss"][1])


CHANGES = {
    "1e-2": "3e-3",
    "learning_rate=0.01": "learning_rate=0.003",
    "epochs=2": "epochs=3",
    "batch_size=16": "batch_size=20",
}
ARGUMENTS = ("--epochs", "3", "--batch", "20", "--learning-rate", "0.003")


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("jax", "pjrt step"),
        pytest.param("tensorflow", "mirrored fit", marks=pytest.mark.full),
        pytest.param("tensorflow", "mirrored step", marks=pytest.mark.full),
        pytest.param("jax", "pjrt fit", marks=pytest.mark.full),
    ],
    indirect=["cluster"],
)
def test_arguments_give_the_weights_of_cells_with_these_values(
    cluster: nbdist.Cluster, tmp_path: Path, name: str
) -> None:
    training = {**TRAININGS, **SINGLE_TRAININGS}[name]
    if "fit" in name:  # without a seed, the order of the samples follows from the cell's text
        *before, (fit, _) = training.cells
        seeded = f"keras.utils.set_random_seed(7)\n{fit}"
        training = replace(training, cells=[*before, (seeded, {})])
    cells = []
    for source, options in training.cells:
        changed = source
        for old, new in CHANGES.items():
            changed = changed.replace(old, new)
        cells.append((changed, {**options, "epochs": 3, "batch": 20} if options else {}))
    run_cells(cluster, replace(training, cells=cells))
    expected = weights(cluster, training)
    run_cells(cluster, training)
    export(cluster, tmp_path / "train")
    with_results(tmp_path / "train", training)
    ended = launch(tmp_path / "train", *ARGUMENTS)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        found = np.load(tmp_path / "train" / f"result{rank}.npz")
        np.testing.assert_array_equal(found["weights"], expected[rank])
