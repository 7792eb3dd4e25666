"""Runs that lose a worker for good continue with fewer workers or wait for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.errors import CellError, UsageError
from nbdist.records import Saving, StepOptions
from tests import clusters, training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

RANKS = 3
LAST = RANKS - 1


@pytest.fixture(
    scope="module",
    params=["pjrt step"]
    + [pytest.param(f"mirrored {how}", marks=pytest.mark.full) for how in ("step", "fit")],
)  # the test with a metric covers mirrored
def form(request: pytest.FixtureRequest) -> training.Form:
    return training.FORMS[request.param]


@pytest.fixture(scope="module")
def cluster(form: training.Form) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=RANKS, framework=form.framework) as running:
        yield running


@pytest.fixture(autouse=True)
def restored(cluster: nbdist.Cluster) -> None:
    if cluster.world_size < RANKS:
        cluster.restart()


@contextlib.contextmanager
def kill_new_engines(cluster: nbdist.Cluster, max_kills: int = 1000) -> Iterator[list[int]]:
    """Kill new engines of the last rank at their start, as on a host without free memory.

    Args:
        cluster: The cluster with three ranks.
        max_kills: Largest number of kills.

    Yields:
        The pids of the engines killed so far.
    """
    engines, pids, stopped = cluster._worker_group.engines, [], threading.Event()
    first = engines.pids()[LAST]

    def kill() -> None:
        while not stopped.wait(0.005) and len(pids) < max_kills:
            pid = engines.pids().get(LAST, first)
            if engines.world_size == RANKS and pid not in (first, *pids):
                pids.append(pid)
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield pids
    finally:
        stopped.set()
        thread.join()


def death_cell(folder: Path) -> str:
    """Return a cell that kills the last rank as soon as a checkpoint exists."""
    return f"""
import threading
def die():
    while not os.path.exists({str(folder / "kept" / "step-00000005")!r}): time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == {LAST}: threading.Thread(target=die, daemon=True).start()
"""


def losses(run: nbdist.Run, form: training.Form) -> np.ndarray:
    """Return the losses by step, or the reduced metric `mae` by epoch for a fit."""
    return np.array(run.loss if form.is_step else run.history["mae"][0])


def test_run_continues_with_fewer_workers_and_the_same_batch(
    cluster: nbdist.Cluster, form: training.Form, tmp_path: Path
) -> None:
    setup = f"{form.setup}\ndef at(step): time.sleep(0.05)"
    cluster.run(setup, strategy=form.strategy)
    undisturbed = form.run(cluster, data="batches")
    cluster.run(setup, strategy=form.strategy)
    cluster.run(death_cell(tmp_path), once=True)
    with kill_new_engines(cluster):
        saving = Saving(folder=str(tmp_path / "kept"), every_steps=5, shrink=True)
        run = form.run(cluster, data="batches", saving=saving)
    (recover,) = run.recoveries
    assert recover.workers == 2
    assert recover.step >= 5
    assert cluster.world_size == 2
    assert run.summary.epochs == training.EPOCHS
    np.testing.assert_allclose(losses(run, form), losses(undisturbed, form), rtol=1e-4)
    assert cluster.run("rank, world_size").results == {0: "(0, 2)", 1: "(1, 2)"}
    cluster.restart()
    assert cluster.world_size == RANKS
    assert len(cluster.run("rank").results) == RANKS


@pytest.mark.parametrize("form", ["mirrored step"], indirect=True)
@pytest.mark.full
def test_metric_keeps_the_part_of_the_lost_worker(
    cluster: nbdist.Cluster, form: training.Form, tmp_path: Path
) -> None:
    """Each worker holds its own part of a metric."""
    counting = (
        "import tensorflow as tf\nwith strategy.scope():\n    samples = keras.metrics.Sum()\n"
        "def at(step): time.sleep(0.05)"
    )
    counting_form = dataclasses.replace(
        form, cell=f"samples.update_state(tf.ones(len(batch[0]))){form.cell}"
    )
    cluster.run(form.setup, strategy=form.strategy)
    cluster.run(counting, strategy=form.strategy)
    cluster.run(death_cell(tmp_path), once=True)
    with kill_new_engines(cluster):
        saving = Saving(folder=str(tmp_path / "kept"), every_steps=5, shrink=True)
        run = counting_form.run(cluster, data="batches", saving=saving)
    assert [recover.workers for recover in run.recoveries] == [2]
    total = training.SAMPLES * training.EPOCHS
    results = cluster.run("float(samples.result())", strategy=form.strategy).results
    assert results == {rank: str(float(total)) for rank in range(2)}


@pytest.mark.full
def test_without_shrink_the_worker_is_awaited(
    cluster: nbdist.Cluster, form: training.Form, tmp_path: Path
) -> None:
    cluster.run(form.setup, strategy=form.strategy)
    cluster.run(death_cell(tmp_path), once=True)
    with kill_new_engines(cluster, max_kills=2) as pids:
        saving = Saving(folder=str(tmp_path / "kept"), every_steps=5)
        run = form.run(cluster, data="batches", saving=saving)
    assert len(pids) == 2
    assert [recover.workers for recover in run.recoveries] == [0]
    assert run.summary.steps == training.STEPS


@pytest.mark.parametrize("form", ["pjrt step"], indirect=True)
def test_shrink_with_per_worker_data_is_refused(
    cluster: nbdist.Cluster, form: training.Form, tmp_path: Path
) -> None:
    """The data of the lost worker are lost too."""
    cluster.run(form.setup, strategy=form.strategy)
    cluster.run(
        "own = strategy.distribute_datasets_from_function(\n"
        "    lambda context: [(x[:4], y[:4])] * 400)",
        strategy=form.strategy,
    )
    cluster.run(death_cell(tmp_path), once=True)
    saving = Saving(folder=str(tmp_path / "kept"), every_steps=5, shrink=True)
    with kill_new_engines(cluster), pytest.raises(CellError, match="was made by 3 workers, each"):
        form.run(cluster, data="own", saving=saving)


def test_incompatible_options_are_refused(cluster: nbdist.Cluster) -> None:
    saving = Saving(folder="kept", every_steps=5, shrink=True)
    step = StepOptions(data="batches", scale_lr=True)
    with pytest.raises(UsageError, match="--shrink with --scale-lr"):
        cluster.run("batch", step=step, saving=saving)
