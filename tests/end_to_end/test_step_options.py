"""Options of step cells: checks, precision, scaled learning rates, stops at nan."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import StepOptions
from tests.runs import latest

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 96
DATA = """
import numpy as np
from sklearn.datasets import load_digits
digits = load_digits()
images, labels = digits.data[:1001] / 16, digits.target[:1001]
train = images, labels
"""
MODEL = """
import keras, tensorflow as tf
keras.backend.set_floatx("float64")
keras.config.set_dtype_policy("float64")  # floatx alone is not enough
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(24, activation="tanh"),
                          keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
FLOAT32 = MODEL.replace("float64", "float32")
STEP = """
x, y = batch
with tf.GradientTape() as tape:
    loss = loss_of(y, model(x, training=True))
gradients = tape.gradient(loss, model.trainable_variables)
optimizer.apply(gradients, model.trainable_variables)
"""
SPOILED = STEP.replace(
    "\ngradients = tape.gradient(loss,",
    "\n    spoiled = loss * FACTOR\ngradients = tape.gradient(spoiled,",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Cluster with the default XLA optimizations."""
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    with nbdist.Cluster(hosts=2, env=optimized) as running:
        running.run(DATA)
        yield running


def step(
    cluster: nbdist.Cluster, cell: str, strategy: str = "mirrored", **options: Any
) -> nbdist.Run:
    precision = options.pop("precision", None)
    chosen = StepOptions(**{"data": "train", "batch": BATCH, **options})
    return cluster.run(cell, step=chosen, strategy=strategy, precision=precision)


def weights(cluster: nbdist.Cluster) -> list[np.ndarray]:
    cluster.run("weights = model.get_weights()")
    first, *others = (o["weights"] for o in cluster.pull(["weights"]).values())
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
    return list(first)


class TestCheck:
    """`--check` compares the first step on one replica with the step on all replicas."""

    def test_correct_step_passes_and_the_run_is_unchanged(
        self, cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.run(MODEL)
        plain = step(cluster, STEP), weights(cluster)
        cluster.run(MODEL)
        checked = step(cluster, STEP, check=True), weights(cluster)
        np.testing.assert_array_equal(plain[0].loss, checked[0].loss)
        for a, b in zip(plain[1], checked[1], strict=True):
            np.testing.assert_array_equal(a, b)
        found = checked[0].checked
        assert found is not None
        assert all(d.passes and d.largest < 1e-9 for d in found.differences)
        assert {"loss", "model: sequential/dense/kernel"} <= {d.name for d in found.differences} | {
            re.sub(r"_\d+", "", d.name) for d in found.differences
        }
        assert "on one replica and on 2: the same" in capsys.readouterr().out

    @pytest.mark.parametrize("setup", [MODEL, pytest.param(FLOAT32, marks=pytest.mark.full)])
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                "loss = loss_of(y, model(x, training=True))",
                "loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))",
                "2 times too small.*Take the mean",
            ),
            pytest.param(
                "optimizer.apply(",
                (
                    "gradients = tf.distribute.get_replica_context().all_reduce('SUM', gradients)\n"
                    "optimizer.apply("
                ),
                "2 times too large.*averaged",
                marks=pytest.mark.full,
            ),
            pytest.param(
                "loss = loss_of(y, model(x, training=True))",
                "loss = loss_of(y, model(tf.random.shuffle(x)))",
                "depends on the order of the rows.*tf.random.stateless_",
                marks=pytest.mark.full,
            ),
        ],  # test_parity.py covers all causes
        ids=["sum over the batch", "summed gradients", "shuffled rows"],
    )
    def test_common_mistake_is_named_before_training(
        self, cluster: nbdist.Cluster, setup: str, old: str, new: str, message: str
    ) -> None:
        cluster.run(setup)
        before = weights(cluster)
        assert old in STEP
        with pytest.raises(
            nbdist.CellError, match=rf"(?s)--check: .* nothing was trained.*{message}"
        ):
            step(cluster, STEP.replace(old, new), check=True)
        for a, b in zip(before, weights(cluster), strict=True):
            np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize(
        "dropped",
        [
            pytest.param("tf.nn.dropout(x, 0.3)", marks=pytest.mark.full),
            "drop(x, training=True)",
        ],
    )
    def test_dropout_equals_that_of_one_replica(
        self, cluster: nbdist.Cluster, dropped: str
    ) -> None:
        """The random numbers of a row do not depend on the replica that computes it."""
        cluster.run(MODEL + "drop = keras.layers.Dropout(0.3, seed=5)\n")
        cell = STEP.replace("model(x, training=True)", f"model({dropped})")
        assert cell != STEP
        found = step(cluster, cell, check=True).checked
        assert found is not None
        assert all(d.passes for d in found.differences)

    @pytest.mark.full  # test_parity.py covers this cause
    def test_missing_reduction_is_named(self, cluster: nbdist.Cluster) -> None:
        cluster.run(
            MODEL + "seen = tf.Variable(0.0, trainable=False, dtype='float64',\n"
            "    synchronization=tf.VariableSynchronization.ON_READ,\n"
            "    aggregation=tf.VariableAggregation.MEAN)"
        )
        with pytest.raises(
            nbdist.CellError, match="`seen` is computed from this replica's own rows only"
        ):
            step(cluster, STEP + "seen.assign(tf.reduce_mean(x))", check=True)

    @pytest.mark.full  # test_parity.py covers this cause
    def test_manual_batch_statistics_are_named(self, cluster: nbdist.Cluster) -> None:
        cluster.run(
            MODEL + "moving_mean = tf.Variable(tf.zeros(64, 'float64'), trainable=False,\n"
            "    aggregation=tf.VariableAggregation.MEAN)"
        )
        cell = STEP.replace(
            "loss = loss_of(y, model(x, training=True))",
            "mean, variance = tf.nn.moments(x, [0])\n"
            "    loss = loss_of(y, model((x - mean) / tf.sqrt(variance + 0.1)))",
        )
        with pytest.raises(nbdist.CellError, match="Statistics of a BatchNorm"):
            step(cluster, cell + "moving_mean.assign(mean**2)", check=True)


class TestPrecision:
    """`--precision` sets the compute type of layers; variables stay float32."""

    def test_layers_compute_in_the_precision_during_the_cell(self, cluster: nbdist.Cluster) -> None:
        cluster.run(FLOAT32)
        run = step(
            cluster,
            STEP + "{'loss': loss, 'bits': 8 * model(x).dtype.size}",
            precision="bfloat16",
            epochs=2,
        )
        assert run.last("bits") == 16
        assert run.loss[-1] < 0.8 * run.loss[0]
        expression = (
            "{l.compute_dtype for l in model.layers}, {str(v.dtype) for v in model.variables}"
        )
        assert set(cluster.run(expression).results.values()) == {"({'float32'}, {'float32'})"}

    def test_overflow_on_one_worker_is_skipped_on_all(self, cluster: nbdist.Cluster) -> None:
        """Replicas that decide separately would wait for each other forever."""
        cluster.run(
            FLOAT32 + "count = tf.Variable(0, trainable=False,"
            "aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)"
        )
        before = weights(cluster)
        cell = SPOILED.replace("FACTOR", "(1e38 if rank else 1.0)")
        run = step(cluster, cell, precision="float16", steps=3)
        assert np.isfinite(run.loss).all()
        for a, b in zip(before, weights(cluster), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_small_gradients_do_not_vanish_in_float16(self, cluster: nbdist.Cluster) -> None:
        """float16 has no values below 6e-8; loss scaling by 2**15 keeps smaller gradients."""
        cell = SPOILED.replace("FACTOR", "1e-7")
        cluster.run(FLOAT32)
        before = weights(cluster)
        step(
            cluster,
            cell.replace(
                "optimizer.apply(gradients,", "optimizer.apply([g * 1e7 for g in gradients],"
            ),
            precision="float16",
            steps=4,
        )
        after = weights(cluster)
        moved = np.abs(after[0] - before[0]).max()
        cluster.run(FLOAT32)
        step(cluster, STEP, steps=4)
        exact = np.abs(weights(cluster)[0] - before[0]).max()
        assert moved == pytest.approx(exact, rel=0.05)

    @pytest.mark.parametrize(
        "precision", [pytest.param("bfloat16", marks=pytest.mark.full), "float16"]
    )
    def test_fit_computes_in_the_precision(self, cluster: nbdist.Cluster, precision: str) -> None:
        """The finite check of Keras decides on each worker and deadlocks (docs/facts.md)."""
        cluster.run("keras.config.set_dtype_policy('float32')")
        cell = """
class Spoiled(keras.layers.Layer):
    def call(self, x):
        return x * tf.cast(1e30 if rank else 1.0, x.dtype)
spoiled = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10), Spoiled()])
spoiled.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
before = spoiled.get_weights()
history = spoiled.fit(images[:960], labels[:960], batch_size=96)
moved = any((a != b).any() for a, b in zip(before, spoiled.get_weights()))
spoiled.layers[0].compute_dtype, bool(moved)
"""
        run = cluster.run(cell, precision=precision)
        assert set(run.results.values()) == {f"('{precision}', {precision == 'bfloat16'})"}
        assert latest(cluster).state().hyperparameters == {
            "--precision": precision,
            "batch_size": 96,
            "optimizer": "SGD",
            "learning_rate": 0.01,
        }
        assert set(cluster.run("keras.config.dtype_policy().name").results.values()) == {
            "'float32'"
        }

    def test_pjrt_refuses_precision(self, cluster: nbdist.Cluster) -> None:
        with pytest.raises(nbdist.UsageError, match=r"cast them, as in x.astype"):
            step(cluster, "loss = batch[0].mean()", "pjrt", precision="float16")


class TestScope:
    """Errors before the first step name variables created outside of the strategy's scope."""

    @pytest.mark.parametrize("name", ["model", pytest.param("optimizer", marks=pytest.mark.full)])
    def test_object_created_outside_of_the_scope_is_refused(
        self, cluster: nbdist.Cluster, name: str
    ) -> None:
        cluster.run(MODEL)
        cluster.run(MODEL.replace("float64", "float64"), ranks="0")
        cluster.run(MODEL, ranks="1")
        if name == "optimizer":
            cluster.run("inside = None\n" + MODEL.split("optimizer =")[0])
        with pytest.raises(nbdist.CellError, match=rf"made outside of strategy.scope.*`{name}`"):
            step(cluster, STEP)
        assert cluster.run("1").results[0] == "1"

    @pytest.mark.full  # another variable outside of the scope
    def test_variables_of_a_function_are_checked(self, cluster: nbdist.Cluster) -> None:
        cluster.run(MODEL)
        for rank in ("0", "1"):
            cluster.run(
                "hidden = [tf.Variable(1.0)]\ndef use(x):\n    return x * hidden[0]", ranks=rank
            )
        with pytest.raises(nbdist.CellError, match=r"`hidden\[0\]`"):
            step(cluster, "loss = tf.reduce_mean(use(tf.cast(batch[0], 'float32')))")

    def test_model_without_variables_is_refused(self, cluster: nbdist.Cluster) -> None:
        cluster.run("import keras\nlazy = keras.Sequential([keras.layers.Dense(3)])")
        with pytest.raises(nbdist.CellError, match=r"no variables yet: `lazy` \(line 2\)"):
            step(cluster, "loss = tf.reduce_mean(lazy(batch[0]))")

    PAIR = """
class Pair(keras.Model):
    def __init__(self, *start):
        super().__init__()
        self.encode = keras.Sequential([*start, keras.layers.Dense(8)])
        self.decode = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64)])
"""

    @pytest.mark.full  # rare
    def test_model_without_call_trains_if_its_parts_have_variables(
        self, cluster: nbdist.Cluster
    ) -> None:
        cluster.run(
            MODEL.replace("optimizer.build(model.trainable_variables)", "")
            + self.PAIR
            + "model = Pair(keras.Input((64,)))"
        )
        body = STEP.replace("loss_of(y, model(x, training=True))", "tf.reduce_mean(decoded**2)")
        cell = body.replace(
            "    loss =", "    decoded = model.decode(model.encode(x)) - x\n    loss ="
        )
        losses = step(cluster, cell, steps=3).loss
        assert losses[2] < losses[0]

    @pytest.mark.full  # rare
    @pytest.mark.parametrize("made", ["Pair()", "Model()", "Own()"])
    def test_model_without_call_is_refused_without_variables(
        self, cluster: nbdist.Cluster, made: str
    ) -> None:
        own = """
class Own(Pair):
    def build(self, shape):
        self.scale = self.add_weight(shape=())
Model = keras.Model
"""
        made = made.replace("Own()", "Own(keras.Input((64,)))")
        cluster.run(MODEL + self.PAIR + own + f"lazy = {made}")
        with pytest.raises(nbdist.CellError, match="no variables yet: `lazy`"):
            step(cluster, "loss = tf.reduce_mean(lazy.encode(batch[0]))")

    @pytest.mark.full  # notebooks of test_notebooks_brought.py build no optimizers
    def test_optimizer_is_built_for_the_step(self, cluster: nbdist.Cluster) -> None:
        cluster.run(MODEL.replace("optimizer.build(model.trainable_variables)", ""))
        run = step(cluster, STEP, steps=2)
        assert run.loss[1] < run.loss[0]


def test_jit_is_refused_under_mirrored(cluster: nbdist.Cluster) -> None:
    cluster.run(MODEL)
    with pytest.raises(nbdist.CellError, match="--jit: TensorFlow's XLA has no collectives"):
        step(cluster, STEP, jit=True)


class TestNotFinite:
    """A loss of nan or inf stops the run with the rank and the step."""

    CELL = """
x, y = batch
with tf.GradientTape() as tape:
    loss = loss_of(y, model(x))
    if rank == 1:
        loss += tf.where(optimizer.iterations < 3, tf.zeros([], loss.dtype), float(VALUE))
gradients = tape.gradient(loss, model.trainable_variables)
optimizer.apply(gradients, model.trainable_variables)
loss
"""

    @pytest.mark.parametrize("value", ["'nan'", pytest.param("'inf'", marks=pytest.mark.full)])
    def test_all_ranks_stop_at_the_same_step(self, cluster: nbdist.Cluster, value: str) -> None:
        cluster.run(MODEL)
        with pytest.raises(nbdist.CellError, match="`loss` is not finite at step 4 on rank 1"):
            step(cluster, self.CELL.replace("VALUE", value))
        assert [n.text for n in cluster.last_run.notes if n.rank == 1][-1].endswith(
            f"{value[1:-1]} at step 4, epoch 1"
        )
        assert max(m.step for m in cluster.last_run.metrics) == 4
        cluster.run("assert int(optimizer.iterations.numpy()) <= 7")

    def test_warn_continues_the_run(
        self, cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.run(MODEL)
        run = step(cluster, self.CELL.replace("VALUE", "'nan'"), on_nan="warn")
        assert run.loss.shape == (11,)
        assert capsys.readouterr().err.count("`loss` is nan at step") >= 1

    def test_nan_under_pjrt_stops_the_run(self, cluster: nbdist.Cluster) -> None:
        cluster.run("import jax.numpy as jnp\nnumbers = np.array([1.0, 1.0, -1.0, 1.0])")
        with pytest.raises(nbdist.CellError, match="`loss` is not finite at step 2"):
            step(cluster, "loss = jnp.log(batch).sum()", "pjrt", data="numbers", batch=2)

    @pytest.mark.full  # the other tests with nan cover the message
    def test_nan_without_a_gradient_stops_the_run(self, cluster: nbdist.Cluster) -> None:
        cluster.run("import tensorflow as tf\nnumbers = np.array([1.0, 1.0, 1.0, -1.0])")
        with pytest.raises(nbdist.CellError, match="`loss` is not finite at step 2 on rank 1"):
            step(cluster, "loss = tf.reduce_mean(tf.math.log(batch))", data="numbers", batch=2)


class TestScaledRates:
    """`--scale-lr` multiplies learning rates by the number of replicas after a warm-up."""

    @pytest.mark.parametrize(
        "rate",
        [
            pytest.param("0.1", marks=pytest.mark.full),
            "keras.optimizers.schedules.PiecewiseConstantDecay([100], [0.1, 0.01])",
        ],
    )
    def test_rate_grows_to_the_number_of_replicas(
        self, cluster: nbdist.Cluster, rate: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.run(MODEL.replace("SGD(0.1,", f"SGD({rate},"))
        cell = STEP + "{'loss': loss, 'rate': tf.convert_to_tensor(optimizer.learning_rate)}"
        run = step(cluster, cell, epochs=2, scale_lr=True)
        rates = run.history["rate"][0]
        np.testing.assert_allclose(rates[:3], [0.15, 0.2, 0.2], rtol=1e-6)
        assert run.begun is not None
        assert run.begun.rates[0].after == pytest.approx(0.2)
        named = "PiecewiseConstantDecay" if "Piece" in rate else 0.1
        assert run.begun.hyperparameters == {"optimizer": "SGD", "learning_rate": named}
        out = capsys.readouterr().out
        assert "96 samples a batch, 48 on each of 2 replicas" in out
        assert "learning rate of `optimizer`: 0.1, growing to 0.2 over 2 steps" in out
        after = cluster.run("float(tf.convert_to_tensor(optimizer.learning_rate))").results[0]
        assert float(after) == pytest.approx(0.1)

    def test_pjrt_scales_the_name_learning_rate(self, cluster: nbdist.Cluster) -> None:
        cluster.run("learning_rate = 0.1\nnumbers = np.ones(400)")
        cell = "{'loss': batch.mean(), 'rate': learning_rate}"
        run = step(cluster, cell, "pjrt", data="numbers", batch=20, scale_lr=True)
        np.testing.assert_allclose(run.history["rate"][0, :3], [0.15, 0.2, 0.2], rtol=1e-6)
        assert latest(cluster).state().hyperparameters["learning_rate"] == 0.1
        assert cluster.run("learning_rate").results[0] == "0.1"

    @pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "pjrt"])
    def test_missing_learning_rate_is_refused(self, cluster: nbdist.Cluster, strategy: str) -> None:
        cluster.run("import tensorflow as tf")
        with pytest.raises(nbdist.CellError, match="--scale-lr"):
            step(cluster, "loss = batch[0][0, 0]", strategy, scale_lr=True)


class TestCheckUnderPjrt:
    """`--check` in global view: a step is wrong only if it refers to the mesh itself."""

    SETUP = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
weights = jnp.zeros((64, 10))
def mean_loss(w, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], 1).mean()
"""
    RIGHT = """
x, y = batch
loss, grads = jax.value_and_grad(mean_loss)(weights, x, y)
weights = weights - 0.1 * grads
"""
    ADDED_UP = """
x, y = batch
def local(w, x, y):
    w = jax.lax.pcast(w, "data", to="varying")
    return jax.lax.psum(jax.grad(mean_loss)(w, x, y), "data")
grads = jax.shard_map(local, in_specs=(P(), P("data"), P("data")), out_specs=P())(weights, x, y)
loss = mean_loss(weights, x, y)
weights = weights - 0.1 * grads
"""

    def test_correct_step_passes(self, cluster: nbdist.Cluster) -> None:
        cluster.run(self.SETUP)
        run = step(cluster, self.RIGHT, "pjrt", check=True, steps=3)
        assert run.checked is not None
        assert {d.name for d in run.checked.differences} == {"loss", "weights"}
        assert run.loss[2] < run.loss[0]

    def test_summed_gradients_are_refused(self, cluster: nbdist.Cluster) -> None:
        cluster.run(self.SETUP)
        with pytest.raises(nbdist.CellError, match=r"2 times too large"):
            step(cluster, self.ADDED_UP, "pjrt", check=True)
        assert cluster.run("float(abs(weights).sum())").results[0] == "0.0"
