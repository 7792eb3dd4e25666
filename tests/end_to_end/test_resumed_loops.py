"""Training loops that resume from a checkpoint give the numbers of a run without a failure.

Each cell is written as in a tutorial. It fails once on all workers, and then runs again with
`--resume` on variables that were created again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import CellError
from nbdist.records import Saving
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

DATA = """
import numpy as np, os, signal
rng = np.random.default_rng(1)
X = rng.normal(size=(64, 4)).astype("float32")
Y = (X @ np.arange(4, dtype="float32"))[:, None]
calls = 0
def may_fail():
    global calls
    calls += 1
    if calls == fails_at and not killed:
        raise RuntimeError("planned")
    if calls == fails_at and rank == 1 and not os.path.exists(killed):
        open(killed, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""

TENSORFLOW = (
    DATA
    + """
import keras, tensorflow as tf
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
opt = keras.optimizers.SGD(0.05)
loss_fn = keras.losses.MeanSquaredError()
ds = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(64, seed=3).batch(16)
noise, seeds = tf.random.Generator.from_seed(4), keras.random.SeedGenerator(5)
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss
def weights():
    return [w.tolist() for w in model.get_weights()]
"""
)

JAX = (
    DATA
    + """
import jax, jax.numpy as jnp
from flax import nnx
rngs = nnx.Rngs(3, noise=4)
params = {"w": jnp.zeros((4, 1)), "b": jnp.zeros(())}
def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)
@jax.jit
def update(params, x, y):
    loss, g = jax.value_and_grad(loss_fn)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, g), loss
def weights():
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(params)]
"""
)

TENSORFLOW_CELLS = {
    "sums of an epoch, and the best loss": """
history, best, waited = [], None, 0
for epoch in range(6):
    total, n = 0.0, 0
    for x, y in ds:
        loss = train_step(x, y)
        total += float(loss)
        n += 1
        may_fail()
    value = float(loss_fn(Y, model(X)))
    history.append((total / n, value))
    print(f"epoch {epoch}: {total / n:.4f}")
    if best is None or value < best - 0.9:
        best, waited = value, 0
    else:
        waited += 1
        if waited == 2:
            break
outcome = [weights(), history, best, waited, epoch]
""",
    "functions for an epoch and for the training": """
def train_epoch(dataset):
    losses = []
    for step, (x, y) in enumerate(dataset):
        losses.append(train_step(x, y).numpy())
        may_fail()
    return np.mean(losses)
def fit(dataset, epochs):
    history, best = {"loss": []}, float("inf")
    rate = 0.05
    for epoch in range(epochs):
        opt.learning_rate = rate
        loss = train_epoch(dataset)
        history["loss"].append(float(loss))
        best = min(best, loss)
        rate *= 0.9
    return history, float(best), rate
outcome = [*fit(ds, 4), weights()]
""",
    "iterator and a while loop": """
it, step, seen = iter(ds.repeat()), 0, []
while step < 14:
    x, y = next(it)
    if step % 5 == 4:
        step += 1
        continue
    loss = train_step(x, y)
    step += 1
    if step % 2 == 0:
        seen.append([step, float(loss)])
    may_fail()
outcome = [weights(), seen, step]
""",
    "episodes that a condition ends, and a target model": """
target = keras.models.clone_model(model)
target.set_weights(model.get_weights())
returns, seen = [], tf.Variable(0)
for episode in range(5):
    state, done, total = 0, False, 0.0
    while not done:
        rows = slice(8 * state, 8 * state + 8)
        loss = train_step(X[rows], Y[rows] + 0.1 * target(X[rows]))
        total += float(loss)
        state += 1
        seen.assign_add(1)
        done = state == 3 + episode % 2
        may_fail()
    if episode % 2 == 1:
        target.set_weights(model.get_weights())
    returns.append(total)
outcome = [weights(), returns, [w.tolist() for w in target.get_weights()], int(seen)]
""",
    "generators of TensorFlow and Keras": """
history = []
for epoch in range(4):
    shift = keras.random.uniform((), seed=seeds)
    for i in range(4):
        x = X[16 * i:16 * i + 16] + noise.normal((16, 4), stddev=0.1)
        loss = train_step(x, Y[16 * i:16 * i + 16])
        may_fail()
    history.append([float(loss), float(shift), float(noise.uniform(()))])
outcome = [weights(), history]
""",
    "trainer": """
class Trainer:
    def __init__(self):
        self.history, self.best, self.steps = [], 1e9, 0
    def train_epoch(self):
        total = 0.0
        for x, y in ds:
            loss = train_step(x, y)
            total += float(loss)
            self.steps += 1
            may_fail()
        return total
    def train(self, epochs):
        epoch = 0
        while epoch < epochs:
            total = self.train_epoch()
            self.history.append(total)
            self.best = min(self.best, total)
            epoch += 1
trainer = Trainer()
trainer.train(4)
outcome = [weights(), trainer.history, trainer.best, trainer.steps]
""",
}

JAX_CELLS = {
    "permutation in each epoch": """
history = []
for epoch in range(4):
    losses = []
    for idx in np.array_split(rng.permutation(64), 4):
        params, loss = update(params, X[idx], Y[idx])
        losses.append(float(loss) + 0.001 * rng.normal())
        may_fail()
    history.append(np.mean(losses).item())
    print(f"epoch {epoch}: {history[-1]:.4f}, last {loss:.4f}")
outcome = [weights(), history, losses]
""",
    "batches drawn in the loop": """
key, history = jax.random.key(2), []
for step in range(16):
    idx = rng.integers(0, 64, 16)
    key, sub = jax.random.split(key)
    x = X[idx] + 0.1 * jax.random.normal(sub, (16, 4))
    params, loss = update(params, x, Y[idx])
    if step % 3 == 0:
        history.append(float(loss))
    may_fail()
outcome = [weights(), history, rng.random(), jax.random.key_data(key).tolist()]
""",
    "generator of Flax NNX": """
history = []
for epoch in range(4):
    order = jax.random.permutation(rngs(), 64)
    for idx in order.reshape(4, 16):
        x = X[idx] + 0.1 * jax.random.normal(rngs.noise(), (16, 4))
        params, loss = update(params, x, Y[idx])
        may_fail()
    history.append(float(loss))
outcome = [weights(), history, jax.random.key_data(rngs()).tolist()]
""",
    "function with a generator of batches": """
def batches(size):
    while True:
        order = rng.permutation(64)
        for i in range(0, 64, size):
            yield X[order[i : i + size]], Y[order[i : i + size]]
def train(params, steps):
    it, average, count = batches(16), None, 0
    while count < steps:
        x, y = next(it)
        params, loss = update(params, x, y)
        average = float(loss) if average is None else 0.9 * average + 0.1 * float(loss)
        count += 1
        may_fail()
    return params, average
params, average = train(params, 14)
outcome = [weights(), average]
""",
    "index loop with the best parameters": """
best_params, best, first, losses = params, 1e9, params, []
same = losses
for epoch in range(5):
    i = 0
    while i < 64:
        params, loss = update(params, X[i : i + 16], Y[i : i + 16])
        i += 16
        losses.append(float(loss))
        may_fail()
    if epoch == 1:
        best_params = params
outcome = [
    weights(), jax.tree.map(np.asarray, best_params)["w"].tolist(), first["w"].tolist(), same,
    same is losses, X.sum().item(),
]
""",
    "folds that stop early, and a break at the begin of an epoch": """
scores, kept = [], {}
def draws():
    while True:
        yield rng.integers(0, 64, 8)
for fold in range(2):
    params = {"w": jnp.zeros((4, 1)), "b": jnp.zeros(())}
    epoch, wait, best = 0, 0, 1e9
    while epoch < 9:
        value = float(loss_fn(params, X, Y))
        if value > best - 2.5:
            wait += 1
        best = min(best, value)
        if wait == 2:
            break
        for step, idx in enumerate(draws()):
            params, loss = update(params, X[idx], Y[idx])
            may_fail()
            if step == 2:
                break
        epoch += 1
    kept[fold] = {"epochs": epoch, "best": best}
    scores.append(float(loss_fn(params, X, Y)))
outcome = [weights(), scores, {str(fold): value for fold, value in kept.items()}]
""",
    "replay buffer of named tuples": """
from collections import deque, namedtuple
Item = namedtuple("Item", ["x", "y"])
buffer, data, counted = deque(maxlen=24), iter(zip(X, Y)), 0
for round in range(4):
    for _ in range(8):
        buffer.append(Item(*next(data)))
    try:
        for step in range(4):
            rows = [buffer[i] for i in rng.integers(0, len(buffer), 8)]
            x, y = np.stack([r.x for r in rows]), np.stack([r.y for r in rows])
            params, loss = update(params, x, y)
            counted += 1
            may_fail()
    except RuntimeError:
        raise
    except:
        print("stopped")
        break
outcome = [weights(), counted, len(buffer), type(buffer[0]).__name__]
""",
    "batches from a function, and the best train state": """
import optax
from flax.training.train_state import TrainState
state = TrainState.create(
    apply_fn=lambda p, x: x @ p["w"] + p["b"], params=params, tx=optax.sgd(0.05)
)
best_state, best = None, 1e9
it = iter([(X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)] * 4)
def get_batch():
    return next(it)
@jax.jit
def train_step(state, x, y):
    loss_of = lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2)
    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss
for step in range(14):
    x, y = get_batch()
    state, loss = train_step(state, x, y)
    if step == 6:
        best, best_state = float(loss), state
    may_fail()
values = [[int(s.step), np.asarray(s.params["w"]).tolist()] for s in (state, best_state)]
outcome = [values, best]
""",
    "views of the data, and an action before the step": """
X2, last, cfg = X.copy(), None, {"scale": 1.0}
xb, yb = X2[0:16], Y[0:16]
seen = []
for t in range(16):
    action = float(jnp.tanh(X2[t] @ params["w"])[0])
    seen.append(action)
    params, loss = update(params, xb * (1 + 0.1 * action), yb * cfg["scale"])
    may_fail()
    j = (t % 4) * 16
    xb, yb = X2[j : j + 16], Y[j : j + 16]
outcome = [weights(), seen, np.abs(X2 - X).sum().item()]
""",
    "two folds": """
scores = []
for fold in range(2):
    params = {"w": jnp.zeros((4, 1)), "b": jnp.zeros(())}
    test = np.arange(64) % 2 == fold
    for epoch in range(2):
        for i in range(0, 32, 8):
            params, loss = update(params, X[~test][i : i + 8], Y[~test][i : i + 8])
            may_fail()
    scores.append(float(loss_fn(params, X[test], Y[test])))
outcome = [weights(), scores]
""",
}

FAILS_AT = 10


def cells(texts: dict[str, str], *short: str) -> pytest.MarkDecorator:
    """Parametrize a test with cells. Cells other than `short` run only with `--full`."""
    params = [
        pytest.param(text, id=name, marks=() if name in short else pytest.mark.full)
        for name, text in texts.items()
    ]
    return pytest.mark.parametrize("cell", params)


@pytest.fixture(scope="module")
def tensorflow() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(2, framework="tensorflow") as running:
        yield running


@pytest.fixture(scope="module")
def jax() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(2, framework="jax") as running:
        yield running


def begin(
    cluster: nbdist.Cluster, setup: str, *, fails_at: int = 0, killed: Path | str = ""
) -> None:
    """Create the variables. Rank 1 dies once if `killed` names a file that does not exist."""
    cluster.run(f"fails_at, killed = {fails_at}, {str(killed)!r}")
    cluster.run(setup)


def outcome(cluster: nbdist.Cluster) -> Any:
    """Return the value of `outcome` on each rank."""
    return [values["outcome"] for values in cluster.pull(["outcome"]).values()]


def compare(cluster: nbdist.Cluster, setup: str, cell: str, folder: Path) -> None:
    """Run a cell without a failure, and with one, and compare the outcomes."""
    begin(cluster, setup)
    cluster.run(cell)
    expected = outcome(cluster)
    begin(cluster, setup, fails_at=FAILS_AT)
    with pytest.raises(CellError, match="planned"):
        cluster.run(cell, saving=Saving(folder=str(folder), every_steps=3))
    begin(cluster, setup)
    cluster.run(cell, saving=Saving(folder=str(folder), every_steps=3, resume=True))
    assert outcome(cluster) == expected


@cells(
    TENSORFLOW_CELLS, "sums of an epoch, and the best loss", "generators of TensorFlow and Keras"
)
def test_tensorflow_loop(tensorflow: nbdist.Cluster, cell: str, tmp_path: Path) -> None:
    compare(tensorflow, TENSORFLOW, cell, tmp_path / "run")


@cells(
    JAX_CELLS,
    "generator of Flax NNX",
    "function with a generator of batches",
    "index loop with the best parameters",
)
def test_jax_loop(jax: nbdist.Cluster, cell: str, tmp_path: Path) -> None:
    compare(jax, JAX, cell, tmp_path / "run")


def replace_worker(cluster: nbdist.Cluster, setup: str, cell: str, folder: Path) -> None:
    """Run a cell without a failure, and with the death of a worker, and compare the outcomes."""
    cluster.restart()  # a recovery does not repeat the failed cells of other tests
    begin(cluster, setup)
    cluster.run(cell)
    expected = outcome(cluster)
    begin(cluster, setup, fails_at=FAILS_AT, killed=folder / "killed")
    cluster.run(cell, saving=Saving(folder=str(folder / "run"), every_steps=3))
    assert (folder / "killed").exists()
    assert outcome(cluster) == expected


@pytest.mark.full  # the same under mirrored
def test_tensorflow_loop_goes_on_with_a_replaced_worker(
    tensorflow: nbdist.Cluster, tmp_path: Path
) -> None:
    cell = TENSORFLOW_CELLS["functions for an epoch and for the training"]
    replace_worker(tensorflow, TENSORFLOW, cell, tmp_path)


@pytest.mark.full  # test_recovered_inputs.py replaces a worker in a loop
def test_jax_loop_goes_on_with_a_replaced_worker(jax: nbdist.Cluster, tmp_path: Path) -> None:
    replace_worker(jax, JAX, JAX_CELLS["permutation in each epoch"], tmp_path)


def test_loop_resumes_in_the_session_of_the_failed_run(jax: nbdist.Cluster, tmp_path: Path) -> None:
    """The list of an earlier cell has an item more than at the checkpoint."""
    cell = """
for epoch in range(3):
    for i in range(0, 64, 8):
        params, loss = update(params, X[i : i + 8], Y[i : i + 8])
        may_fail()
    history.append(float(loss))
outcome = [weights(), history]
"""
    begin(jax, JAX + "history = []")
    jax.run(cell)
    expected = outcome(jax)
    begin(jax, JAX + "history = []", fails_at=FAILS_AT)
    folder = str(tmp_path / "run")
    with pytest.raises(CellError, match="planned"):
        jax.run(cell, saving=Saving(folder=folder, every_steps=6))
    jax.run("fails_at = 0; params = jax.tree.map(jnp.zeros_like, params)")
    jax.run(cell, saving=Saving(folder=folder, every_steps=6, resume=True))
    assert outcome(jax) == expected


def test_value_that_the_loop_does_not_change_may_be_edited(
    jax: nbdist.Cluster, tmp_path: Path
) -> None:
    cell = """
for i in range(0, 64, 8):
    params, loss = update(params, X[i : i + 8], cfg["scale"] * Y[i : i + 8])
    may_fail()
"""
    begin(jax, JAX + "cfg = {'scale': 1.0}", fails_at=5)
    folder = str(tmp_path / "run")
    with pytest.raises(CellError, match="planned"):
        jax.run(cell, saving=Saving(folder=folder, every_steps=2))
    jax.restart()
    begin(jax, JAX + "cfg = {'scale': 2.0}")
    jax.run(cell, saving=Saving(folder=folder, every_steps=2, resume=True))
    jax.run("outcome = cfg['scale']")
    assert outcome(jax) == [2.0, 2.0]


def test_model_that_is_read_before_the_step_is_named(
    tensorflow: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = """
def act(x):
    return model(x)
for i in range(0, 64, 8):
    goal = Y[i : i + 8] + 0.1 * act(X[i : i + 8])
    loss = train_step(X[i : i + 8], goal)
    may_fail()
"""
    begin(tensorflow, TENSORFLOW, fails_at=5)
    folder = str(tmp_path / "run")
    with pytest.raises(CellError, match="planned"):
        tensorflow.run(cell, saving=Saving(folder=folder, every_steps=2))
    begin(tensorflow, TENSORFLOW)
    capsys.readouterr()
    tensorflow.run(cell, saving=Saving(folder=folder, every_steps=2, resume=True))
    assert "nbdist restores `model` in the step, but this pass reads it before" in (
        capsys.readouterr().err
    )


def test_list_that_cannot_be_saved_is_named(
    jax: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(jax, JAX + "steps = []")
    cell = """
for i in range(0, 64, 8):
    params, loss = update(params, X[i : i + 8], Y[i : i + 8])
    steps.append(lambda: i)
"""
    jax.run(cell, saving=Saving(folder=str(tmp_path / "run"), every_steps=2))
    assert "checkpoints lack `steps`" in capsys.readouterr().err


def test_resumed_loop_with_fewer_epochs_is_refused(jax: nbdist.Cluster, tmp_path: Path) -> None:
    cell = """
for epoch in range(EPOCHS):
    for i in range(0, 64, 16):
        params, loss = update(params, X[i : i + 16], Y[i : i + 16])
"""
    begin(jax, JAX)
    folder = str(tmp_path / "run")
    jax.run(cell.replace("EPOCHS", "3"), saving=Saving(folder=folder, every_steps=3))
    begin(jax, JAX)
    with pytest.raises(CellError, match="trained nothing: its loops ended before the position"):
        jax.run(cell.replace("EPOCHS", "1"), saving=Saving(folder=folder, resume=True))
