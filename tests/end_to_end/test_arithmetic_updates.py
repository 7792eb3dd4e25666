"""Loops of JAX that update their state by arithmetic have the numbers of one process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import CellError
from nbdist.records import Saving
from tests import clusters, references
from tests.end_to_end.test_lifted_loops import chosen
from tests.end_to_end.test_lifted_loops_jax import assert_near

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

SETUP = """
import jax, jax.numpy as jnp, numpy as np
from jax import grad, jit, value_and_grad
rng = np.random.default_rng(0)
X = rng.normal(size=(48, 4)).astype("float32")
Y = (X @ np.arange(1.0, 5.0) + 0.5).astype("float32")
batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8)]

marks = []
def mark():
    marks.append(len(compilations))
if "compilations" not in globals():
    compilations = []
    def count(event, duration, **facts):
        if event.endswith("backend_compile_duration"):
            compilations.append(event)
    jax.monitoring.register_event_duration_secs_listener(count)

def plain(tree):
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]
"""

CELLS = {
    "linear regression by hand": """
def predict(w, b, x):
    return x @ w + b
def mse(w, b, x, y):
    return jnp.mean((predict(w, b, x) - y) ** 2)
w, b = jnp.zeros(4), 0.0
learning_rate, total, steps, losses = 0.05, 0.0, 0, []
for epoch in range(EPOCHS):
    for x, y in batches:
        loss, (dw, db) = value_and_grad(mse, argnums=(0, 1))(w, b, x, y)
        total += loss
        w, b = w - learning_rate * dw, b - learning_rate * db
        steps += 1
        losses.append(float(loss))
    FAIL
outcome = [plain([w, b]), losses, plain(total), steps]
""",
    "network as a list of tuples": """
def init_layer(m, n, key):
    return 0.3 * jax.random.normal(key, (m, n)), jnp.zeros(n)
def init_network(sizes):
    keys = jax.random.split(jax.random.PRNGKey(0), len(sizes))
    return [init_layer(m, n, k) for m, n, k in zip(sizes[:-1], sizes[1:], keys)]
def predict(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return (x @ w + b)[:, 0]
def loss_fn(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)
step_size, losses = 0.01, []
take = jit(value_and_grad(loss_fn))
params = init_network([4, 16, 8, 1])
for epoch in range(EPOCHS):
    for x, y in batches:
        loss, grads = take(params, x, y)
        params = [
            (w - step_size * dw, b - step_size * db)
            for (w, b), (dw, db) in zip(params, grads)
        ]
        losses.append(float(loss))
    FAIL
outcome = [plain(params), losses, plain(predict(params, X))]
""",
    "momentum by hand": """
take = jit(value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
def train(data, epochs):
    w, v, losses = jnp.zeros(4), 0, []
    for epoch in range(epochs):
        for i, (x, y) in enumerate(data):
            loss, g = take(w, x, y)
            v = 0.9 * v + g
            w -= 0.02 * v
            if i % 2 == 0:
                losses.append(loss)
        FAIL
    return w, v, losses
w, v, losses = train(batches, EPOCHS)
outcome = [plain(w), plain(v), plain(losses)]
""",
    "Adam by hand, with a rate that falls": """
take = jit(value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
w, m, s, t, lr, losses = jnp.zeros(4), jnp.zeros(4), jnp.zeros(4), 0, 0.2, []
for epoch in range(EPOCHS):
    for start in range(0, len(X), 8):
        loss, g = take(w, X[start : start + 8], Y[start : start + 8])
        t += 1
        m = 0.9 * m + 0.1 * g
        s = 0.99 * s + 0.01 * g**2
        w = w - lr * (m / (1 - 0.9**t)) / (jnp.sqrt(s / (1 - 0.99**t)) + 1e-8)
        lr = lr * 0.99
        losses.append(float(loss))
    FAIL
outcome = [plain([w, m, s]), [lr, float(t)], losses]
""",
    "weights in a dict": """
def loss_fn(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["hidden"]["w"] + p["hidden"]["b"]) @ p["out"] - y) ** 2)
params = {"hidden": {"w": jnp.ones((4, 8)) * 0.1, "b": np.zeros(8, "float32")}, "out": jnp.ones(8)}
params["out"] = jax.device_put(params["out"], jax.local_devices()[0])
same, inner = params, params["hidden"]
losses = []
def fit(params, rate):
    for epoch in range(EPOCHS):
        for x, y in batches:
            loss, g = value_and_grad(loss_fn)(params, x, y)
            losses.append(float(loss))
            params["hidden"]["w"] -= rate * g["hidden"]["w"]
            params["hidden"]["b"] -= rate * g["hidden"]["b"]
            params["out"] = params["out"] - rate * g["out"]
        FAIL
fit(params, 0.05)
outcome = [plain(same), plain(inner), losses]
""",
    "weights in attributes": """
class LinearRegression:
    def __init__(self, rate):
        self.w, self.b, self.rate, self.losses = jnp.zeros(4), jnp.zeros(()), rate, []
    def loss(self, w, b, x, y):
        return jnp.mean((x @ w + b - y) ** 2)
    def fit(self, data):
        for epoch in range(EPOCHS):
            for x, y in data:
                loss, (dw, db) = value_and_grad(self.loss, (0, 1))(self.w, self.b, x, y)
                self.losses.append(float(loss))
                self.w -= self.rate * dw
                self.b = self.b - self.rate * db
            FAIL
model = LinearRegression(0.05)
model.fit(batches)
outcome = [plain([model.w, model.b]), model.losses]
""",
    "arrays of NumPy that change in place": """
take = jit(value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
w, losses = np.zeros(4, "float32"), []
same = w
for epoch in range(EPOCHS):
    for x, y in batches:
        loss, g = take(w, x, y)
        w -= 0.05 * g
        losses.append(float(loss))
    FAIL
outcome = [plain(w), plain(same), losses]
""",
    "end of a pass before the update": """
take = jit(value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
w, losses = jnp.zeros(4), []
for epoch in range(EPOCHS):
    for i, (x, y) in enumerate(batches):
        loss, g = take(w, x, y)
        losses.append(float(loss))
        if i == 2:
            continue
        if loss < 0.05:
            break
        w = w - 0.1 * g
    FAIL
outcome = [plain(w), losses]
""",
    "signs of gradients of the batch": """
take = jit(value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2), argnums=(0, 1)))
w, moved = jnp.zeros(4), []
for epoch in range(EPOCHS):
    for x, y in batches:
        loss, (g, of_x) = take(w, x, y)
        w = w - 0.1 * g
        x = x + 0.1 * jnp.sign(of_x)
        moved.append(np.asarray(x).sum())
    FAIL
outcome = [plain(w), plain(moved)]
""",
}
SAVED = [name for name in CELLS if not re.search("end of a pass|signs", name)]


def program(name: str, *, epochs: int = 4, fail: str = "pass") -> str:
    return CELLS[name].replace("EPOCHS", str(epochs)).replace("FAIL", fail)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param, framework="jax") as running:
        yield running


def expected(name: str) -> Any:
    """Return the outcome of a loop in one process."""
    return references.plainly({name: SETUP + program(name)}, "jax")[name]


def outcome(cluster: nbdist.Cluster) -> Any:
    """Return the value of `outcome`, which must be equal on all ranks."""
    own, *others = (values["outcome"] for values in cluster.pull(["outcome"]).values())
    assert all(other == own for other in others)
    return own


@pytest.mark.parametrize(
    "name",  # the tests below compare the numbers of the others
    chosen(
        CELLS,
        "network as a list of tuples",
        "Adam by hand, with a rate that falls",
        "weights in attributes",
        "end of a pass before the update",
        "signs of gradients of the batch",
    ),
)
def test_loop_has_the_numbers_of_one_process(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    cluster.run(SETUP)
    cluster.run(program(name))
    assert re.search(r"steps over `.*` on \d replicas, 8 samples", capsys.readouterr().out)
    assert_near(outcome(cluster), expected(name))


@pytest.mark.parametrize(
    "name", chosen(SAVED, "linear regression by hand", "arrays of NumPy that change in place")
)
def test_check_changes_nothing(cluster: nbdist.Cluster, name: str) -> None:
    cluster.run(SETUP)
    run = cluster.run(program(name), check=True)
    assert run.checked is not None
    assert all(difference.passes for difference in run.checked.differences)
    assert_near(outcome(cluster), expected(name))


@pytest.mark.parametrize("name", chosen(CELLS, "Adam by hand, with a rate that falls"))
def test_later_passes_compile_nothing(cluster: nbdist.Cluster, name: str) -> None:
    """A learning rate that changes in each pass is a value of the compiled programs."""
    cluster.run(SETUP)
    cluster.run(program(name, fail="mark()"))
    cluster.run("jit(lambda a: a + 1)(1.0)\nmark()\noutcome = marks")
    first, *later, last = outcome(cluster)
    assert later == [first] * 3
    assert last == first + 1, "JAX reports compilations"


@pytest.mark.parametrize("name", chosen(SAVED, "momentum by hand", "weights in a dict"))
def test_loop_resumes_from_its_checkpoint(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    cluster.run(SETUP)
    cluster.run(program(name))
    whole = outcome(cluster)
    assert_near(whole, expected(name))
    saving = Saving(folder=str(tmp_path / "run"), every_steps=4)
    cluster.run(SETUP)
    with pytest.raises(CellError, match="ZeroDivisionError"):
        cluster.run(program(name, fail="1 / (2 - epoch)"), saving=saving)
    assert "checkpoint" not in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir())
    cluster.run(SETUP)
    resumed = Saving(folder=saving.folder, every_steps=4, resume=True)
    cluster.run(program(name), saving=resumed)
    if "Adam" not in name:  # counters of the loop are not restored
        assert_near(outcome(cluster)[0], whole[0])
