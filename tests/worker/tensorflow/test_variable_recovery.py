"""Recovery of TensorFlow objects after a cancelled collective."""

from __future__ import annotations

import ast
import os
import signal
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import Output, StepOptions
from tests import clusters
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.records import AnyEvent

RANKS = 2

MODEL = """
import numpy as np, tensorflow as tf, keras, time
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
y = x.sum(1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
constant = tf.constant([1.0, 2.0])
variable = tf.Variable(3.0)
ragged = tf.Variable([1.0], shape=[None])
ragged.assign([1.0, 2.0])
made = tf.data.Dataset.from_generator(lambda: iter(range(5)), output_types=tf.int32)
count = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [7]), -1)
generator = tf.random.Generator.from_seed(5)
mean = keras.metrics.Mean()
mean.update_state(4.0)
seeds = keras.random.SeedGenerator(9)
@tf.function
def doubled(value):
    return 2.0 * value * variable
before = float(doubled(1.0))
model = keras.Sequential([
    keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
"""
FIT = "first = model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0).history\n"
AGAIN = "history = model.fit(data, epochs=2, verbose=0).history\n"
STEP = """
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(batch[0], training=True) - batch[1]) ** 2)
gradients = tape.gradient(loss, model.trainable_variables)
model.optimizer.apply(gradients, model.trainable_variables)
loss
"""
STEPS = (
    """
for start in range(0, 96, 24):
    batch = x[start:start + 24], y[start:start + 24]
"""
    + "\n".join(f"    {line}" for line in STEP.strip().splitlines())
    + "\n"
)
OUTCOME = """
outcome = {
    "weights": [w.tolist() for w in model.get_weights()],
    "slots": [np.asarray(v).tolist() for v in model.optimizer.variables],
    "history": history,
    "evaluate": [float(v) for v in model.evaluate(data, verbose=0)],
}
"""


AWAIT = """
import os, pathlib, psutil, time
folder = pathlib.Path({folder!r})
(folder / f"pid-{{rank}}").write_text(str(os.getpid()))
def until_others_wait(bound_s=60.0):
    deadline, before, still = time.monotonic() + bound_s, None, 0
    while still < 8 and time.monotonic() < deadline:
        pids = [int((folder / f"pid-{{r}}").read_text()) for r in range(world_size) if r != rank]
        now = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
        still, before = (still + 1 if now == before else 0), now
        time.sleep(0.1)
    assert still == 8
"""
"""Code that blocks until the other ranks are idle: they wait in a collective."""


def failing_cell(where: str = "model.fit(x, y, batch_size=24, shuffle=False, verbose=0)") -> str:
    """Return a cell in which rank 1 raises while the others wait for it in a collective."""
    raises = "if rank == 1:\n    until_others_wait()\n    raise FileNotFoundError('data.csv')"
    return f"{raises}\n{where}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=RANKS, framework="tensorflow") as running:
        running.run(AWAIT.format(folder=str(tmp_path_factory.mktemp("pids"))))
        yield running


def assert_fails(
    cluster: nbdist.Cluster, cell: str, match: str = "FileNotFoundError on rank 1@"
) -> None:
    with pytest.raises(nbdist.CellError, match=match) as error:
        cluster.run(cell)
    assert not any("still running" in note for note in error.value.notes)


def assert_close(ours: Any, reference: Any) -> None:
    for key, expected in reference.items():
        for one, other in zip(_leaves(ours[key]), _leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=key)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    return [value] if not isinstance(value, list) else [x for v in value for x in _leaves(v)]


@cache
def references() -> dict[str, Any]:
    """Return the outcomes of one process."""
    programs = {
        "with steps": MODEL + FIT + AGAIN + STEPS + OUTCOME,
        "without steps": MODEL + FIT + AGAIN + OUTCOME,
    }
    return plainly(programs, "tensorflow", "keras")


def outcomes(cluster: nbdist.Cluster) -> list[Any]:
    return [objects["outcome"] for objects in cluster.pull(["outcome"]).values()]


def same(cluster: nbdist.Cluster, expression: str) -> str:
    """Return the result that all ranks show for an expression."""
    (value,) = set(cluster.run(expression).results.values())
    return value


def test_training_continues_with_results_of_one_process(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three cells in a row fail on one rank. `fit` and a step cell continue with the objects."""
    cluster.run(MODEL + FIT)
    ids = cluster.run("id(model), id(strategy), id(model.optimizer)").results
    for _ in range(3):
        assert_fails(cluster, failing_cell())
    cluster.run(AGAIN)
    assert "collectives restored" in capsys.readouterr().out
    cluster.run(STEP, step=StepOptions(data="data"))
    cluster.run(OUTCOME)
    for outcome in outcomes(cluster):
        assert_close(outcome, references()["with steps"])
    assert cluster.run("id(model), id(strategy), id(model.optimizer)").results == ids


def test_other_objects_are_kept(cluster: nbdist.Cluster) -> None:
    cluster.run(MODEL)
    assert_fails(cluster, failing_cell())
    for expression, shown in (
        ("variable.numpy().item(), doubled(1.0).numpy().item()", "(3.0, 6.0)"),
        ("constant.numpy().tolist()", "[1.0, 2.0]"),
        ("int(table.lookup(tf.constant('a')))", "7"),
        ("float(mean.result())", f"{4.0}"),
        ("sum(1 for _ in data), sum(1 for _ in made)", "(4, 5)"),
        ("ragged.numpy().tolist()", "[1.0, 2.0]"),
        ("seeds.state.numpy().tolist(), generator.state.numpy().tolist()", "([9, 0], [5, 0, 0])"),
        ("tf.Variable(variable + 1.0).numpy().item()", "4.0"),
    ):
        assert same(cluster, expression) == shown


OWN_STEP = """
statistic = keras.Variable(0.0, trainable=False)
@tf.function
def own_step():
    def on_replica():
        statistic.assign(statistic + 1.0)
        drawn = keras.random.uniform((), seed=seeds)
        return tf.distribute.get_replica_context().all_reduce("SUM", drawn)
    return strategy.run(on_replica)
"""


def test_partial_step_is_undone(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has drawn a number and updated a statistic in a cancelled step."""
    cluster.run(MODEL + OWN_STEP)
    cluster.run("own_step();")
    assert_fails(cluster, failing_cell("own_step()"))
    assert same(cluster, "seeds.state.numpy().tolist()") == "[9, 1]"
    assert same(cluster, "float(statistic.numpy())") == f"{1.0}"
    output = capsys.readouterr().out
    assert "set to the values of rank 1, because another rank was within a step" in output
    cluster.run("own_step();")
    assert same(cluster, "seeds.state.numpy().tolist()") == "[9, 2]"


LAZY = """
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
"""


@pytest.mark.parametrize("lazily", [pytest.param(False, marks=pytest.mark.full), True])
def test_objects_built_by_one_rank_are_rebuilt(cluster: nbdist.Cluster, lazily: bool) -> None:
    """Test an optimizer, and a whole model, that was cancelled in `fit`."""
    cluster.run(MODEL + LAZY * lazily)
    assert_fails(cluster, failing_cell())
    cluster.run("model.fit(data, verbose=0)")
    assert same(
        cluster, "len(model.optimizer.variables), int(model.optimizer.iterations.numpy())"
    ) == ("(10, 4)")


@pytest.mark.full  # rare
def test_partial_objects_are_ignored(cluster: nbdist.Cluster) -> None:
    """Rank 0 is cancelled while it creates them, and keeps the existing parts."""
    cluster.run(MODEL)
    for creates in (
        "model.compile(keras.optimizers.Adam())",
        "keras.random.SeedGenerator(1)",
        "tf.random.Generator.from_seed(1)",
        "keras.layers.Dense(3).build((None, 4))",
        "tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)",
    ):
        keeps = f"try:\n    {creates}\nexcept BaseException as error:\n    kept = error\n    raise"
        assert_fails(cluster, failing_cell(keeps))
        assert same(cluster, "seeds.state.numpy().tolist()") == "[9, 0]"
    cluster.run("model.fit(data, verbose=0)")


def test_objects_of_one_rank_are_named(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(MODEL)
    cluster.run("iterator = iter(data)\nnext(iterator);")
    with pytest.raises(nbdist.CellError, match="ValueError on rank 1@"):
        cluster.run(
            "left = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)\n"
            "if rank == 1:\n    del left\n    until_others_wait()\n    raise ValueError\n"
            "model.fit(x, y, verbose=0)"
        )
    cluster.run("None")
    output = capsys.readouterr().out
    assert "only rank 0 has all variables of `left`" in output
    assert "iterators may be at another element on each rank (`iterator`)" in output
    assert "run cell [" in output


def test_stopping_a_hang_keeps_the_state(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(MODEL + FIT)
    deliver = cluster._worker_group.receiver.subscribers.deliver

    def interrupt_when_hanging(record: AnyEvent) -> None:
        deliver(record)
        if isinstance(record, Output) and "hanging" in record.text:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(
            cluster._worker_group.receiver.subscribers, "deliver", interrupt_when_hanging
        )
        hangs = (
            "if rank == 1:\n    until_others_wait()\n    print('hanging', flush=True)\n"
            "    time.sleep(600)\nmodel.fit(data)"
        )
        with pytest.raises(KeyboardInterrupt):
            cluster.run(hangs)
    cluster.run(AGAIN + OUTCOME)
    for outcome in outcomes(cluster):
        assert_close(outcome, references()["without steps"])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        pytest.param(
            *("raise ValueError('while it is traced')", "ValueError on rank"),
            marks=pytest.mark.full,
        ),
        ("if rank == 1:\n    raise ValueError('while it is traced')", "ValueError on rank 1@"),
        pytest.param(
            *("raise_nothing = batch[0]\nraise_nothing", "StepError on rank"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_refusal_during_tracing_keeps_the_state(
    cluster: nbdist.Cluster, body: str, error: str
) -> None:
    cluster.run(MODEL)
    cluster.run(STEP, step=StepOptions(data="data", steps=2))
    with pytest.raises(nbdist.CellError, match=error):
        cluster.run(STEP + body, step=StepOptions(data="data"))
    assert same(cluster, "int(model.optimizer.iterations.numpy())") == "2"
    cluster.run(STEP, step=StepOptions(data="data", steps=2))
    assert same(cluster, "int(model.optimizer.iterations.numpy())") == "4"


DROPOUT = """
def made():
    one = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=1),
        keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    inner = keras.optimizers.Adam(0.01, clipnorm=1.0)
    one.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse", metrics=["mae"])
    return one
def fitted(one, **options):
    return one.fit(x, y, batch_size=24, shuffle=False, verbose=0, **options).history
class Bug(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and rank == 1:
            until_others_wait()
            raise FileNotFoundError("data.csv")
model, twin = made(), made()
for one, other in zip(model.variables, twin.variables):
    other.assign(one)
fitted(model), fitted(twin);
"""


@pytest.mark.full
def test_four_ranks_continue_as_if_nothing_had_failed(tmp_path: Path) -> None:
    """Test dropout, batch normalization and a scaled loss, against a model that never failed."""
    with clusters.cluster(hosts=4, framework="tensorflow") as cluster:
        cluster.run(AWAIT.format(folder=str(tmp_path)))
        cluster.run(MODEL + DROPOUT)
        for _ in range(2):
            assert_fails(cluster, "fitted(model, callbacks=[Bug()])")
            cluster.run("fitted(twin);")
        cluster.run("outcome = [fitted(one, epochs=2) for one in (model, twin)]")
        for ours, theirs in outcomes(cluster):
            assert_close(ours, theirs)
        equal = "[np.allclose(a, b, atol=1e-6) for a, b in zip(model.get_weights(), {})]"
        assert same(cluster, f"all({equal.format('twin.get_weights()')})") == "True"


@pytest.mark.full
def test_twenty_cancelled_cells_leave_nothing_behind(cluster: nbdist.Cluster) -> None:
    cluster.run(MODEL)
    count = "len(os.listdir('/proc/self/task')), psutil.Process().memory_info().rss >> 20"
    found = []
    for _ in range(20):
        assert_fails(
            cluster,
            failing_cell("strategy.reduce('SUM', strategy.run(lambda: tf.ones(())), axis=None)"),
        )
        results = cluster.run(count).results
        found.append([n for rank in sorted(results) for n in ast.literal_eval(results[rank])])
    spare = (8, 20) * RANKS  # pool threads start and end
    assert all(
        late <= early + more for early, late, more in zip(found[2], found[-1], spare, strict=True)
    ), found
