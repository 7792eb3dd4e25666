"""`--profile` on real engines of both frameworks: time by kind and rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.records import Profiled, StepOptions
from nbdist.telemetry.run_reader import stored_runs
from nbdist.worker.training.profile import FIRST_STEP
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from nbdist.records import AnyEvent

STEPS = 5
SLEEP_S = 0.03
SETUP = f"""
import time
import numpy as np
def data():
    for number in range(COUNT):
        yield np.ones((8, 64), "float32")
def nap(value):
    time.sleep(SLOW * {SLEEP_S} * (rank == 0))
    return value
"""
MIRRORED = (
    """
import tensorflow as tf
SLOW = strategy.cluster_resolver.task_id == 0
weights = tf.Variable(tf.ones([64, 64]) / 64)
""",
    """
late = tf.ensure_shape(tf.numpy_function(nap, [batch], tf.float32), batch.shape)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(tf.tanh(late @ weights) ** 2)
weights.assign_sub(0.01 * tape.gradient(loss, weights))
loss
""",
)
PJRT = (
    "import jax, jax.numpy as jnp\nSLOW = True\nw = jnp.ones((64, 64)) / 64\n",
    """
late = jax.pure_callback(nap, jax.ShapeDtypeStruct((), "float32"), w[0, 0])
loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(w)
w = w - 0.01 * gradient + 0 * late
loss
""",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        yield running


@pytest.fixture
def profiles(cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch) -> dict[int, Profiled]:
    """Collect the trace summaries that ranks report."""
    found: dict[int, Profiled] = {}
    deliver = cluster._worker_group.receiver.subscribers.deliver

    def record_profile(record: AnyEvent) -> None:
        if isinstance(record, Profiled):
            found[record.rank] = record
        deliver(record)

    monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", record_profile)
    return found


def run(
    cluster: nbdist.Cluster, strategy: Any, cells: tuple[str, str], count: int, **options: Any
) -> nbdist.Run:
    setup, step = cells
    cluster.run(f"COUNT = {count}\n{SETUP}{setup}", strategy=strategy)
    chosen = StepOptions(data="data", profile=STEPS, **options)
    return cluster.run(step, step=chosen, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "cells"), [("mirrored", MIRRORED), ("pjrt", PJRT)], ids=["mirrored", "pjrt"]
)
def test_time_is_attributed_and_trace_is_kept(
    cluster: nbdist.Cluster,
    profiles: dict[int, Profiled],
    capsys: pytest.CaptureFixture[str],
    strategy: str,
    cells: tuple[str, str],
) -> None:
    run(cluster, strategy, cells, FIRST_STEP + 2 * STEPS)
    events = stored_runs(cluster.settings.runs_path)[0].path / "events"
    assert profiles.keys() == {0, 1}
    for rank, profiled in profiles.items():
        assert profiled.steps == STEPS
        parts = profiled.compute_s + profiled.collective_s + profiled.other_s
        assert parts <= profiled.step_s * 1.1
        assert profiled.step_s > SLEEP_S
        if strategy == "pjrt":
            assert profiled.top[0].seconds >= profiled.top[-1].seconds > 0
            assert profiled.folder == str(events / f"rank-{rank}")
            assert list((events / f"rank-{rank}").rglob("*.xplane.pb"))
    assert profiles[0].compute_s > 0.9 * SLEEP_S  # it sleeps during its computation
    assert profiles[1].collective_s > profiles[0].collective_s  # it waits for rank 0
    assert profiles[1].compute_s < 0.5 * profiles[0].compute_s
    assert profiles[0].collective_s < profiles[1].collective_s
    shown = capsys.readouterr().out
    assert f"--profile: {STEPS} steps traced; milliseconds per step" in shown
    if strategy == "pjrt":
        assert "longest on rank 0:" in shown
        assert f"trace of rank 0: {events / 'rank-0'}" in shown
        assert profiles[0].top[0].name in shown
    else:
        assert "no operations: TensorFlow's profiler does not work here" in shown


@pytest.mark.parametrize(
    ("strategy", "cells"),
    [pytest.param("mirrored", MIRRORED, marks=pytest.mark.full), ("pjrt", PJRT)],
    ids=["mirrored", "pjrt"],
)
def test_run_that_ends_during_the_trace_reports_its_part(
    cluster: nbdist.Cluster, profiles: dict[int, Profiled], strategy: str, cells: tuple[str, str]
) -> None:
    run(cluster, strategy, cells, FIRST_STEP + 1)
    assert {profiled.steps for profiled in profiles.values()} == {2}
    names = {Path(profiled.folder).name for profiled in profiles.values()}
    assert names == ({"rank-0", "rank-1"} if strategy == "pjrt" else {""})


@pytest.mark.full  # rare
def test_sample_in_progress_delays_the_trace(
    cluster: nbdist.Cluster, profiles: dict[int, Profiled]
) -> None:
    """This happens if a step takes longer than the time between samples."""
    cluster.run(
        "from nbdist.worker.training import trace_schedule as tracing\n"
        "usual, tracing.GAP_S = tracing.GAP_S, 1e-6"
    )
    run(cluster, "pjrt", PJRT, FIRST_STEP + 3 * STEPS)
    cluster.run("tracing.GAP_S = usual")
    assert {profiled.steps for profiled in profiles.values()} == {STEPS}


def test_run_that_ends_before_the_trace_reports_no_steps(
    cluster: nbdist.Cluster, profiles: dict[int, Profiled], capsys: pytest.CaptureFixture[str]
) -> None:
    run(cluster, "pjrt", PJRT, FIRST_STEP - 1)
    assert {profiled.steps for profiled in profiles.values()} == {0}
    assert "--profile: no steps traced" in capsys.readouterr().out


@pytest.mark.full  # rare
def test_trace_started_by_the_user_is_unchanged(
    cluster: nbdist.Cluster, profiles: dict[int, Profiled], tmp_path: Path
) -> None:
    setup, step = PJRT
    begin = f"jax.profiler.start_trace({str(tmp_path)!r} + os.environ['NBDIST_RANK'])"
    run(cluster, "pjrt", (f"import os\n{setup}\n{begin}", step), FIRST_STEP + 2 * STEPS)
    assert {profiled.steps for profiled in profiles.values()} == {0}
    cluster.run("jax.profiler.stop_trace()", strategy="pjrt")
