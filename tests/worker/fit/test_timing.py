"""Timing of `fit` on real engines: input, collectives and findings."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.telemetry.run_reader import stored_runs
from tests import clusters
from tests.worker.tensorflow.runtime.test_collective_timing import HOSTS, SentRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Finding

SLEEP_S = 0.03
STEPS = 96
"""Number of steps, more than diagnostics read."""
ATTEMPTS = 3
"""Number of attempts; one must run without disturbance by other processes."""
STEP_WAIT_S = 10.0
"""Seconds that a traced step waits for unfinished steps."""
MODEL = f"""
import time
import numpy as np, keras
from nbdist.worker.training import trace_schedule
trace_schedule.GAP_S, trace_schedule.SHARE = 0.1, 100.0  # samples enough, however noisy the machine
class Batches(keras.utils.PyDataset):
    def __init__(self, sleep_s):
        super().__init__()
        self.sleep_s = sleep_s
    def __len__(self):
        return {STEPS}
    def __getitem__(self, number):
        time.sleep(self.sleep_s)
        x = np.sin(np.arange(16 * 8, dtype="float32") + number).reshape(16, 8)
        return x, x[:, :1]
def build(*layers, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model
"""
NAP = {
    "tensorflow": f"""
import tensorflow as tf
def nap(x):
    time.sleep({SLEEP_S} * SLOW)
    return x
class Nap(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(nap, [x], tf.float32), x.shape)
""",
    "jax": f"""
import jax, jax.numpy as jnp
def nap(number):
    time.sleep({SLEEP_S} * SLOW)
    return number
class Nap(keras.layers.Layer):
    def call(self, x):
        late = jax.pure_callback(nap, jax.ShapeDtypeStruct((), "float32"), jnp.zeros(()))
        return x + late
""",
}
SLOW_RANK = {"tensorflow": 1, "jax": 0}
OPTIONS = {"tensorflow": {"hosts": 2}, "jax": {"hosts": 2, "framework": "jax"}}


def with_frameworks(*frameworks: str) -> pytest.MarkDecorator:
    """Parametrize over frameworks; mark all except the given ones as `full`."""
    params = [pytest.param(f, marks=() if f in frameworks else pytest.mark.full) for f in OPTIONS]
    return pytest.mark.parametrize("framework", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cluster(framework: Any) -> Iterator[nbdist.Cluster]:
    """Start a cluster with one framework: with both installed, Keras uses TensorFlow."""
    with clusters.cluster(**OPTIONS[framework]) as running:
        yield running


@pytest.fixture
def sent_rows(cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch) -> SentRows:
    return SentRows(cluster, monkeypatch)


def input_share(sent_rows: SentRows, rank: int) -> float:
    """Return the median share of a step that the rank waited for data."""
    steps = [row for row in sent_rows.steps(rank) if "input_s" in row]
    return median(row["input_s"] / row["step_s"] for row in steps)


def findings(sent_rows: SentRows, framework: str) -> dict[str, Finding]:
    return sent_rows.findings("pjrt" if framework == "jax" else "mirrored", batch=0)


@with_frameworks("tensorflow")
@pytest.mark.full
def test_fit_that_waits_for_data_is_starved(
    cluster: nbdist.Cluster, sent_rows: SentRows, framework: str
) -> None:
    cluster.run(f"{MODEL}build().fit(Batches({SLEEP_S}), verbose=0)")
    # The other rank's data may be ready by the time that the late rank's data arrive.
    assert max(input_share(sent_rows, rank) for rank in HOSTS) > 0.3
    starved = findings(sent_rows, framework)["starved"]
    assert "append .prefetch(tf.data.AUTOTUNE)" in starved.text


@with_frameworks("jax")
@pytest.mark.full
def test_rank_with_slow_data_is_starved(
    cluster: nbdist.Cluster, sent_rows: SentRows, framework: str
) -> None:
    cluster.run(f"{MODEL}build().fit(Batches({SLEEP_S} * rank), epochs=2, verbose=0)")
    assert input_share(sent_rows, 1) > 2 * input_share(sent_rows, 0)
    found = findings(sent_rows, framework)
    assert found["starved"].ranks == (1,)
    assert "prefetch(tf.data.AUTOTUNE)" in found["starved"].text
    assert "straggler" not in found


@with_frameworks("jax")
@pytest.mark.full  # test_collective_timing.py finds stragglers
def test_slow_rank_is_the_straggler_but_not_starved(
    cluster: nbdist.Cluster, sent_rows: SentRows, framework: str
) -> None:
    slow = SLOW_RANK[framework]
    code = "x = np.ones((1600, 8), 'float32')\nmodel.fit(x, x[:, :1], batch_size=16, epochs=2);"
    cluster.run(f"SLOW = rank == {slow}\n{MODEL}{NAP[framework]}model = build(Nap())\n{code}")
    waited = {rank: median(sent_rows.column(rank, "collective_s")) for rank in HOSTS}
    assert waited[1 - slow] > 0.5 * SLEEP_S
    assert waited[slow] < 0.5 * waited[1 - slow]
    assert input_share(sent_rows, slow) < 0.1
    found = findings(sent_rows, framework)
    assert found["straggler"].ranks == (slow,)
    assert "check for other processes" in found["straggler"].text
    assert "starved" not in found


@with_frameworks("jax")
@pytest.mark.full
def test_share_of_the_network_is_reported(
    cluster: nbdist.Cluster, sent_rows: SentRows, framework: str
) -> None:
    """Without stragglers and other work, the share of the network exceeds the limit."""
    code = "x = np.ones((16 * 400, 8), 'float32')\nmodel.fit(x, x[:, :1], batch_size=16);"
    for _ in range(ATTEMPTS):
        sent_rows.rows.clear()
        cluster.run(f"{MODEL}model = build()\n{code}")
        assert all(median(sent_rows.column(rank, "collective_s")) > 0 for rank in HOSTS)
        found = findings(sent_rows, framework)
        if "network" in found:
            break
    assert "of a step is spent in collectives" in found["network"].text


@pytest.mark.full  # one rank
@with_frameworks("tensorflow")
@pytest.mark.parametrize("jit", ["'auto'", pytest.param("True", marks=pytest.mark.full)])
@pytest.mark.parametrize("several", [pytest.param(1, marks=pytest.mark.full), 4])
def test_single_rank_waits_for_data_without_collectives(
    cluster: nbdist.Cluster, sent_rows: SentRows, several: int, jit: str
) -> None:
    options = f"steps_per_execution={several}, jit_compile={jit}"
    fit = f"model = build({options})\nmodel.fit(Batches({SLEEP_S}), verbose=0);"
    cluster.run(MODEL + fit, ranks="0")
    assert input_share(sent_rows, 0) > 0.5
    assert input_share(sent_rows, 0) <= 1.0
    assert len(sent_rows.column(0, "input_s")) == STEPS / several
    assert not sent_rows.column(0, "collective_s"), "collective time is not unknown"
    sent_rows.rows.clear()
    code = "x = np.ones((640, 8), 'float32')\nmodel.fit(x, x[:, :1], batch_size=16, epochs=2);"
    cluster.run(code, ranks="0")
    assert median(sent_rows.column(0, "input_s")) < 0.3 * SLEEP_S


@with_frameworks()
def test_eager_fit_is_not_timed_on_tensorflow(
    cluster: nbdist.Cluster, sent_rows: SentRows, framework: str
) -> None:
    fit = "build(run_eagerly=True).fit(Batches(0), epochs=1, verbose=0);"
    cluster.run(MODEL + fit, ranks="0")
    assert sent_rows.column(0, "step_s")
    assert bool(sent_rows.column(0, "input_s")) is (framework == "jax")


TRAINED = """
class Logs(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        names.update(logs)
names = set()
model = build(metrics=["mae"])
history = model.fit(Batches(0), epochs=2, callbacks=[Logs()], verbose=0).history
single = model.train_on_batch(*Batches(0)[0], return_dict=True)
outcome = {"history": history, "weights": [w.tolist() for w in model.get_weights()]}
seen = sorted(names | set(history) | set(single))
"""
UNTIMED = {
    "tensorflow": """
from nbdist.worker.tensorflow.keras.train_function import ReplicatedStep
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer
ours = Trainer.make_train_function
def untimed(model, force=False):
    step = ReplicatedStep(model, model.train_step)
    model.train_function = lambda iterator: step(iterator)[0]
Trainer.make_train_function = untimed
""",
    "jax": """
from keras.src.backend.jax.trainer import JAXTrainer as Trainer
ours = Trainer.make_train_function
Trainer.make_train_function = ours.__wrapped__
""",
}


@with_frameworks("tensorflow", "jax")
def test_timing_changes_no_number_and_no_log(
    cluster: nbdist.Cluster, sent_rows: SentRows, framework: str
) -> None:
    outcomes = []
    for before, timed in (("", True), (UNTIMED[framework], False)):
        cluster.run(MODEL + before + TRAINED)
        assert bool(sent_rows.column(0, "input_s")) is timed
        assert bool(sent_rows.column(0, "step_s"))
        sent_rows.rows.clear()
        pulled = cluster.pull(["outcome", "seen"])[0]
        assert pulled["seen"] == ["loss", "mae"]
        outcomes.append(pulled["outcome"])
    cluster.run("Trainer.make_train_function = ours")
    assert outcomes[0] == outcomes[1]


@with_frameworks("jax")
def test_epochs_continue_over_several_fits(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third fit continues the second through `initial_epoch`."""
    fits = ("epochs=2", "epochs=3", "initial_epoch=5, epochs=6", "initial_epoch=9, epochs=10")
    code = "".join(f"model.fit(Batches(0), {fit})\n" for fit in fits)
    run = cluster.run(f"{MODEL}model = build()\n{code}0")
    epochs = [m.epoch for m in run.metrics if m.rank == 0]
    assert epochs == [1, 2, 3, 4, 5, 6, 10]
    losses = [{**m.shared, **m.own}["loss"] for m in run.metrics if m.rank == 0]
    shown = [line for line in capsys.readouterr().out.splitlines() if "  loss" in line]
    assert [int(line.split()[1]) for line in shown] == epochs
    newest = nbdist.runs()[0]
    assert newest.history["loss"].shape == (2, len(epochs))
    np.testing.assert_array_equal(newest.history["loss"][0], losses)
    state = stored_runs(cluster.settings.runs_path)[0].state()
    assert (state.epochs, state.steps) == (10, 7 * STEPS)
    assert cluster.run(f"{MODEL}build().fit(Batches(0), epochs=1)\n0").metrics[0].epoch == 1


@with_frameworks("tensorflow")
@pytest.mark.full  # rare
def test_failed_fit_and_single_batches_leave_no_open_step(
    cluster: nbdist.Cluster, sent_rows: SentRows
) -> None:
    """A traced step waits for unfinished steps; these would never finish."""
    raising = (
        "class Raises(keras.callbacks.Callback):\n"
        "    def on_train_batch_begin(self, batch, logs=None):\n"
        f"        if batch == {STEPS} // 2:\n            raise ValueError('enough')\n"
        "model = build()\n"
    )
    with pytest.raises(nbdist.CellError, match="enough"):
        cluster.run(f"{MODEL}{raising}model.fit(Batches(0.02), callbacks=[Raises()], epochs=3)")
    sent_rows.rows.clear()
    single = "for number in range(3):\n    model.train_on_batch(*Batches(0)[number])\n"
    cluster.run(f"{single}model.fit(Batches(0.01), epochs=2, verbose=0);")
    assert sent_rows.column(0, "collective_s")
    assert max(sent_rows.column(0, "step_s")) < STEP_WAIT_S
