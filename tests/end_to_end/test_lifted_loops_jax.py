"""Training loops of JAX in plain cells run on batches that are split over the mesh."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import CellError
from tests import clusters, references
from tests.end_to_end.test_lifted_loops import chosen

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

SETUP = """
import jax, jax.numpy as jnp, numpy as np, optax
from functools import partial
from jax import grad, jit, value_and_grad
rng = np.random.default_rng(0)
X = rng.normal(size=(44, 4)).astype("float32")
Y = (X @ np.arange(4.0)[:, None]).astype("float32")
batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 44, 8)]  # the last one has 4 rows

def init():
    k1, k2 = jax.random.split(jax.random.key(0))
    return {
        "a": jax.random.normal(k1, (4, 16)) * 0.3,
        "b": jnp.zeros(16),
        "c": jax.random.normal(k2, (16, 1)) * 0.3,
    }

def predict(p, x):
    return jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]

def loss_fn(p, x, y):
    return ((predict(p, x) - y) ** 2).mean()

@jit
def update(p, x, y):
    loss, g = value_and_grad(loss_fn)(p, x, y)
    return jax.tree.map(lambda a, b: a - 0.05 * b, p, g), loss

def plain(tree):
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]

tx = optax.adam(0.01)
params = init()
opt_state = tx.init(params)
losses = []
"""

CELLS = {
    "steps without jit, and predictions of all rows": """
for epoch in range(2):
    for i, batch in enumerate(batches):
        x, y = batch
        (loss, seen), grads = value_and_grad(
            lambda p: (loss_fn(p, x, y), predict(p, x)), has_aux=True
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss.item())
        if i == 3:
            rows = np.asarray(seen).tolist()
outcome = [plain(params), losses, rows, plain(loss_fn(params, X, Y))]
""",
    "function with a donated state and a nested function": """
@partial(jax.jit, donate_argnums=(0, 1))
def step(p, s, key, x, y):
    def noisy(p):
        hidden = jnp.tanh(x @ p["a"] + p["b"])
        keep = jax.random.bernoulli(key, 0.8, hidden.shape)
        return ((jnp.where(keep, hidden / 0.8, 0) @ p["c"] - y) ** 2).mean()
    loss, g = value_and_grad(noisy)(p)
    updates, s = tx.update(g, s, p)
    return optax.apply_updates(p, updates), s, {"loss": loss, "norm": optax.global_norm(g)}

def fit(params, data, epochs):
    s, best, key = tx.init(params), 1e9, jax.random.PRNGKey(1)
    def note(value):
        nonlocal best
        best = min(best, value)
    for epoch in range(epochs):
        for x, y in data:
            key, sub = jax.random.split(key)
            params, s, m = step(params, s, sub, jnp.asarray(x), jnp.asarray(y)); losses.append(m)
            note(float(m["norm"]))
    return params, best

params, best = fit(params, batches, 2)
outcome = [plain(params), plain(losses), best]
""",
    "one of two steps, with other results": """
@jit
def careful(p, x, y):
    loss, g = value_and_grad(loss_fn)(p, x, y)
    norm = optax.global_norm(g)
    return jax.tree.map(lambda a, b: a - 0.01 * b / norm, p, g), loss, norm

norms = []
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        if i % 3 == 1:
            params, loss, norm = careful(params, x, y)
            norms.append(float(norm))
        else:
            params, loss = update(params, x, y)
        losses.append(float(loss))
    norms.append(float(norm))
outcome = [plain(params), losses, norms]
""",
    "one pass as a function, called for each epoch": """
def train_one_epoch(p, data):
    total, it = 0.0, iter(data)
    for _ in range(len(data)):
        p, loss = update(p, *next(it))
        total += loss
    return p, total / len(data)

for epoch in range(3):
    params, average = train_one_epoch(params, batches)
    losses.append(float(average))
outcome = [plain(params), losses]
""",
    "whole data in each step, read by name": """
data, targets, i = jnp.asarray(X), Y.copy(), 0
while i < 20:
    params, loss = update(params, data, targets)
    i += 1
    loss.block_until_ready()  # JAX may still read the array
    targets[i] = i
outcome = [plain(params), float(loss)]
""",
    "trainer with a compiled method, and Flax objects": """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.two = nnx.Linear(16, 1, rngs=rngs)
    def __call__(self, x):
        return self.two(self.norm(nnx.tanh(self.one(x))))

class Trainer:
    def __init__(self):
        self.model = Net(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.01), wrt=nnx.Param)
        self.history = []
        def train_step(model, optimizer, x, y):
            loss, g = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
            optimizer.update(model, g)
            return loss
        self.train_step = nnx.jit(train_step)
    def fit(self, data, epochs):
        for epoch in range(epochs):
            for x, y in data:
                self.history.append(self.train_step(self.model, self.optimizer, x, y))

trainer = Trainer()
trainer.fit(batches, 2)
outcome = [plain(nnx.state(trainer.model)), plain(trainer.history)]
""",
    "Flax objects whose arrays have one row for each sample": """
from flax import nnx

class Table(nnx.Module):
    def __init__(self):
        self.rows = nnx.Param(jnp.ones((44, 1)))
    def __call__(self, i):
        return self.rows[i]

@nnx.jit
def train_step(model, optimizer, i, y):
    loss, g = nnx.value_and_grad(lambda m: ((m(i) - y) ** 2).mean())(model)
    optimizer.update(model, g)
    return loss

table, index = Table(), np.arange(44)
optimizer = nnx.Optimizer(table, optax.adam(0.1), wrt=nnx.Param)
for step in range(5):
    losses.append(train_step(table, optimizer, index, Y))
outcome = [plain(losses), plain(table.rows[...])]
""",
    "dicts, lists and objects that a step changes, with as many rows as the data": """
@jax.tree_util.register_pytree_node_class
class Line:
    def __init__(self, w):
        self.w = w
    def tree_flatten(self):
        return (self.w,), None
    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)
    def fit_step(self, x, y):
        loss, g = value_and_grad(lambda line: ((x @ line.w - y) ** 2).mean())(self)
        self.w = self.w - 0.05 * g.w
        return loss

def fit_step(p, x, y):
    loss, g = value_and_grad(lambda p: ((x @ p["w"][0] + p["b"] - y) ** 2).mean())(p)
    p["w"][0] -= 0.05 * g["w"][0]
    p["b"] = p["b"] - 0.05 * g["b"]
    return loss

def descend(w, x, y):
    loss, g = value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
    w -= 0.05 * np.asarray(g)
    return loss

data, targets, w = X[:4], Y[:4], np.zeros((4, 1), "float32")
parts, line = {"w": [jnp.zeros((4, 1))], "b": jnp.zeros((4, 1))}, Line(jnp.zeros((4, 1)))
for i in range(4):
    losses.append(fit_step(parts, data, targets))
for i in range(4):
    losses.append(line.fit_step(data, targets))
for i in range(4):
    losses.append(descend(w, data, targets))
outcome = [plain(parts), plain(line), plain(w), plain(losses)]
""",
    "accumulation by hand, averaged weights, a seeded shuffle of tf.data": """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).shuffle(44, seed=1).batch(4)
gradients = jax.jit(value_and_grad(loss_fn))
total = jax.tree.map(jnp.zeros_like, params)
averaged = params
for i, batch in enumerate(data.as_numpy_iterator()):
    loss, g = gradients(params, batch["x"], batch["y"])
    total = jax.tree.map(jnp.add, total, g)
    if (i + 1) % 3 == 0:
        updates, opt_state = tx.update(jax.tree.map(lambda t: t / 3, total), opt_state, params)
        params = optax.apply_updates(params, updates)
        total = jax.tree.map(jnp.zeros_like, params)
        averaged = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, averaged, params)
    losses.append(loss)
outcome = [plain(params), plain(averaged), plain(losses)]
""",
    "convolution with clipped gradients of each sample": """
kernel = jax.random.normal(jax.random.key(2), (3, 1, 2))
def filtered(w, x, y):
    layout = ("NWC", "WIO", "NWC")
    z = jax.lax.conv_general_dilated(x[None, :, None], w, (1,), "SAME", dimension_numbers=layout)
    return (jnp.tanh(z).sum() - y[0]) ** 2
each = jit(jax.vmap(grad(filtered), in_axes=(None, 0, 0)))
for x, y in batches:
    g = each(kernel, x, y)
    norms = jnp.sqrt((g ** 2).sum((1, 2, 3)))
    kernel = kernel - 0.1 * (g / jnp.maximum(1, norms)[:, None, None, None]).mean(0)
    losses.append(norms)
outcome = [plain(kernel), plain(losses)]
""",
    "one compiled function for each epoch, which scans over batches": """
@jit
def epoch(p, s, data):
    def body(carry, batch):
        p, s = carry
        loss, g = value_and_grad(loss_fn)(p, *batch)
        updates, s = tx.update(g, s)
        return (optax.apply_updates(p, updates), s), loss
    (p, s), found = jax.lax.scan(body, (p, s), data)
    return p, s, found
key = jax.random.key(3)
for i in range(2):
    key, sub = jax.random.split(key)
    order = jax.random.permutation(sub, 44)[:40].reshape(5, 8)
    params, opt_state, found = epoch(params, opt_state, (X[order], Y[order]))
    losses.append(found)
outcome = [plain(params), plain(losses)]
""",
    "values of a step that functions read, in the step and after it": """
baseline = jnp.zeros(())
def centered(p, x, y):
    return ((predict(p, x) - y - baseline) ** 2).mean()
def train(x, y):
    loss, g = value_and_grad(centered)(params, x, y)
    moved = jax.tree.map(lambda a, b: a - 0.05 * b, params, g)
    return moved, loss, 0.9 * baseline + 0.1 * y.mean()
def report():
    losses.append(float(loss))
def should_stop():
    return len(losses) > 3 and float(loss) > losses[0]
for epoch in range(2):
    for x, y in batches:
        params, loss, baseline = train(x, y)
        report()
        if should_stop():
            break
outcome = [plain(params), plain(baseline), losses]
""",
    "state in global names, and losses noted by the step itself": """
def train_step(x, y):
    global params, opt_state
    loss, g = value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(g, opt_state)
    params = optax.apply_updates(params, updates)
    losses.append(loss)

for x, y in batches:
    train_step(x, y)
outcome = [plain(params), plain(losses)]
""",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        yield running


def expected(name: str) -> Any:
    """Return the outcome of a loop in one process."""
    return references.plainly({name: SETUP + CELLS[name]}, "jax", "optax")[name]


def outcome(cluster: nbdist.Cluster) -> Any:
    """Return the value of `outcome`, which must be equal on all ranks."""
    own, *others = (values["outcome"] for values in cluster.pull(["outcome"]).values())
    assert all(other == own for other in others)
    return own


def assert_near(actual: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_near(a, b)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    chosen(
        CELLS,
        "function with a donated state and a nested function",
        "one of two steps, with other results",
        "whole data in each step, read by name",
        "trainer with a compiled method, and Flax objects",
        "Flax objects whose arrays have one row for each sample",
        "dicts, lists and objects that a step changes, with as many rows as the data",
        "one compiled function for each epoch, which scans over batches",
        "values of a step that functions read, in the step and after it",
        "state in global names, and losses noted by the step itself",
    ),
)
def test_loop_has_the_numbers_of_one_device(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    cluster.run(SETUP)
    cluster.run(CELLS[name])
    printed = capsys.readouterr().out
    assert re.search(r"line \d+: steps over `.*` on 2 replicas", printed)
    for actual, one in zip(outcome(cluster), expected(name), strict=True):
        assert_near(actual, one)


def test_work_of_a_step_is_divided(cluster: nbdist.Cluster) -> None:
    """Each device computes with its rows of the batch; the loop keeps its own arrays."""
    cluster.run(SETUP)
    run = cluster.run("""
spread = []
def recorded(p, x, y):
    spread.append([x.shape, x.addressable_data(0).shape, type(x).__name__])
    return update(p, x, y)
for x, y in batches:
    params, loss = recorded(params, x, y)
    spread.append(type(x).__name__)
outcome = [spread[0], spread[1], spread[-2]]
""")
    assert outcome(cluster) == [
        [(8, 4), (4, 4), "ArrayImpl"],
        "ndarray",
        [(4, 4), (2, 4), "ArrayImpl"],
    ]
    assert len(run.loss) == 6, "one value for each step"


def test_scan_divides_each_of_its_batches(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cluster.run("""
parts = []
def epoch(p, xs, ys):
    parts.append(xs.addressable_data(0).shape)
    return jax.lax.scan(lambda p, batch: update(p, *batch), p, (xs, ys))
some, targets = X[:40].reshape(5, 8, 4), Y[:40].reshape(5, 8, 1)
for i in range(2):
    params, found = epoch(params, some, targets)
outcome = parts[0]
""")
    assert list(outcome(cluster)) == [5, 4, 4]
    assert "on 2 replicas, 8 samples a batch, 4 on each" in capsys.readouterr().out


DEVICES = """
for x, y in batches:
    params, loss = update(params, x, y)
moved = jax.device_put(params, jax.local_devices()[0])
kinds = [leaf.is_fully_addressable for leaf in jax.tree.leaves(moved)]
outcome = [kinds, plain(moved) == plain(params), plain(jax.device_put(X, jax.local_devices()[0]))]
first = jax.device_put(params, jax.devices()[0])
outcome.append(plain(first) == plain(params))
try:
    jax.device_put.__wrapped__(params, jax.local_devices()[0])
except ValueError:
    outcome.append("the patch is needed")
"""


def test_results_of_a_loop_can_be_put_on_the_device_of_a_rank(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cluster.run(DEVICES)
    own, *others = (values["outcome"] for values in cluster.pull(["outcome"]).values())
    assert own[:2] == [[True] * 3, True]
    assert own[3:] == [True, "the patch is needed"]
    assert others == [own]
    assert "jax.device_put: each rank uses its own device" in capsys.readouterr().out


def test_check_compares_the_first_step_and_changes_nothing(cluster: nbdist.Cluster) -> None:
    name = "steps without jit, and predictions of all rows"
    cluster.run(SETUP)
    run = cluster.run(CELLS[name], check=True)
    assert run.checked is not None
    assert all(difference.passes for difference in run.checked.differences)
    assert {"loss", "params['a']"} <= {d.name for d in run.checked.differences}
    for actual, one in zip(outcome(cluster), expected(name), strict=True):
        assert_near(actual, one)


def test_check_refuses_a_step_with_effects(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP)
    with pytest.raises(CellError, match=r"--check runs the step of line 10 on trial, but `global"):
        cluster.run(CELLS["state in global names, and losses noted by the step itself"], check=True)


def test_check_without_a_loop_has_a_warning(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("x = 1", check=True)
    assert "--check: the cell has no training loop" in capsys.readouterr().err


def test_steps_of_two_loops_have_different_numbers(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP)
    run = cluster.run("""
for epoch in range(2):
    for x, y in batches[:3]:
        params, loss = update(params, x, y)
    for x, y in batches[3:5]:
        params, loss = update(params, x, y)
        losses.append(float(loss))
""")
    steps = [m.step for m in run.metrics if m.rank == 0 and m.step > 0]
    assert steps == list(range(1, 11))
    cluster.run("outcome = losses")
    np.testing.assert_allclose(outcome(cluster), run.loss[[3, 4, 8, 9]], rtol=1e-6)


UNDIVIDED = {
    "its step receives no batch from the loop: pass the data to it as arguments": """
def closed(p):
    return update(p, X, Y)
for i in range(3):
    params, loss = closed(params)
""",
    "the arrays of its batch have different numbers of rows": """
def joined(p, batch):
    return update(p, jnp.concatenate(batch["x"]), jnp.concatenate(batch["y"]))
for x, y in batches:
    batch = {"x": (x[:5], x[5:]), "y": (y[:5], y[5:])}
    params, loss = joined(params, batch)
""",
    "its step reads `data.train.x`: assign this array to a name before the loop": """
from collections import namedtuple
class Rows:
    pass
data = namedtuple("Data", ["train"])(Rows())
data.train.x, data.train.y = X, Y
for i in range(3):
    params, loss = update(params, data.train.x, data.train.y)
""",
    "its step needs all rows of a batch on one device": """
for x, y in batches:
    params, loss = jit(lambda p: update(p, x, y))(params)
""",
    "its step uses `rank`": """
for x, y in batches:
    params, loss = update(params, x + rank, y)
""",
    "its step needs all rows": """
draw = np.random.default_rng(3)
def step(p, x, y):
    noise = draw.normal() + np.random.normal()
    p, loss = update(p, x, y)
    return p, loss * np.asarray(x).mean() * noise
for x, y in batches:
    params, loss = step(params, x, y)
drawn = [draw.normal(), np.random.normal()]
""",
    "a batch of 7 rows does not divide over 2 replicas": """
for i in range(0, 42, 7):
    params, loss = update(params, X[i : i + 7], Y[i : i + 7])
""",
    "its step takes batches from the data in a compiled loop": """
@jit
def epoch(p, x, y):
    take = lambda data, i: jax.lax.dynamic_slice_in_dim(data, i * 8, 8)
    body = lambda i, p: update(p, take(x, i), take(y, i))[0]
    return jax.lax.fori_loop(0, 5, body, p)
for i in range(2):
    params = epoch(params, X, Y)
""",
    "its step uses jax.pmap, whose collectives also add over the 2 workers": """
mapped = jax.pmap(lambda p, x: jax.lax.pmean(grad(loss_fn)(p, x, Y[:8]), "i"), axis_name="i")
for x, y in batches[:5]:
    gradients = mapped(jax.tree.map(lambda leaf: leaf[None], params), x[None])
""",
    "the first batch or the state differs between the workers": """
for x, y in batches:
    x = x + rank
    params, loss = update(params, x, y)
""",
    "`break` is inside the statement that takes the gradient": """
for x, y in batches:
    with jax.default_matmul_precision("float32"):
        params, loss = update(params, x, y)
        break
""",
}


@pytest.mark.parametrize("reason", list(UNDIVIDED))
def test_reason_is_printed_when_every_worker_computes_the_loop(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    cluster.run(SETUP)
    cluster.run(UNDIVIDED[reason], guard=0)  # workers may end with different values
    printed = capsys.readouterr()
    lines = [text for text in (printed.out + printed.err).splitlines() if reason in text]
    assert lines, "each rank may print a line of its own"
    assert all("very worker computes the whole loop" in line for line in lines)


def test_error_in_the_first_step_is_the_only_message(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    with pytest.raises(CellError, match="name 'not_there' is not defined"):
        cluster.run("for x, y in batches:\n    params, loss = update(params, not_there, y)\n")
    printed = capsys.readouterr()
    assert "the whole loop" not in printed.out + printed.err


def test_loop_of_an_earlier_cell_is_named_with_its_cell(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cluster.run(
        """def fit(params):
    for x, y in batches:
        params, loss = update(params, x, y)
def refused(params):
    for x, y in batches:
        with jax.default_matmul_precision("float32"):
            params, loss = update(params, x, y)
            break
""",
        label=3,
    )
    cluster.run("fit(params)\nrefused(params)", label=7)
    output = capsys.readouterr()
    assert "Cell In[3], line 2: steps over `batches` on 2 replicas" in output.out
    assert "Cell In[3], line 8: `break` is inside" in output.err


def test_loop_in_a_compiled_function_is_named(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cluster.run("""
@partial(jit, static_argnums=3)
def epoch(p, x, y, rows):
    for xb, yb in zip(x.reshape(-1, rows, 4), y.reshape(-1, rows, 1)):
        p, loss = update(p, xb, yb)
    return p, loss
for i in range(2):
    params, loss = epoch(params, X[:40], Y[:40], 8)
""")
    assert "trains in a loop inside of `@jax.jit`" in capsys.readouterr().err


def test_step_with_effects_that_needs_all_rows_is_refused_with_its_line(
    cluster: nbdist.Cluster,
) -> None:
    """The step may have run in part, so it cannot run again on whole batches."""
    cluster.run(SETUP)
    cell = """
def step(p, x, y):
    losses.append(1)
    p, loss = update(p, x, y)
    return p, loss * np.asarray(x).mean()
for x, y in batches:
    params, loss = step(params, x, y)
"""
    with pytest.raises(CellError, match=r"line 5: .* run the cell with --no-lift"):
        cluster.run(cell)
    cluster.run(SETUP)
    cluster.run(cell, no_lift=True)


def test_pmap_over_the_devices_of_all_workers_is_refused_with_the_remedy(
    cluster: nbdist.Cluster,
) -> None:
    cluster.run(SETUP)
    cell = """
n = jax.device_count()
mapped = jax.pmap(lambda p, x, y: jax.lax.pmean(grad(loss_fn)(p, x, y), "i"), axis_name="i")
many = jax.tree.map(lambda leaf: jnp.stack([leaf] * n), params)
for x, y in batches[:5]:
    gradients = mapped(many, x.reshape(n, -1, *x.shape[1:]), y.reshape(n, -1))
"""
    with pytest.raises(CellError, match=r"line 4: jax.pmap maps .* jax.local_device_count\(\), or"):
        cluster.run(cell)


def test_loop_without_batches_reports_no_size_of_one(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP)
    run = cluster.run(
        UNDIVIDED["its step receives no batch from the loop: pass the data to it as arguments"]
    )
    assert run.begun is not None
    assert run.begun.batch == 0


def test_loop_runs_after_an_error_on_one_rank(cluster: nbdist.Cluster) -> None:
    """The other rank is interrupted in the collective that compares the first batches."""
    cluster.run(SETUP)
    cell = "for x, y in batches:\n    ERROR\n    params, loss = update(params, x, y)\nfloat(loss)"
    with pytest.raises(CellError, match="KeyError"):
        cluster.run(cell.replace("ERROR", "if rank: raise KeyError"))
    context_mesh = cluster.run("getattr(jax.sharding, 'get_' + 'mesh')().empty")
    assert set(context_mesh.results.values()) == {"True"}
    run = cluster.run(cell.replace("ERROR", "pass"))
    assert run.begun is not None
    assert run.begun.replicas == 2


def test_step_that_runs_again_draws_the_numbers_of_one_device(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + "np.random.seed(1)" + UNDIVIDED["its step needs all rows"])
    drawn = cluster.pull(["drawn"], ranks="0")[0]["drawn"]
    own, shared = np.random.default_rng(3), np.random.RandomState(1)
    for _ in range(6):
        own.normal(), shared.normal()
    assert drawn == [own.normal(), shared.normal()]


STOPPED_AFTER = 60
"""Step of the interrupt. By then, the notebook knows that the cell has steps."""

ENDLESS = """
count = 0
while True:
    for x, y in batches:
        params, loss = update(params, x, y)
        count += 1
"""


def test_interrupt_ends_the_loop_after_the_same_step(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(SETUP)
    clusters.interrupt_after(cluster, monkeypatch, STOPPED_AFTER)
    with clusters.bounded(60), pytest.raises(KeyboardInterrupt):
        cluster.run(ENDLESS)
    cluster.run("outcome = [count, plain(params)]")
    assert outcome(cluster)[0] >= STOPPED_AFTER, "all ranks made the same steps"
    run = cluster.run("for x, y in batches:\n    params, loss = update(params, x, y)")
    assert len(run.loss) == 6, "the next cell trains"


@pytest.mark.full  # rare
def test_interrupt_stops_the_code_after_a_loop(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(SETUP)
    clusters.interrupt_after(cluster, monkeypatch, 6)
    with clusters.bounded(30), pytest.raises(KeyboardInterrupt):
        cluster.run("""
import time
for x, y in batches:
    params, loss = update(params, x, y)
while True:
    time.sleep(0.01)
""")
    run = cluster.run("for x, y in batches:\n    params, loss = update(params, x, y)")
    assert len(run.loss) == 6, "the next cell trains"
