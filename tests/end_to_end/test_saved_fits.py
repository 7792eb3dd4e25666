"""Checkpoints of cells with one or more fits, under any variable names."""

from __future__ import annotations

import ast
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from nbdist.errors import CellError, RanksLostError
from nbdist.records import Output, Saving
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist
    from nbdist.records import AnyEvent

STRATEGY = {"jax": "pjrt", "tensorflow": "mirrored"}
SETUP = """
import hashlib, os, signal, time
import numpy as np, keras
keras.utils.set_random_seed(7)
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
y = x.sum(1, keepdims=True)
def built():
    with strategy.scope():
        net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        net.compile(keras.optimizers.Adam(0.01), "mse")
    return net
class At(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        at(self.model.name, epoch)
def at(name, epoch):
    pass
def digest(*nets):
    arrays = [v.numpy() for net in nets for v in (*net.variables, *net.optimizer.variables)]
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:16]
first, other = built(), built()
"""
CELL = """
first.fit(x, y, batch_size=12, epochs=3, verbose=0, shuffle=False, callbacks=[At()])
last = other
last.fit(x, y, batch_size=12, epochs=4, verbose=0, shuffle=False, callbacks=[At()])
"""
KILL_RANK_1 = """
def at(name, epoch):
    if rank == 1 and name == other.name and epoch == 2 and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""

LOOPS = {
    "pjrt": """
import jax, jax.numpy as jnp
@jax.jit
def update(w, x, y):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    return w - 0.1 * grad, loss
w = jnp.zeros((4, 1))
for epoch in range(3):
    for i in range(0, 48, 12):
        w, loss = update(w, x[i : i + 12], y[i : i + 12])
    at("loop", epoch)
""",
    "mirrored": """
import tensorflow as tf
w = tf.Variable(tf.zeros((4, 1)))
sgd = keras.optimizers.SGD(0.1)
@tf.function
def update(a, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((a @ w - b) ** 2)
    sgd.apply_gradients([(tape.gradient(loss, w), w)])
    return loss
for epoch in range(3):
    for a, b in tf.data.Dataset.from_tensor_slices((x, y)).batch(12):
        loss = update(a, b)
    at("loop", epoch)
""",
}


@pytest.fixture(scope="module", params=["jax", pytest.param("tensorflow", marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=request.param) as running:
        yield running


def strategy_of(cluster: nbdist.Cluster) -> str:
    return STRATEGY[cluster.request.frameworks[0]]


def digest_of(cluster: nbdist.Cluster) -> dict[int, str]:
    return cluster.run("digest(first, other)", strategy=strategy_of(cluster)).results


@pytest.mark.full  # test_shrink.py covers one fit
def test_cell_with_two_fits_recovers_in_the_second(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    strategy = strategy_of(cluster)
    cluster.run(SETUP, strategy=strategy)
    cluster.run(CELL, strategy=strategy)
    undisturbed = digest_of(cluster)
    cluster.run(SETUP + KILL_RANK_1.format(mark=str(tmp_path / "mark")), strategy=strategy)
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=3)
    run = cluster.run(CELL, strategy=strategy, saving=saving)
    assert [recover.ranks for recover in run.recoveries] == [(1,)]
    assert digest_of(cluster) == undisturbed
    resuming = Saving(folder=saving.folder, every_steps=3, resume=True)
    run = cluster.run(CELL, strategy=strategy, saving=resuming)  # the previous run defined `last`
    assert not run.recoveries
    assert digest_of(cluster) == undisturbed


@pytest.mark.parametrize("order", ["fit first", pytest.param("loop first", marks=pytest.mark.full)])
def test_cell_with_a_fit_and_a_loop_recovers_in_the_second(
    cluster: nbdist.Cluster, tmp_path: Path, order: str
) -> None:
    """A checkpoint contains the first training. A recovery repeats the second one."""
    strategy = strategy_of(cluster)
    fit = CELL.partition("last")[0]
    parts = [fit, LOOPS[strategy]] if order == "fit first" else [LOOPS[strategy], fit]
    results = "np.asarray(w).tolist(), digest(first)"
    cluster.run(SETUP, strategy=strategy)
    cluster.run("".join(parts), strategy=strategy)
    undisturbed = cluster.run(results, strategy=strategy).results
    second = '"loop"' if order == "fit first" else "first.name"
    kill = KILL_RANK_1.format(mark=str(tmp_path / "mark")).replace("other.name", second)
    cluster.run(SETUP + kill, strategy=strategy)
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=3)
    run = cluster.run("".join(parts), strategy=strategy, saving=saving)
    assert [recover.ranks for recover in run.recoveries] == [(1,)]
    assert cluster.run(results, strategy=strategy).results == undisturbed
    repeated = "whole loop" if order == "fit first" else "whole `fit` after its loop"
    texts = [finding.text for finding in run.state.findings]
    assert any(text.endswith(f"a resumed run repeats the {repeated}") for text in texts), texts


@pytest.mark.full  # the previous test covers the names
def test_model_trained_by_an_earlier_cell_is_recovered(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    """The checkpoint stores the model under its name in the cell."""
    strategy, digests = strategy_of(cluster), []
    for with_kill in (False, True):
        cluster.run(SETUP, strategy=strategy)
        cluster.run("other.fit(x, y, batch_size=12, epochs=1, verbose=0)", strategy=strategy)
        if with_kill:
            cluster.run(KILL_RANK_1.format(mark=str(tmp_path / "mark")), once=True)
        saving = Saving(folder=str(tmp_path / str(with_kill)), every_steps=3)
        run = cluster.run(CELL.replace("last", "other"), strategy=strategy, saving=saving)
        digests.append(digest_of(cluster))
        assert len(run.recoveries) == int(with_kill)
    assert digests[0] == digests[1]


def test_impossible_recovery_is_explained(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    strategy = strategy_of(cluster)
    cluster.run(
        SETUP + KILL_RANK_1.format(mark=str(tmp_path / "mark")), strategy=strategy, once=True
    )
    with pytest.raises(RanksLostError, match=r"rank 1@.* died") as error:
        cluster.run(CELL, strategy=strategy, saving=Saving(str(tmp_path / "kept"), every_steps=3))
    (note,) = error.value.__notes__
    assert "nbdist cannot recover the run: [" in note
    assert "is marked --once" in note
    cluster.restart()


@pytest.mark.full
def test_interrupt_before_a_death_prevents_the_recovery(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run ends without a recovery."""
    strategy = strategy_of(cluster)
    cell = (
        "def at(name, epoch):\n    if rank == 1 and epoch == 1:\n"
        "        print('there', flush=True)\n        time.sleep(1.5)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)"
    )
    cluster.run(f"{SETUP}\n{cell}", strategy=strategy)
    deliver, interrupted = cluster._worker_group.receiver.subscribers.deliver, threading.Event()

    def intercept(record: AnyEvent) -> None:
        deliver(record)
        if isinstance(record, Output) and "there" in record.text and not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", intercept)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(CELL, strategy=strategy, saving=Saving(str(tmp_path / "kept"), every_steps=3))
    assert interrupted.is_set()
    assert not cluster.last_run.recoveries
    cluster.restart()
    assert len(cluster.run("rank").results) == 2


@pytest.mark.full
def test_resume_before_the_set_up_raises_name_error(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    """On fresh workers, `--resume` before the set-up fails with a NameError."""
    cluster.restart()
    pids = {worker.pid for worker in cluster.workers()}
    saving = Saving(str(tmp_path / "kept"), every_steps=3, resume=True)
    with pytest.raises(CellError, match="NameError"):
        cluster.run(CELL, strategy=strategy_of(cluster), saving=saving)
    assert {worker.pid for worker in cluster.workers()} == pids


VALIDATED = """
losses = first.fit(
    x, y, batch_size=12, epochs={epochs}, validation_data=(3 * x, y), verbose=0, shuffle=False
).history["loss"]
losses
"""


@pytest.mark.full
def test_resumed_epoch_counts_only_its_own_batches(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """Keras metrics hold validation values at the end of a fit; a resume must reset them."""
    strategy = strategy_of(cluster)
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=3)
    losses = []
    for epochs, saving_option in (
        (3, None),
        (2, saving),
        (3, structs.replace(saving, resume=True)),
    ):
        cluster.run(SETUP, strategy=strategy)
        run = cluster.run(VALIDATED.format(epochs=epochs), strategy=strategy, saving=saving_option)
        losses.append(ast.literal_eval(run.results[0]))
    whole, first, resumed = losses
    assert first == whole[:2]
    assert resumed == whole
