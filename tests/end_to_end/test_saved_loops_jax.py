"""Checkpoints of training loops of JAX in plain cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.errors import CellError
from nbdist.records import Saving
from tests import clusters
from tests.end_to_end.test_lifted_loops_jax import SETUP, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        yield running


RESUMABLE = """
from flax import nnx
class Counter:
    def __init__(self):
        self.seen, self.total = 0, jnp.zeros(2)
    def step(self, params, opt_state, x, y):
        loss, g = value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(g, opt_state)
        self.seen += 1
        self.total = self.total + jnp.stack([loss, jnp.float32(1)])
        scale[...] = scale[...] * 0.9
        return optax.apply_updates(params, updates), opt_state, loss
counter, scale = Counter(), nnx.Variable(jnp.ones(3))
for epoch in range(3):
    for x, y in batches:
        params, opt_state, loss = counter.step(params, opt_state, x, y)
        scale = scale
        losses.append(float(loss))
    FAIL
outcome = [plain(params), plain(opt_state), counter.seen, plain(counter.total), losses]
"""


@pytest.mark.full  # test_resumed_loops.py
def test_loop_resumes_from_its_checkpoint(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """The first run fails in the second epoch; the second one continues behind its checkpoint."""
    whole = RESUMABLE.replace("FAIL", "pass")
    cluster.run(SETUP)
    cluster.run(whole)
    expected = outcome(cluster)
    saving = Saving(folder=str(tmp_path / "run"), every_steps=4)
    cluster.run(SETUP)
    with pytest.raises(CellError, match="ZeroDivisionError"):
        cluster.run(RESUMABLE.replace("FAIL", "1 / (1 - epoch)"), saving=saving)
    cluster.run(SETUP)
    cluster.run(whole, saving=Saving(folder=saving.folder, every_steps=4, resume=True))
    assert outcome(cluster) == expected


def test_checkpoint_without_a_value_that_a_function_reads_is_named(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cell = """
def train(x, y):
    loss, g = value_and_grad(loss_fn)(params, x, y)
    return jax.tree.map(lambda a, b: a - 0.05 * b, params, g), loss
for x, y in batches:
    params, loss = train(x, y)
"""
    cluster.run(cell, saving=Saving(folder=str(tmp_path / "run")))
    assert "checkpoints lack `params`, because a function reads it" in capsys.readouterr().err


OUTSIDE = """
take = jax.jit(value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
class Descent:
    def __init__(self, w):
        self.w = w
    def update(self, g):
        return Descent(self.w - 0.05 * g)
state, step = Descent(jnp.zeros((4, 1))), 0
for x, y in batches:
    loss, g = take(state.w, x, y)
    state = state.update(g)
    step += 1
outcome = [plain(state.w), step]
"""


BY_FUNCTION = """
take = jax.jit(value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
def descend(w, g):
    return w - 0.05 * g
w, step = jnp.zeros((4, 1)), 0
for x, y in batches:
    loss, g = take(w, x, y)
    w = descend(w, g)
    step += 1
outcome = [plain(w), step]
"""


@pytest.mark.parametrize(
    "cell",
    [OUTSIDE, pytest.param(BY_FUNCTION, marks=pytest.mark.full)],
    ids=["object", "array"],
)
def test_values_that_change_outside_of_the_step_are_saved(
    cluster: nbdist.Cluster, cell: str, tmp_path: Path
) -> None:
    cluster.run(SETUP)
    cluster.run(cell)
    expected = outcome(cluster)
    failing = cell.replace("    step += 1", "    step += 1\n    1 / (4 - step)")
    with pytest.raises(CellError, match="ZeroDivisionError"):
        cluster.run(failing, saving=Saving(folder=str(tmp_path / "run"), every_steps=2))
    cluster.run(SETUP)
    run = cluster.run(cell, saving=Saving(folder=str(tmp_path / "run"), resume=True))
    assert "resumed from the checkpoint of step 2" in [note.text for note in run.notes]
    assert outcome(cluster) == expected


def test_values_that_cannot_be_saved_are_named(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cell = OUTSIDE.replace("Descent(jnp.zeros((4, 1))), 0", "[Descent(jnp.zeros((4, 1)))], 0")
    cell = cell.replace("state.w", "state[0].w").replace(
        "state = state.update(g)", "state = [state[0].update(g)]"
    )
    cluster.run(cell, saving=Saving(folder=str(tmp_path / "run"), every_steps=1))
    shown = capsys.readouterr().err
    assert "checkpoints lack `state`, which the loop changes outside of the step" in shown
    assert "no checkpoint is saved, because the steps carry no arrays" in shown
    assert not list((tmp_path / "run").iterdir())
