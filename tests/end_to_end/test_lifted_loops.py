"""Training loops of plain cells run on all replicas, with the numbers of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import CellError
from nbdist.records import Saving, StepOptions
from nbdist.worker.checkpoint.folder import steps_in
from tests import clusters, references
from tests.runs import latest, plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import nbdist

SETUP = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(2)
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x @ np.arange(4.0)[:, None]).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.05)
mean = keras.metrics.Mean()
losses, epochs = [], []
"""
LOOP = """
for epoch in range(3):
    for step, (xb, yb) in enumerate(data):
        with tf.GradientTape() as tape:
            predicted = model(xb, training=True)
            loss = tf.reduce_mean((predicted - yb) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(loss)
        losses.append(float(loss))
    epochs.append(float(mean.result()))
"""
OUTCOME = """
outcome = [losses, epochs, predicted.shape.as_list(), float(loss), step,
           [w.tolist() for w in model.get_weights()]]
"""
OPTIMIZERS = {
    "sgd": "optimizer = keras.optimizers.SGD(0.05, momentum=0.9)",
    "adam": "optimizer = keras.optimizers.Adam(0.05)",
}
CONDITION = """
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
        if optimizer.iterations < 2:
            loss = 3 * loss
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
for xb, yb in data:
    losses.append(float(train_step(xb, yb)))
outcome = losses
"""
COMPILED = """
@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


def expected(program: str) -> Any:
    """Return the outcome of a program in one process."""
    return references.plainly({"own": SETUP + program}, "tensorflow", "keras")["own"]


def chosen(names: Iterable[str], *kept: str) -> list[Any]:
    """Return parameters for all names. Those that are not in `kept` have the mark `full`."""
    return [n if n in kept else pytest.param(n, marks=pytest.mark.full) for n in names]


def outcome(cluster: nbdist.Cluster, cell: str) -> Any:
    """Run a cell that assigns `outcome`, and return it; it must be equal on all ranks."""
    cluster.run(cell)
    own, *others = (values["outcome"] for values in cluster.pull(["outcome"]).values())
    assert all(other == own for other in others)
    return own


def test_loop_has_the_numbers_of_one_device(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    run = cluster.run(LOOP)
    out = capsys.readouterr().out
    assert "`enumerate(data)` on 2 replicas, 8 samples a batch, 4 on each" in out
    assert len(run.loss) == 15, "one value for each step"
    for actual, one in zip(outcome(cluster, OUTCOME), expected(LOOP + OUTCOME), strict=True):
        for a, b in zip(*(_arrays(value) for value in (actual, one)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _arrays(value: Any) -> list[Any]:
    return [np.asarray(part) for part in value] if isinstance(value, list) else [value]


GRAPH_ERROR = """
m = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(4, 2), keras.layers.Flatten()])
m.compile("sgd", "mse")
m.fit(np.full((6, 1), 9), np.zeros((6, 2)), verbose=0)
"""
SUM = """
for xb, yb in data:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(xb, training=True) - yb) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    losses.append(float(loss))
"""
SUM_OUTCOME = "outcome = [losses, [w.tolist() for w in model.get_weights()]]"


def test_conditions_on_tensors_in_functions_are_converted_before_variables_exist(
    cluster: nbdist.Cluster,
) -> None:
    """The first trace of a step, which creates the variables, needs AutoGraph too."""
    actual = outcome(cluster, SETUP + CONDITION)
    np.testing.assert_allclose(actual, expected(CONDITION), rtol=1e-5)


def test_traceback_of_a_compiled_step_ends_in_the_users_code(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + COMPILED)
    with pytest.raises(CellError) as error:
        cluster.run("for xb, yb in data:\n    loss = train_step(xb, missing)")
    shown = plain("\n".join(error.value._render_traceback_()))
    assert "missing" in shown
    assert "autograph_generated" not in shown
    assert "nbdist/worker" not in shown


@pytest.mark.full  # tests/utils/test_error_text.py
def test_error_of_a_graph_is_shown_once_without_frames_of_libraries(
    cluster: nbdist.Cluster,
) -> None:
    with pytest.raises(CellError) as error:
        cluster.run(GRAPH_ERROR, label=9)
    shown = plain("\n".join(error.value._render_traceback_()))
    assert shown.count("= 9 is not in [0, 4)") == 1
    assert "site-packages" not in shown
    assert "nbdist/worker" not in shown
    assert "m.fit(" in shown
    assert f"raised on rank {error.value.rank}@" in shown
    summary, _, whole = latest(cluster).state().error.partition("\n\n")
    assert "is not in [0, 4)" in summary
    assert whole.startswith("Graph execution error:")


@pytest.mark.full  # the next two tests
def test_step_that_sums_over_the_batch_computes_whole_batches(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cluster.run(SUM)
    text = capsys.readouterr()
    assert "line 1: every worker computes whole batches" in text.out + text.err
    losses, weights = outcome(cluster, SUM_OUTCOME)
    np.testing.assert_allclose(losses, expected(SUM + SUM_OUTCOME)[0], rtol=1e-5)
    for a, b in zip(weights, expected(SUM + SUM_OUTCOME)[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_check_compares_the_first_step_of_a_loop(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP)
    with pytest.raises(CellError, match=r"most of all .* nothing was trained"):
        cluster.run(SUM, check=True)
    cluster.run(SETUP)
    run = cluster.run(LOOP, check=True)
    assert run.checked is not None
    assert all(difference.passes for difference in run.checked.differences)
    weights = outcome(cluster, OUTCOME)[-1]
    for a, b in zip(weights, expected(LOOP + OUTCOME)[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


ONES = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
ones = tf.data.Dataset.from_tensor_slices(np.ones((256, 4), "float32")).batch(64)
w = tf.Variable(1.0)
seen = []
"""
MASKED = """
import keras, numpy as np, tensorflow as tf
values = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
mask = np.ones((64, 5), "float32")
mask[16:24, 1:] = 0  # the padding begins in the second batch
masked = tf.data.Dataset.from_tensor_slices((values, mask)).batch(16)
w = tf.Variable(1.0)
optimizer = keras.optimizers.SGD(0.1)
for a, m in masked:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((w * a - 1.0) ** 2 * m) / tf.reduce_sum(m)
    optimizer.apply_gradients(zip(tape.gradient(loss, [w]), [w]))
outcome = float(w)
"""
DIFFICULT = {
    "a sum over the batch, beside random numbers": (
        ONES
        + """
optimizer = keras.optimizers.SGD(0.0)
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        noise = tf.random.normal(tf.shape(x))
        loss = tf.reduce_sum(w * (x + 1e-6 * noise))
    g = tape.gradient(loss, [w])
    optimizer.apply_gradients(zip(g, [w]))
    return g[0]
for x in ones:
    g = step(x)
    seen.append(float(g))
outcome = seen[-1]
""",
        256.0,
    ),
    "random numbers for a fixed number of rows": (
        ONES
        + """
optimizer = keras.optimizers.SGD(1e-6)
for x in ones:
    with tf.GradientTape() as tape:
        made = tf.concat([1e-6 * tf.random.normal((64, 4)), x], 0)
        loss = tf.reduce_mean(w * made)
    (g,) = tape.gradient(loss, [w])
    optimizer.apply_gradients([(g, w)])
outcome = float(g)
""",
        0.5,
    ),
    "a learning rate of zero in the first step": (
        ONES
        + """
optimizer = keras.optimizers.SGD(
    keras.optimizers.schedules.CosineDecay(0.0, 1000, warmup_target=1e-2, warmup_steps=10)
)
for x in ones.repeat(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w * x)
    optimizer.apply_gradients(zip(tape.gradient(loss, [w]), [w]))
outcome = float(w)
""",
        1 - 256 * sum(1e-2 * min(1, i / 10) for i in range(12)),
    ),
    "a mask that is unequal from the second batch on": (MASKED, 0.35135347),
}
"""Loops whose step is wrong on parts of a batch, and their outcome on one device."""


@pytest.mark.parametrize(
    "name",
    chosen(
        DIFFICULT,
        "a sum over the batch, beside random numbers",
        "a mask that is unequal from the second batch on",
    ),
)
def test_step_that_is_wrong_on_parts_of_a_batch_is_found(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    cell, expected = DIFFICULT[name]
    np.testing.assert_allclose(outcome(cluster, cell), expected, rtol=1e-4)
    printed = capsys.readouterr()
    assert "every worker computes whole batches" in printed.out + printed.err


def test_reported_sum_is_that_of_the_batch(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP)
    run = cluster.run("""
for xb, yb in data:
    with tf.GradientTape() as tape:
        squares = (model(xb, training=True) - yb) ** 2
        total = tf.reduce_sum(squares)
        loss = tf.reduce_mean(squares)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    losses.append(float(total))
""")
    reported = np.mean(
        [[m.own["total"] for m in run.metrics if m.rank == r and m.step > 0] for r in range(2)],
        axis=0,
    )
    np.testing.assert_allclose(outcome(cluster, "outcome = losses"), reported, rtol=1e-5)


def test_metric_that_each_epoch_creates_needs_no_new_step(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = """
from nbdist.worker.tensorflow.loop_trials import LoopTrials
from nbdist.worker.tensorflow.lifted_step import MirroredLoopStep
made, begin = [], MirroredLoopStep.__init__
MirroredLoopStep.__init__ = lambda *given: (made.append(0), begin(*given))[1]
tried, upstream = [], LoopTrials._wrong
LoopTrials._wrong = lambda *given: (tried.append(given[2].rows), upstream(*given))[1]
try:
    for epoch in range(6):
        mean = keras.metrics.Mean()
        for xb, yb in data.take(1):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            mean.update_state(loss)
        epochs.append(float(mean.result()))
finally:
    LoopTrials._wrong, MirroredLoopStep.__init__ = upstream, begin
outcome = [len(tried), len(made), epochs]
"""
    cluster.run(SETUP)
    capsys.readouterr()
    trials, compilations, epochs = outcome(cluster, cell)
    assert trials == 4, "batches 1, 2, 3 and 5"
    assert compilations == 1
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("too few for good performance") == 1
    assert epochs == sorted(epochs, reverse=True)


def test_batch_that_does_not_divide_is_noted(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP.replace("batch(8)", "batch(5)"))
    cluster.run(LOOP)
    text = "one of 5 rows does not divide over 2 replicas"
    assert text in capsys.readouterr().out


def test_users_compiled_function_is_traced_into_a_step_cell(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + COMPILED)
    cluster.run("model(x[:1])")
    step = StepOptions(data="data", epochs=3)
    run = cluster.run("xb, yb = batch\nloss = train_step(xb, yb)\nloss", step=step)
    reported = references.reported(run)["loss"]
    np.testing.assert_allclose(reported, expected(LOOP + OUTCOME)[0], rtol=1e-5)


@pytest.mark.parametrize("rule", chosen(OPTIMIZERS, "adam"))
def test_loop_without_lifting_has_the_numbers_of_one_device(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    optimizer, loop = OPTIMIZERS[rule], LOOP.replace("range(3)", "range(1)")
    cluster.run(SETUP + optimizer)
    cluster.run(loop, no_lift=True)
    one_device = expected(optimizer + loop + OUTCOME)
    for actual, one in zip(outcome(cluster, OUTCOME), one_device, strict=True):
        for a, b in zip(*(_arrays(value) for value in (actual, one)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    text = capsys.readouterr()
    assert "line 2" not in text.out + text.err, "the user has asked for the loop as written"


PARTS = """
class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encode = keras.Sequential([keras.layers.Dense(3, activation="tanh")])
        self.decode = keras.Sequential([keras.layers.Dense(4)])
model = Autoencoder()
for xb, yb in data:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model.decode(model.encode(xb)) - xb) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    losses.append(float(loss))
outcome = losses
"""


@pytest.mark.full  # rare
def test_step_calls_the_parts_of_a_model_without_call(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    np.testing.assert_allclose(outcome(cluster, PARTS), expected(PARTS), rtol=1e-5)
    assert "steps over `data` on 2 replicas" in capsys.readouterr().out


CHANGING = """
beta, filled = 0.0, np.zeros(2, "float32")
class Trainer:
    weight = 0.0
    def step(self, xb, yb):
        with tf.GradientTape() as tape:
            predicted = model(xb, training=True)
            loss = tf.reduce_mean((predicted - yb) ** 2) + penalty(predicted) * self.weight
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        self.mean.update_state(loss)
        return loss
    def fit(self):
        global beta
        for epoch in range(3):
            beta, self.weight = epoch * 0.5, 1.0 + epoch % 2
            filled[0] = 0.1 * epoch
            self.mean = keras.metrics.Mean()
            model.layers[0].trainable = epoch < 2
            for xb, yb in data.take(2):
                loss = self.step(xb, yb)
                losses.append(float(loss))
            epochs.append(float(self.mean.result()))
def penalty(predicted):
    return (beta + filled[0]) * tf.reduce_mean(predicted ** 2)
Trainer().fit()
outcome = [losses, epochs]
"""


def test_values_that_called_functions_read_may_change(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster.run(SETUP)
    cluster.run(CHANGING, saving=Saving(folder=str(tmp_path / "run"), every_steps=2))
    assert steps_in(tmp_path / "run")[-1] >= 4, "a step that is compiled again is saved too"
    for actual, one in zip(outcome(cluster, "outcome"), expected(CHANGING), strict=True):
        np.testing.assert_allclose(actual, one, rtol=1e-5)
    assert "the step is compiled again for each value of" in capsys.readouterr().out


VECTORS = """
total, counts = tf.zeros(2), tf.zeros([2], tf.int32)
for step, (xb, yb) in enumerate(data):
    with tf.GradientTape() as tape:
        predicted = model(xb, training=True)
        loss = tf.reduce_mean((predicted - yb) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    total = total + tf.stack([loss, tf.cast(step, tf.float32)])
    near = tf.reduce_sum(tf.cast(tf.abs(predicted - yb) < 2.0, tf.int32))
    losses.append([float(loss), int(near), predicted.shape[0]])
outcome = [losses, total.numpy().tolist(), [g.numpy().tolist() for g in gradients]]
"""


def test_values_other_than_scalars_are_those_of_all_replicas(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Vectors that the loop carries, counts, and a gradient with as many rows as a replica."""
    cluster.run(SETUP)
    losses, total, gradients = outcome(cluster, VECTORS)
    out = capsys.readouterr().out
    assert "`enumerate(data)` on 2 replicas" in out
    assert "whole batches" not in out
    np.testing.assert_allclose(losses, expected(VECTORS)[0], rtol=1e-5)
    np.testing.assert_allclose(total, expected(VECTORS)[1], rtol=1e-5)
    for a, b in zip(gradients, expected(VECTORS)[2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


ROWS = """
seen = []
for epoch in range(3):
    rate = 0.5 + epoch
    for xb, yb in data:
        with tf.GradientTape() as tape:
            predicted = model(xb, training=True)
            loss = rate * tf.reduce_mean((predicted - yb) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        seen.append(predicted.numpy().tolist())
outcome = seen
"""


def test_rows_are_those_of_the_batch_after_a_value_has_changed(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is compiled again for each value of `rate`, without another trial."""
    cluster.run(SETUP)
    seen = outcome(cluster, ROWS)
    assert "whole batches" not in capsys.readouterr().out
    for actual, one in zip(seen, expected(ROWS), strict=True):
        np.testing.assert_allclose(actual, one, rtol=1e-4, atol=1e-5)


SALIENCY = """
maps = []
model(x[:1])
for xb, yb in data:
    xb = tf.convert_to_tensor(xb)
    with tf.GradientTape() as tape:
        tape.watch(xb)
        loss = tf.reduce_mean((model(xb) - yb) ** 2)
    slope = tape.gradient(loss, xb)
    maps.append(slope.numpy().tolist())
outcome = maps
"""


def test_gradients_of_the_batch_are_those_of_one_device(cluster: nbdist.Cluster) -> None:
    """The loss of a part is the mean over its rows: their gradients are larger than in a batch."""
    cluster.run(SETUP)
    for a, b in zip(outcome(cluster, SALIENCY), expected(SALIENCY), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_loop_that_cannot_be_divided_runs_as_written_with_one_warning(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP)
    cluster.run(LOOP.replace("        gradients =", "            print(loss)\n        gradients ="))
    text = capsys.readouterr()
    lines = [line for line in (text.out + text.err).splitlines() if "line 6: `print(loss)`" in line]
    assert len(lines) == 1
    assert "move it after that. Every worker computes the whole loop; to divide it" in lines[0]
    for actual, one in zip(outcome(cluster, OUTCOME), expected(LOOP + OUTCOME), strict=True):
        for a, b in zip(*(_arrays(value) for value in (actual, one)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


STOPPED_AFTER = 60
"""Step of the interrupt. By then, the notebook knows that the cell has steps."""

ENDLESS = """
count = 0
while True:
    for xb, yb in data:
        loss = train_step(xb, yb)
        count += 1
"""


@pytest.mark.full  # the same under pjrt
def test_interrupt_ends_the_loop_after_the_same_step(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(SETUP + COMPILED)
    clusters.interrupt_after(cluster, monkeypatch, STOPPED_AFTER)
    with clusters.bounded(60), pytest.raises(KeyboardInterrupt):
        cluster.run(ENDLESS)
    iterations = outcome(cluster, "outcome = [count, int(optimizer.iterations)]")
    assert iterations[0] == iterations[1] > 0
    run = cluster.run("for xb, yb in data:\n    loss = train_step(xb, yb)")
    assert len(run.loss) == 5, "the next cell trains"


@pytest.mark.full  # test_resumed_loops.py
def test_loop_resumes_from_its_checkpoint(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """The first run fails in the second epoch; the second one continues behind its checkpoint."""
    cluster.run(SETUP)
    failing = LOOP.replace("    epochs.append", "    1 / (1 - epoch)\n    epochs.append")
    saving = Saving(folder=str(tmp_path / "run"), every_steps=4)
    with pytest.raises(CellError, match="ZeroDivisionError"):
        cluster.run(failing, saving=saving)
    cluster.run(SETUP)
    cluster.run(LOOP, saving=Saving(folder=saving.folder, every_steps=4, resume=True))
    assert len(outcome(cluster, "outcome = losses")) == 15
    weights = outcome(cluster, OUTCOME)[-1]
    for a, b in zip(weights, expected(LOOP + OUTCOME)[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
