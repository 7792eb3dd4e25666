"""Timing of collectives on real engines: the minimum over ranks is network time."""

from __future__ import annotations

import struct
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import Rows, StepOptions
from nbdist.telemetry import confidence, diagnostics
from nbdist.telemetry.diagnostics import Diagnostics
from nbdist.worker.runtime.spans import covered
from nbdist.worker.training.trace_schedule import SAMPLED_STEPS
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist
    from nbdist.records import AnyEvent, Finding

SLEEP_S = 0.03
STEPS = 90
LASTS_S, ALPHA = 0.0, 0.01
"""Seconds and confidence that a finding needs here: samples of short runs arrive at the end."""

HOSTS = {0: "hostA", 1: "hostB"}
SETUP = f"""
import time
import numpy as np, keras, tensorflow as tf
def data():
    for number in range({STEPS}):
        yield np.ones((8, 64), "float32") * number / {STEPS}
def nap(value):
    time.sleep(SLOW * {SLEEP_S})
    return value
keras.utils.set_random_seed(1)
layer = keras.layers.Dense(64, activation="tanh")
layer.build((None, 64))
optimizer = keras.optimizers.SGD(0.01)
optimizer.build(layer.trainable_variables)
"""
JAX_SETUP = f"""
import time
import numpy as np, jax, jax.numpy as jnp
from nbdist.worker.training import trace_schedule as tracing
from tests import clusters
tracing.GAP_S, tracing.SHARE = 0.1, 100.0  # samples enough, however noisy the machine
def data():
    for number in range(200):
        yield np.ones((8, 64), "float32") * number / 200
        time.sleep(0.001)
def nap(value):
    time.sleep(SLOW * {SLEEP_S} * (rank == 0))
    return value
w = jnp.ones((64, 64)) / 64
"""
JAX_STEP = """
late = jax.pure_callback(nap, jax.ShapeDtypeStruct((), "float32"), w[0, 0])
loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(w)
w = w - 0.01 * gradient + 0 * late
loss
"""
STEP = """
slowed = tf.ensure_shape(tf.numpy_function(nap, [batch], tf.float32), batch.shape)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(layer(slowed) ** 2)
optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
"""


class SentRows:
    """Rows that ranks send. The cluster still receives them."""

    def __init__(self, cluster: nbdist.Cluster, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[Rows] = []
        patch.setattr(diagnostics, "LASTING_S", LASTS_S)
        patch.setattr(confidence, "ALPHA", ALPHA)
        deliver = cluster._worker_group.receiver.subscribers.deliver

        def record_rows(record: AnyEvent) -> None:
            if isinstance(record, Rows):
                self.rows.append(record)
            deliver(record)

        patch.setattr(cluster._worker_group.receiver.subscribers, "deliver", record_rows)

    def column(self, rank: int, name: str) -> list[float]:
        return [row[name] for row in self.steps(rank) if name in row]

    def steps(self, rank: int) -> Iterator[dict[str, float]]:
        for rows in self.rows:
            names = rows.columns.names
            if rows.rank == rank:
                for values in struct.iter_unpack(f"<{len(names)}d", rows.values):
                    yield dict(zip(names, values, strict=True))

    def findings(self, strategy: Any, batch: int = 8) -> dict[str, Finding]:
        analyst = Diagnostics(HOSTS, strategy, batch)
        for rows in self.rows:
            analyst.take(rows)
            analyst.findings()
        return {finding.topic: finding for finding in analyst.findings()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        yield running


@pytest.fixture
def sent_rows(cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch) -> SentRows:
    return SentRows(cluster, monkeypatch)


def train(cluster: nbdist.Cluster, slow: str, **options: Any) -> nbdist.Run:
    cluster.run(f"SLOW = {slow}\n" + SETUP)
    return cluster.run(STEP, step=StepOptions(data="data", **options), strategy="mirrored")


class TestMirrored:
    def test_slow_rank_is_the_straggler_and_not_the_network(
        self, cluster: nbdist.Cluster, sent_rows: SentRows
    ) -> None:
        train(cluster, "strategy.cluster_resolver.task_id == 1")
        waited = {rank: median(sent_rows.column(rank, "collective_s")) for rank in HOSTS}
        step_s = median(sent_rows.column(0, "step_s"))
        assert step_s > SLEEP_S
        assert waited[0] > 0.5 * SLEEP_S  # rank 0 waits for rank 1 in the all-reduce
        assert waited[1] < 0.5 * waited[0]
        found = sent_rows.findings("mirrored")
        assert found["straggler"].ranks == (1,)
        assert found["straggler"].text.startswith("rank 1@hostB computes ")

    @pytest.mark.full  # the inverse
    def test_equally_slow_ranks_are_no_stragglers(
        self, cluster: nbdist.Cluster, sent_rows: SentRows
    ) -> None:
        train(cluster, "1")
        for rank in HOSTS:
            assert len(sent_rows.column(rank, "collective_s")) == STEPS
            assert 0 < median(sent_rows.column(rank, "collective_s")) < 0.5 * SLEEP_S
        assert "network" not in sent_rows.findings("mirrored")

    @pytest.mark.full  # rare
    def test_all_reduce_of_the_user_is_timed(
        self, cluster: nbdist.Cluster, sent_rows: SentRows
    ) -> None:
        cluster.run("SLOW = strategy.cluster_resolver.task_id\n" + SETUP)
        cell = (
            "late = tf.ensure_shape(tf.numpy_function(nap, [batch], tf.float32), batch.shape)\n"
            "replica = tf.distribute.get_replica_context()\n"
            "loss = replica.all_reduce('MEAN', tf.reduce_mean(late))"
        )
        cluster.run(cell, step=StepOptions(data="data"), strategy="mirrored")
        assert median(sent_rows.column(0, "collective_s")) > 0.5 * SLEEP_S

    def test_timing_does_not_change_losses(
        self, cluster: nbdist.Cluster, sent_rows: SentRows
    ) -> None:
        without = (
            "from nbdist.worker.tensorflow.runtime import collective_timing as clock\n"
            "chosen = clock.choose\n"
            "clock.choose = lambda *_, **__: clock.NoClock()"
        )
        timed = train(cluster, "0")
        assert sent_rows.column(0, "collective_s")
        cluster.run(without)
        sent_rows.rows.clear()
        untimed = train(cluster, "0")
        cluster.run("clock.choose = chosen")
        assert not sent_rows.column(0, "collective_s")
        np.testing.assert_array_equal(timed.loss, untimed.loss)


class TestPjrt:
    """Timing at a few sampled steps, the same on all ranks."""

    def test_slow_rank_is_the_straggler(self, cluster: nbdist.Cluster, sent_rows: SentRows) -> None:
        cluster.run("SLOW = True\n" + JAX_SETUP, strategy="pjrt")
        cluster.run(JAX_STEP, step=StepOptions(data="data", steps=2 * STEPS), strategy="pjrt")
        sampled = {rank: len(sent_rows.column(rank, "collective_s")) for rank in HOSTS}
        assert all(count and count % SAMPLED_STEPS == 0 for count in sampled.values())
        waited = {rank: median(sent_rows.column(rank, "collective_s")) for rank in HOSTS}
        assert waited[1] > 0.5 * SLEEP_S
        assert waited[0] < 0.5 * waited[1]
        found = sent_rows.findings("pjrt")
        assert found["straggler"].ranks == (0,)

    def test_sampling_keeps_losses_and_leaves_no_file(
        self, cluster: nbdist.Cluster, sent_rows: SentRows, tmp_path: Path
    ) -> None:
        losses = []
        for gap_s in (0.05, 1e9):
            cluster.run(f"SLOW = False\n{JAX_SETUP}tracing.GAP_S = {gap_s}", strategy="pjrt")
            cluster.run(f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}")
            run = cluster.run(JAX_STEP, step=StepOptions(data="data"), strategy="pjrt")
            own = [m for m in run.metrics if m.rank == 0 and "loss" in m.shared]
            losses.append([m.shared["loss"] for m in own])
            assert bool(sent_rows.column(0, "collective_s")) is (gap_s < 1)
            sent_rows.rows.clear()
        np.testing.assert_array_equal(*losses)
        assert not list(tmp_path.iterdir())

    @pytest.mark.full  # rare
    def test_last_sample_belongs_to_a_finished_epoch(
        self, cluster: nbdist.Cluster, sent_rows: SentRows
    ) -> None:
        """The sampled steps may be the last ones of a run."""
        cluster.run(f"SLOW = False\n{JAX_SETUP}tracing.GAP_S = 1e-6", strategy="pjrt")
        for steps in range(SAMPLED_STEPS + 2, SAMPLED_STEPS + 12):
            few = (
                f"def few():\n    for _, batch in zip(range({steps}), data()):\n        yield batch"
            )
            cluster.run(few, strategy="pjrt")
            cluster.run(JAX_STEP, step=StepOptions(data="few"), strategy="pjrt")
        assert sent_rows.column(0, "collective_s")
        assert set(sent_rows.column(0, "epoch")) == {1}


def test_overlapping_spans_are_counted_once() -> None:
    spans = np.array([[5.0, 6.0], [0.0, 2.0], [1.0, 3.0], [1.5, 1.75]])
    assert covered(spans) == 4.0
    assert covered(spans[:1]) == 1.0
    assert covered(spans[:0]) == 0.0
