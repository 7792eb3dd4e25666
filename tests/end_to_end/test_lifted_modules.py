"""Training functions and loops in the user's own modules run on all replicas."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import clusters, references
from tests.end_to_end.test_lifted_loops import SETUP, chosen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

TENSORFLOW = '''
"""Training as a module of the user."""
import tensorflow as tf

weights = {"penalty": 0.0}
lengths = []

def squared(model, x, y):
    return tf.reduce_mean((model(x, training=True) - y) ** 2) + weights["penalty"]

def train_step(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        loss = squared(model, x, y)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.losses = model, optimizer, []

    @tf.function
    def train_step(self, x, y):
        return train_step(self.model, self.optimizer, x, y)

    def fit(self, data, epochs=1):
        for _ in range(epochs):
            for x, y in data:
                self.losses.append(float(self.train_step(x, y)))
        return self

def train(model, optimizer, data, epochs):
    losses = []
    for epoch in range(epochs):
        for x, y in data:
            with tf.GradientTape() as tape:
                loss = squared(model, x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            losses.append(float(loss))
    return losses

def counted_step(model, optimizer, x, y):
    lengths.append(len(x))
    return train_step(model, optimizer, x, y)
'''
TENSORFLOW_SETUP = "import sys\nsys.path.insert(0, {folder!r})\n" + SETUP
TENSORFLOW_OUTCOME = "outcome = [losses, [w.ravel().tolist() for w in model.get_weights()]]\n"

JAX = '''
"""Training as a module of the user."""
import jax
import jax.numpy as jnp
import optax

tx = optax.adam(0.01)
weights = {"penalty": 0.0}
lengths = []

def loss_fn(params, x, y):
    error = jnp.tanh(x @ params["a"]) @ params["b"] - y
    return jnp.mean(error**2) + weights["penalty"]

@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss

class Trainer:
    def __init__(self, params):
        self.params, self.opt_state, self.losses = params, tx.init(params), []

    def step(self, x, y):
        self.params, self.opt_state, loss = train_step(self.params, self.opt_state, x, y)
        return loss

    def fit(self, data, epochs=1):
        for _ in range(epochs):
            for x, y in data:
                self.losses.append(float(self.step(x, y)))
        return self

def train(params, data, epochs):
    opt_state, losses = tx.init(params), []
    for epoch in range(epochs):
        for x, y in data:
            params, opt_state, loss = train_step(params, opt_state, x, y)
            losses.append(float(loss))
    return params, losses

def counted_step(params, opt_state, x, y):
    lengths.append(len(x))
    return train_step(params, opt_state, x, y)
'''
JAX_SETUP = """
import jax, numpy as np, sys
sys.path.insert(0, {folder!r})
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x @ np.arange(4.0)[:, None]).astype("float32")
data = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
params = {{"a": rng.normal(size=(4, 8)).astype("float32"), "b": np.ones((8, 1), "float32")}}
losses = []
"""
JAX_OUTCOME = "outcome = [losses, [np.ravel(w).tolist() for w in jax.tree.leaves(params)]]\n"

CELLS = {
    "tensorflow": {
        "function": (
            "from {module} import train_step",
            "for xb, yb in data:\n    losses.append(float(train_step(model, optimizer, xb, yb)))\n",
        ),
        "function of a module": (
            "import {module} as tools",
            """\
for xb, yb in data:
    losses.append(float(tools.train_step(model, optimizer, xb, yb)))
""",
        ),
        "import in the cell": (
            "",
            """\
from {module} import train_step as step
for xb, yb in data:
    losses.append(float(step(model, optimizer, xb, yb)))
""",
        ),
        "method": (
            "import {module}\ntrainer = {module}.Trainer(model, optimizer)",
            "for xb, yb in data:\n    losses.append(float(trainer.train_step(xb, yb)))\n",
        ),
        "changed attribute": (
            "import {module} as tools",
            """\
for number, (xb, yb) in enumerate(data):
    tools.weights['penalty'] = number % 2 * 0.5
    losses.append(float(tools.train_step(model, optimizer, xb, yb)))
""",
        ),
    },
    "jax": {
        "function": (
            "from {module} import train_step, tx\nopt_state = tx.init(params)",
            """\
for xb, yb in data:
    params, opt_state, loss = train_step(params, opt_state, xb, yb)
    losses.append(float(loss))
""",
        ),
        "function of a module": (
            "import {module} as tools\nopt_state = tools.tx.init(params)",
            """\
for xb, yb in data:
    params, opt_state, loss = tools.train_step(params, opt_state, xb, yb)
    losses.append(float(loss))
""",
        ),
        "import in the cell": (
            "import {module}\nopt_state = {module}.tx.init(params)",
            """\
from {module} import train_step as step
for xb, yb in data:
    params, opt_state, loss = step(params, opt_state, xb, yb)
    losses.append(float(loss))
""",
        ),
        "method": (
            "from {module} import Trainer\ntrainer = Trainer(params)",
            """\
for xb, yb in data:
    losses.append(float(trainer.step(xb, yb)))
params = trainer.params
""",
        ),
        "changed attribute": (
            "import {module} as tools",
            """\
for number, (xb, yb) in enumerate(data):
    tools.weights['penalty'] = number * 0.5
    loss, grads = jax.value_and_grad(tools.loss_fn)(params, xb, yb)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    losses.append(float(loss))
""",
        ),
    },
}
"""An earlier cell, and the cell with the loop."""

LOOPS = {
    "tensorflow": {
        "function": (
            "import {module} as tools",
            "losses = tools.train(model, optimizer, data, epochs=2)\n",
        ),
        "method": (
            "",
            """\
from {module} import Trainer
losses = Trainer(model, optimizer).fit(data, epochs=2).losses
""",
        ),
    },
    "jax": {
        "function": ("", "import {module}\nparams, losses = {module}.train(params, data, 2)\n"),
        "method": (
            "from {module} import Trainer",
            """\
trainer = Trainer(params).fit(data, epochs=2)
params, losses = trainer.params, trainer.losses
""",
        ),
    },
}
"""Cells that call a loop of a module."""

CODE = {
    "tensorflow": (TENSORFLOW, TENSORFLOW_SETUP, TENSORFLOW_OUTCOME),
    "jax": (JAX, JAX_SETUP, JAX_OUTCOME),
}
MODULE = {name: f"own_{name}_training" for name in CODE}


@pytest.fixture(scope="module", params=CODE)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(framework)
    (path / f"{MODULE[framework]}.py").write_text(CODE[framework][0])
    return path


@pytest.fixture(scope="module")
def cluster(framework: str) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=framework) as running:
        yield running


def expected(framework: str, folder: Path, *cells: str) -> Any:
    """Return the outcome of cells in one process."""
    _, setup, end = CODE[framework]
    text = "\n".join(cells).replace("{module}", MODULE[framework])
    program = setup.format(folder=str(folder)) + text + end
    modules = ("tensorflow", "keras") if framework == "tensorflow" else ("jax", "optax")
    return references.plainly({"own": program}, *modules)["own"]


def run(cluster: nbdist.Cluster, framework: str, folder: Path, *cells: str) -> Any:
    """Run cells on workers without the module, and return `outcome`, equal on all ranks."""
    _, setup, end = CODE[framework]
    module = MODULE[framework]
    cluster.run(setup.format(folder=str(folder)) + f"sys.modules.pop({module!r}, None)\n")
    for cell in filter(None, cells):
        cluster.run(cell.replace("{module}", module))
    cluster.run(end)
    own, *others = (values["outcome"] for values in cluster.pull(["outcome"]).values())
    assert all(other == own for other in others)
    return own


def assert_equal(actual: Any, expected: Any) -> None:
    for own, one in zip(actual, expected, strict=True):
        for a, b in zip(own, one, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", chosen(CELLS["jax"], "changed attribute"))
def test_loop_calls_a_function_of_a_module(
    cluster: nbdist.Cluster,
    framework: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    cells = CELLS[framework][name]
    outcome = run(cluster, framework, folder, *cells)
    assert "on 2 replicas" in capsys.readouterr().out
    assert_equal(outcome, expected(framework, folder, *cells))


ONE = pytest.mark.parametrize(
    "framework", [pytest.param("tensorflow", marks=pytest.mark.full), "jax"], indirect=True
)
"""Mark of tests that `make test` runs with JAX only."""


@ONE
@pytest.mark.parametrize("name", chosen(LOOPS["jax"], "method"))
def test_loop_in_a_module(
    cluster: nbdist.Cluster,
    framework: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    cells = LOOPS[framework][name]
    outcome = run(cluster, framework, folder, *cells)
    lines = CODE[framework][0].splitlines()
    start = "def train(" if name == "function" else "    def fit("
    loops = [i for i, line in enumerate(lines, 1) if line.strip().startswith("for x, y")]
    first = min(i for i in loops if i > lines.index(next(f for f in lines if f.startswith(start))))
    place = f"{MODULE[framework]}.py, line {first}: steps over `data` on 2 replicas"
    assert place in capsys.readouterr().out
    assert_equal(outcome, expected(framework, folder, *cells))


@ONE
def test_reloaded_module_runs_on_all_replicas(
    cluster: nbdist.Cluster, framework: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, cell = LOOPS[framework]["function"]
    reloaded = "import {module}, importlib\n{module} = importlib.reload({module})\n"
    outcome = run(cluster, framework, folder, first, reloaded, cell)
    assert "on 2 replicas" in capsys.readouterr().out
    assert_equal(outcome, expected(framework, folder, first, cell))


EFFECTS = {
    "tensorflow": (
        "from {module} import counted_step, lengths",
        "for xb, yb in data:\n    losses.append(float(counted_step(model, optimizer, xb, yb)))\n",
        "`lengths.append(len(x))` in `counted_step`",
    ),
    "jax": (
        "from {module} import counted_step, lengths, tx\nopt_state = tx.init(params)",
        """\
for xb, yb in data:
    params, opt_state, loss = counted_step(params, opt_state, xb, yb)
""",
        "on 2 replicas",
    ),
}
"""Cells whose step has an effect, and their message. JAX runs the step in Python."""


def test_effect_in_a_module_happens_in_each_step(
    cluster: nbdist.Cluster, framework: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, cell, message = EFFECTS[framework]
    run(cluster, framework, folder, first, cell)
    output = capsys.readouterr()
    assert message in output.out + output.err
    cluster.run("counted = list(lengths)")
    assert cluster.pull(["counted"])[1]["counted"] == [8] * 5


@ONE
def test_installed_packages_run_as_written(
    cluster: nbdist.Cluster, framework: str, folder: Path
) -> None:
    """nbdist changes no code of packages, its own included."""
    del folder
    cell = (
        "import inspect, nbdist.worker.runtime.user_modules as modules\n"
        f"import {'keras' if framework == 'tensorflow' else 'optax'} as package\n"
        "outcome = [modules.is_users(name) for name in "
        "('__main__', 'json', package.__name__, 'nbdist.worker')]"
    )
    cluster.run(cell)
    assert cluster.pull(["outcome"])[0]["outcome"] == [True, False, False, False]
    assert not any(name.startswith("own_") for name in sys.modules)
