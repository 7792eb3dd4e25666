"""Workers without telemetry, for measurements of its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.errors import UsageError
from nbdist.records import Rows, StepOptions
from nbdist.settings import Settings
from tests import clusters
from tests.runs import ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

STEPS = 12
OPTIONS = StepOptions(data="train", epochs=2, batch=4)
SETUP = {
    "mirrored": """
import numpy as np, tensorflow as tf
train = np.ones((24, 3), "float32")
w = tf.Variable(tf.zeros(3), aggregation=tf.VariableAggregation.MEAN)
""",
    "pjrt": """
import numpy as np, jax, jax.numpy as jnp
from nbdist.worker.training import trace_schedule
traces = []
mkdtemp = trace_schedule.tempfile.mkdtemp
trace_schedule.tempfile.mkdtemp = lambda **options: traces.append(options) or mkdtemp(**options)
usual, trace_schedule.GAP_S = trace_schedule.GAP_S, 1e-6
train = np.ones((24, 3), "float32")
w = jnp.zeros(3)
""",
}
STEP = {
    "mirrored": """
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((tf.linalg.matvec(batch, w) - 1) ** 2)
total = tf.distribute.get_replica_context().all_reduce("SUM", loss)
w.assign_sub(0.1 * tape.gradient(loss, w))
""",
    "pjrt": "w = w + batch.mean(0)\nloss = w.sum()",
}
ENDS = """
from nbdist.worker.runtime import context
ends = context.current().reporter.step_ends
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="on", marks=pytest.mark.full), pytest.param(False, id="off")],
)
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    """Start workers with both frameworks. Telemetry is on by default."""
    silent = msgspec.structs.replace(Settings.from_environment(), telemetry=False)
    options = {} if request.param else {"settings": silent}
    with clusters.cluster(hosts=2, **options) as running:
        assert running.settings.telemetry == request.param
        yield running


def test_a_variable_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment().telemetry
    monkeypatch.setenv("NBDIST_TELEMETRY", "0")
    assert not Settings.from_environment().telemetry
    monkeypatch.setenv("NBDIST_TELEMETRY", "quiet")
    with pytest.raises(UsageError, match="telemetry"):
        Settings.from_environment()


@pytest.mark.parametrize("strategy", ["mirrored", "pjrt"])
def test_workers_without_telemetry_report_epochs_only(
    cluster: nbdist.Cluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on = cluster.settings.telemetry
    before = ids(cluster)
    cluster.run(SETUP[strategy], strategy=strategy)
    run = cluster.run(STEP[strategy], step=OPTIONS, strategy=strategy)
    steps = [m for m in run.metrics if m.step > 0]
    assert {m.epoch for m in run.metrics if m.step < 0} == {1, 2}
    assert len({m.step for m in steps}) == (STEPS if on else 0)
    assert len(ids(cluster) - before) == on
    assert ("(the setting NBDIST_TELEMETRY)" in capsys.readouterr().err) == (not on)
    if strategy == "mirrored":
        rows = [report for report in run.reports if isinstance(report, Rows)]
        assert any("collective_s" in report.columns.measures for report in rows) == on
    else:
        cluster.run("trace_schedule.GAP_S, trace_schedule.tempfile.mkdtemp = usual, mkdtemp")
        assert all(bool(found["traces"]) == on for found in cluster.pull(["traces"]).values())


def test_workers_without_telemetry_note_the_ends_of_steps(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP["pjrt"], strategy="pjrt")
    previous, later = 0, 0
    for _ in range(2):
        cluster.run(STEP["pjrt"], step=OPTIONS, strategy="pjrt")
        cluster.run(ENDS)
        ends = cluster.pull(["ends"], ranks="0")[0]["ends"]
        previous, later = later, len(ends)
        assert ends == sorted(ends)
    assert later - previous == (0 if cluster.settings.telemetry else STEPS)
