"""Steps of training loops that are wrong on parts of a batch, or that cannot be compiled.

The numbers are those of one device in each case: every worker then computes whole batches, or the
loop as written, and a warning says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import clusters, references
from tests.end_to_end.test_lifted_loops import COMPILED, SETUP, chosen, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        yield running


NORMALIZED = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
rows = rng.normal(size=(128, 8)).astype("float32")
labels = np.argmax(rows[:, :4], 1).astype("int32")
data = tf.data.Dataset.from_tensor_slices((rows, labels)).batch(32)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.ReLU()]
layers += [keras.layers.Dropout({rate}, seed=1)] * ({rate} > 0)
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)])
optimizer = keras.optimizers.{optimizer}
losses = []
"""
NORMALIZED_LOOP = """
for xb, yb in data:
    with tf.GradientTape() as tape:
        loss = loss_of(yb, model(xb, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    losses.append(float(loss))
outcome = losses
"""


@pytest.mark.full  # rare
@pytest.mark.parametrize(("optimizer", "rate"), [("SGD(0.1)", 0), ("Adam(0.01)", 0.3)])
def test_bias_before_a_normalization_is_rounding(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], optimizer: str, rate: float
) -> None:
    """Its gradient is zero but for rounding, which Adam makes a step of full size from."""
    setup = NORMALIZED.format(rate=rate, optimizer=optimizer)
    one = references.plainly({"own": setup + NORMALIZED_LOOP}, "tensorflow", "keras")["own"]
    cluster.run(setup)
    assert outcome(cluster, NORMALIZED_LOOP) == pytest.approx(one, rel=1e-5)
    output = capsys.readouterr()
    assert "on 2 replicas" in output.out
    assert "whole batches" not in output.out + output.err


BALANCED_LOSS = """
def loss_of(labels, logits):
    mean = tf.reduce_mean(tf.nn.softmax(logits), 0)
    entropy = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return tf.reduce_mean(entropy) + 0.02 * tf.reduce_sum(mean**2)

model.pop()
model.add(keras.layers.Dense(4))
"""


def test_small_term_over_the_whole_batch_is_found(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean over the batch is squared: each replica would square the mean of its own rows."""
    setup = NORMALIZED.format(rate=0.3, optimizer="SGD(0.1)") + BALANCED_LOSS
    one = references.plainly({"own": setup + NORMALIZED_LOOP}, "tensorflow", "keras")["own"]
    cluster.run(setup)
    assert outcome(cluster, NORMALIZED_LOOP) == pytest.approx(one, rel=1e-5)
    output = capsys.readouterr()
    assert "every worker computes whole batches" in output.out + output.err


FLOODED = """
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.abs(tf.reduce_mean((model(xb, training=True) - yb) ** 2) - 0.5)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
for _ in range(20):
    for xb, yb in data:
        losses.append(float(train_step(xb, yb)))
outcome = losses
"""


@pytest.mark.full  # worker/tensorflow/test_row_dataflow.py
def test_kink_of_the_mean_loss_is_found_before_it_matters(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of a batch are wrong only when their losses are on both sides of the kink."""
    one = references.plainly({"own": SETUP + FLOODED}, "tensorflow", "keras")["own"]
    cluster.run(SETUP)
    assert outcome(cluster, FLOODED) == pytest.approx(one, rel=1e-5, abs=1e-6)
    output = capsys.readouterr()
    text = output.out + output.err
    assert "the step applies `Abs` to a mean or sum" in text
    assert "on each" not in text
    assert "each replica" not in text


TRAIN = """
gradients = tape.gradient(loss, weights)
optimizer.apply_gradients(zip(gradients, weights))
losses.append(float(loss))
"""
STEP = (
    """
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
weights = model.trainable_variables
"""
    + TRAIN
)


def compiled_with(lines: str) -> str:
    """Return a compiled step with further lines at its end."""
    return COMPILED.replace("    return loss\n", f"{lines.strip(chr(10))}\n    return loss\n")


LOOPS = {
    "variables in a name of the loop": ("", STEP, "on 2 replicas"),
    "values of a step that functions read": (
        """
def report():
    losses.append(float(loss))
def is_done():
    return float(loss) < 0.5
"""
        + COMPILED,
        "loss = train_step(xb, yb)\nreport()\nif is_done():\n    break",
        "on 2 replicas",
    ),
    "value that the step reads by a function": (
        """
baseline = 0.0
def centered(errors):
    return tf.reduce_mean((errors - baseline) ** 2)
""",
        STEP.replace(
            "tf.reduce_mean((model(xb, training=True) - yb) ** 2)", "centered(model(xb) - yb)"
        )
        + "baseline = float(loss > 20.0)\n",
        "on 2 replicas",
    ),
    "logarithm in the tape": (
        "",
        STEP.replace("loss = tf.reduce_mean(", "loss = tf.reduce_mean(tf.math.log(1.0 + ").replace(
            "** 2)", "** 2))"
        ),
        "on 2 replicas",
    ),
    "number of rows in the tape, and a gradient in the call of the update": (
        "",
        """
with tf.GradientTape() as tape:
    loss = tf.reduce_sum((model(xb, training=True) - yb) ** 2) / len(xb)
weights = model.trainable_variables
optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
losses.append(float(loss))
""",
        "on 2 replicas",
    ),
    "gradients that are clipped by their norm": (
        """
@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
        loss += 0.01 * tf.add_n([tf.nn.l2_loss(w) for w in model.trainable_variables])
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss, norm
""",
        "loss, norm = train_step(xb, yb)\nlosses += [float(loss), float(norm)]\n",
        "on 2 replicas",
    ),
    "second update in every third step": (
        "steps = 0",
        STEP
        + """
if steps % 3 == 0:
    with tf.GradientTape() as tape:
        penalty = tf.reduce_mean(model(xb, training=True) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(penalty, weights), weights))
    losses.append(float(penalty))
steps += 1
losses.append(float(penalty))
""",
        "on 2 replicas",
    ),
    "tape that the loop deletes": (
        "",
        """
with tf.GradientTape(persistent=True) as tape:
    loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
gradients = tape.gradient(loss, model.trainable_variables)
slopes = tape.gradient(loss, model.trainable_variables[0])
del tape
optimizer.apply_gradients(zip(gradients, model.trainable_variables))
losses.append(float(loss) + float(tf.reduce_sum(slopes)))
""",
        "on 2 replicas",
    ),
    "flags of the rows": (
        "",
        STEP.replace("weights =", "large = tf.greater(xb[:, 0], 0.0)\nweights =")
        + "losses += large.numpy().tolist()\n",
        "on 2 replicas",
    ),
    "model that the step does not call": (
        """
class Trainer:
    def __init__(self):
        self.model, self.both = model, keras.Sequential([model])
    def train_step(self, xb, yb):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(xb, training=True) - yb) ** 2)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        return loss
trainer = Trainer()
""",
        "losses.append(float(trainer.train_step(xb, yb)))\n",
        "on 2 replicas",
    ),
    "large array that the loop changes in place": (
        """
bank = np.ones((1 << 14, 4), "float32")
def error(xb, yb):
    return tf.reduce_mean((model(xb, training=True) * tf.reduce_mean(bank) - yb) ** 2)
""",
        STEP.replace("tf.reduce_mean((model(xb, training=True) - yb) ** 2)", "error(xb, yb)")
        + "bank *= 0.9\n",
        "the step is compiled again for each value of `bank`",
    ),
    "gradient of an embedding": (
        """
layers = [keras.layers.Embedding(5, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
model = keras.Sequential(layers)
""",
        STEP.replace("model(xb", "model(tf.cast(tf.abs(xb), tf.int32)"),
        "on 2 replicas",
    ),
    "norm of the gradient of an embedding, after the update": (
        """
layers = [keras.layers.Embedding(5, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
model = keras.Sequential(layers)
""",
        STEP.replace("model(xb", "model(tf.cast(tf.abs(xb), tf.int32)")
        + "losses.append(float(tf.linalg.global_norm(gradients)))\n"
        + "losses.extend(gradients[0].indices.numpy().tolist())\n",
        "on 2 replicas",
    ),
    "flag of the batch": (
        "flags = []",
        STEP.replace("weights =", "large = tf.reduce_any(xb > 2.0)\nweights =")
        + "flags.append(bool(large))\nlosses.append(float(large))\n",
        "the step has a result that is true or false for all rows",
    ),
    "update inside of a condition": (
        """
count = tf.Variable(0)
@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    count.assign_add(1)
    if count % 2 == 0:
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
""",
        "losses.append(float(train_step(xb, yb)))\n",
        "an update is inside of an `if` on a tensor",
    ),
    "state of a recurrent layer": (
        """
cell, head = keras.layers.GRUCell(3), keras.layers.Dense(1)
state = tf.zeros((8, 3))
""",
        """
with tf.GradientTape() as tape:
    hidden, states = cell(xb, [state])
    loss = tf.reduce_mean((head(hidden) - yb) ** 2)
state = tf.stop_gradient(states[0])
weights = cell.trainable_variables + head.trainable_variables
"""
        + TRAIN,
        "every worker computes the whole loop as written, because nbdist cannot compile its step",
    ),
    "Python that the step calls": (
        """
rates = []
def schedule():
    rates.append(0.1 / (1 + len(rates)))
    return np.float32(rates[-1])
@tf.function
def train_step(xb, yb):
    rate = tf.ensure_shape(tf.numpy_function(schedule, [], tf.float32), ())
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
    weights = model.trainable_variables
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(rate * gradient)
    return loss
""",
        "losses.append(float(train_step(xb, yb)))\nlosses.append(len(rates))\n",
        "its step (it calls Python by tf.numpy_function, which each replica would do)",
    ),
    "print in a branch": (
        compiled_with("""
    if loss > 0.0:
        tf.print("loss", loss)
"""),
        "losses.append(float(train_step(xb, yb)))\n",
        "cannot compile its step (it prints by tf.print, which each replica would do)",
    ),
    "queue of rows": (
        """
queue, newest = tf.Variable(tf.zeros((64, 4))), tf.Variable(tf.zeros(4))
"""
        + compiled_with("""
    queue.assign(tf.concat([xb, queue[: -tf.shape(xb)[0]]], 0))
    newest.assign(xb[-1])
"""),
        """
losses.append(float(train_step(xb, yb)))
losses += queue.numpy().sum(1).tolist() + newest.numpy().tolist()
""",
        "every worker computes whole batches",
    ),
    "row in an update": (
        """
w = tf.Variable(tf.zeros((4, 1)))
@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((xb @ w - yb) ** 2)
    w.assign_sub(0.05 * tape.gradient(loss, w) + 0.05 * xb[0][:, None])
    return loss
""",
        "losses.append(float(train_step(xb, yb)))\n",
        "every worker computes whole batches",
    ),
    "summary in the step": (
        """
import tempfile
writer = tf.summary.create_file_writer(tempfile.mkdtemp())
"""
        + compiled_with("""
    with writer.as_default():
        tf.summary.scalar("loss", loss, step=0)
"""),
        "losses.append(float(train_step(xb, yb)))\n",
        "cannot compile its step (it writes a summary or a file, which each replica would do)",
    ),
    "array of a list": (
        "",
        "rows = xb.numpy().tolist()\n"
        + STEP.replace("model(xb", "model(np.array(rows, 'float32')"),
        "on 2 replicas",
    ),
    "tensors in the call of the step": (
        COMPILED,
        "rows = xb.numpy()\nlosses.append(float(train_step(tf.constant(rows), yb)))\n",
        "on 2 replicas",
    ),
    "indexes of rows that only the first part contains": (
        "",
        "indexes = np.arange(8)\n"
        + STEP.replace("model(xb, training=True) - yb", "model(tf.gather(xb, indexes)) - yb"),
        "because the step fails on a part of a batch: InvalidArgumentError: indices[0] = 4 is not",
    ),
    "draw in a function of a list": (
        "augment = [lambda x: x + rng.normal(size=x.shape).astype('float32')]\n",
        STEP.replace("model(xb", "model([each(xb) for each in augment][0]"),
        "cannot compile its step (it draws from a generator of NumPy",
    ),
    "weights that a layer assigns while it is built": (
        """
class Tied(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 1), initializer="zeros")
        self.w.assign(np.full(self.w.shape, 0.5))
    def call(self, x, training=False):
        return x @ self.w
model = keras.Sequential([Tied()])
""",
        STEP,
        "on 2 replicas",
    ),
    "ragged rows": (
        "",
        "ragged = tf.RaggedTensor.from_tensor(xb)\n"
        + STEP.replace("model(xb", "model(ragged.to_tensor()"),
        "the loop passes a RaggedTensor to the step",
    ),
}
"""Earlier cell, body of the loop, and part of a message."""


@pytest.mark.parametrize(
    "name",
    chosen(
        LOOPS,
        "number of rows in the tape, and a gradient in the call of the update",
        "gradients that are clipped by their norm",
        "flag of the batch",
        "update inside of a condition",
        "Python that the step calls",
        "queue of rows",
        "indexes of rows that only the first part contains",
        "draw in a function of a list",
        "weights that a layer assigns while it is built",
        "ragged rows",
    ),
)
def test_loop_has_the_numbers_of_one_device(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    first, body, message = LOOPS[name]
    loop = "for _ in range(2):\n  for xb, yb in data:\n    "
    loop += body.strip("\n").replace("\n", "\n    ") + "\noutcome = losses\n"
    eager = first.replace("@tf.function\n", "")
    one = references.plainly({"own": f"{SETUP}{eager}\n{loop}"}, "tensorflow", "keras")["own"]
    cluster.run(f"{SETUP}{first}")
    assert outcome(cluster, loop) == pytest.approx(one, rel=1e-5, abs=1e-6)
    output = capsys.readouterr()
    assert message in output.out + output.err


@pytest.mark.parametrize("last", [3, 9])  # without and with a trial after the smaller batch
def test_rows_after_a_smaller_batch_are_those_of_the_whole_batch(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], last: int
) -> None:
    first = """
data = tf.data.Dataset.from_tensor_slices((x[:40], y[:40])).batch(16)
w = tf.Variable(tf.zeros((4, 1)))
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        p = xb @ w
        loss = tf.reduce_mean((p - yb) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss, p
"""
    loop = f"""
for i, (xb, yb) in enumerate(data.repeat(4)):
    loss, p = train_step(xb, yb)
    losses.append(float(loss))
    if i == {last}:
        break
outcome = losses + p.numpy().ravel().tolist()
"""
    one = references.plainly({"own": f"{SETUP}{first}\n{loop}"}, "tensorflow", "keras")["own"]
    cluster.run(f"{SETUP}{first}")
    assert outcome(cluster, loop) == pytest.approx(one, rel=1e-5, abs=1e-6)
    output = capsys.readouterr()
    assert "on 2 replicas" in output.out
    assert "gives other numbers" not in output.err


@pytest.mark.parametrize(
    ("name", "message"),
    [("xb.shape[0]", "on 2 replicas"), ("0.1 * xb.shape[0]", "`n` depends on the number of rows")],
)
def test_numbers_of_python_in_the_step_are_those_of_the_whole_batch(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    first = """
data = tf.data.Dataset.from_tensor_slices((x[:40], y[:40])).batch(16)
v, w = tf.Variable(tf.zeros((4, 1))), tf.Variable(tf.zeros((4, 1)))
count, last = 0, None
"""
    loop = f"""
for i, (xb, yb) in enumerate(data):
    note = -1.0
    with tf.GradientTape() as tape:
        n = {name}
        loss = tf.reduce_sum((xb @ w - yb) ** 2) / n
    w.assign_sub(0.01 * tape.gradient(loss, w))
    if i % 2 == 0:
        rate = note = 0.25
    else:
        rate = 1.0
    with tf.GradientTape() as tape:
        other = tf.reduce_mean((xb @ v - yb) ** 2)
    v.assign_sub(0.1 * rate * tape.gradient(other, v))
    count += n
    losses += [float(loss), float(other), rate, note]
outcome = [*losses, count, n]
"""
    one = references.plainly({"own": f"{SETUP}{first}\n{loop}"}, "tensorflow", "keras")["own"]
    cluster.run(f"{SETUP}{first}")
    assert outcome(cluster, loop) == pytest.approx(one, rel=1e-5, abs=1e-6)
    output = capsys.readouterr()
    assert message in output.out + output.err


def test_function_keeps_no_trace_of_a_step(cluster: nbdist.Cluster) -> None:
    """nbdist traces the step without updates to create the variables of the optimizer."""
    first, body, _ = LOOPS["update inside of a condition"]
    loop = f"for xb, yb in data:\n    {body}"
    alone = "outcome = [float(train_step(x, y)) for _ in range(4)]\n"
    eager = first.replace("@tf.function\n", "")
    one = references.plainly({"own": f"{SETUP}{eager}\n{loop}{alone}"}, "tensorflow", "keras")
    cluster.run(f"{SETUP}{first}")
    cluster.run(loop)
    assert outcome(cluster, alone) == pytest.approx(one["own"], rel=1e-5)


NOISE = """
import numpy as np, tensorflow as tf, keras
keras.utils.set_random_seed(5)
rows = np.random.default_rng(0).random((128, 4)).astype("float32")
net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
adam = keras.optimizers.Adam(1e-2)
@tf.function
def noisy_step(x):
    with tf.GradientTape() as tape:
        code = net(x)
        noise = tf.random.normal(shape=tf.shape(code))
        loss = tf.reduce_mean((code + noise - x) ** 2)
    variables = net.trainable_variables
    adam.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss
for xb in tf.data.Dataset.from_tensor_slices(rows).batch(32):
    loss = noisy_step(xb)
"""


def test_draws_with_a_state_are_named_and_do_not_fail_the_trial(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(NOISE)
    text = capsys.readouterr()
    shown = text.out + text.err
    assert shown.count("an operation that has a state, such as `tf.random.normal`") == 1
    assert "16 on each" in shown
    assert "every worker computes whole batches" not in shown


COMPILED_EPOCH = """
@tf.function
def train_epoch(data):
    loss = 0.0
    for xb, yb in data:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
optimizer.build(model.trainable_variables)
outcome = [float(train_epoch(data)) for _ in range(2)]
"""


def test_compiled_loop_is_named(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """AutoGraph compiles the loop as written: nbdist cannot divide it."""
    setup = f"{SETUP}\nmodel.build((None, 4))"
    eager = COMPILED_EPOCH.replace("@tf.function\n", "")
    one = references.plainly({"own": f"{setup}{eager}"}, "tensorflow", "keras")["own"]
    cluster.run(setup)
    assert outcome(cluster, COMPILED_EPOCH) == pytest.approx(one, rel=1e-5)
    output = capsys.readouterr()
    assert "line 4: every worker computes all of it" in output.out + output.err
    assert "decorate its step instead" in output.out + output.err
