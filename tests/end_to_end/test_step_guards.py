"""Step cells that would train incorrectly: nbdist averages, synchronizes or refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """
import keras, numpy as np, tensorflow as tf, jax, jax.numpy as jnp
keras.utils.set_random_seed(1)
numbers = np.arange(32.0, dtype="float32").reshape(16, 2) / 32
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
critic = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
second.build(critic.trainable_variables)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        yield running


@pytest.fixture
def prepared(cluster: nbdist.Cluster) -> nbdist.Cluster:
    cluster.run(SETUP, strategy="mirrored")
    return cluster


def step(
    cluster: nbdist.Cluster, cell: str, strategy: str = "mirrored", **options: Any
) -> nbdist.Run:
    chosen = StepOptions(**{"data": "numbers", "batch": 8, **options})
    return cluster.run(cell, step=chosen, strategy=strategy)


def weights(cluster: nbdist.Cluster, name: str = "model") -> list[np.ndarray]:
    cluster.run(f"weights = {name}.get_weights()", strategy="mirrored")
    one, two = (objects["weights"] for objects in cluster.pull(["weights"]).values())
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    return list(one)


def test_manual_gradient_is_averaged(prepared: nbdist.Cluster) -> None:
    """Without the average each replica would train its own weights."""
    (before,) = weights(prepared)
    cell = """
error = model(batch) - 1.0
loss = tf.reduce_mean(error**2)
gradient = tf.matmul(batch, 2 * error, transpose_a=True) / tf.cast(tf.shape(batch)[0], "float32")
optimizer.apply([gradient], model.trainable_variables)
"""
    step(prepared, cell)
    weight = before
    for start in (0, 8):
        x = np.arange(32.0).reshape(16, 2)[start : start + 8] / 32
        weight = weight - 0.1 * x.T @ (2 * (x @ weight - 1)) / 8
    np.testing.assert_allclose(weights(prepared)[0], weight, rtol=1e-5)


def test_valid_step_prints_no_warnings(
    prepared: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    step(prepared, "loss = tf.reduce_mean(model(batch))", batch=16)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "WARNING" not in shown.out


@pytest.mark.full  # test_notebooks_brought.py has a model with two optimizers
def test_two_optimizers_train_in_one_step(prepared: nbdist.Cluster) -> None:
    """The cell trains a critic twice for each step of the model."""
    cell = """
for _ in range(2):
    with tf.GradientTape() as tape:
        critic_loss = tf.reduce_mean((critic(batch) - 2.0) ** 2)
    second.apply(tape.gradient(critic_loss, critic.trainable_variables), critic.trainable_variables)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((critic(batch) - model(batch)) ** 2)
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
loss
"""
    run = step(prepared, cell, epochs=3, check=True)
    assert run.loss.shape == (6,)
    weights(prepared)
    weights(prepared, "critic")


NESTED = """
@tf.function
def gradients_of(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    return loss, tape.gradient(loss, model.trainable_variables)
loss, gradients = gradients_of(batch)
optimizer.apply(gradients, model.trainable_variables)
loss
"""
LOOP = """
loss = tf.constant(0.0)
for i in tf.range(2):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(batch) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
loss
"""
BRANCH = """
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(model(batch) ** 2)
if loss < 1.0:
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
loss
"""


def test_replicas_synchronize_within_a_function(prepared: nbdist.Cluster) -> None:
    """The numbers equal those of the same code without the function."""
    trained = []
    for text in (NESTED, NESTED.replace("@tf.function\n", "")):
        prepared.run(SETUP, strategy="mirrored")
        trained.append([step(prepared, text).loss.tolist(), weights(prepared)])
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-6)
    for ours, reference in zip(trained[0][1], trained[1][1], strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-6)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(LOOP, id="tf.range", marks=pytest.mark.full), pytest.param(BRANCH, id="if")],
)
def test_synchronization_within_control_flow_is_refused(
    prepared: nbdist.Cluster, cell: str
) -> None:
    """Replicas with different conditions would wait for each other."""
    with pytest.raises(
        nbdist.CellError, match=r"replicas synchronize here .* to the top level of the cell"
    ):
        step(prepared, cell)
    assert prepared.run("1").results[0] == "1"


def test_nonfinite_gradient_is_named_in_the_error(prepared: nbdist.Cluster) -> None:
    cell = """
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(tf.sqrt(model(0 * batch)))
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
loss
"""
    with pytest.raises(nbdist.CellError, match="stopped at step 1: a gradient, or another rank's"):
        step(prepared, cell)


UNSEEDED = (  # the seed of Keras above also seeds tf.data
    "(tf.random.set_seed(rank), "
    "tf.data.Dataset.range(160).map(lambda i: tf.cast(i, 'float32')).shuffle(160))[1]"
)


@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "pjrt"])
@pytest.mark.parametrize(
    ("define", "message"),
    [
        (
            UNSEEDED,
            "use the same seed on all ranks for its shuffle or its generator",
        ),
        (
            "np.random.default_rng(rank).normal(size=16)",
            "begins with different samples on each rank",
        ),
        ("np.ones(16 + rank)", "a different number of samples on each rank: 16, 17"),
    ],
    ids=["unseeded shuffle", "different arrays", "different lengths"],
)
def test_different_data_on_ranks_are_refused(
    prepared: nbdist.Cluster, strategy: str, define: str, message: str
) -> None:
    prepared.run(f"apart = {define}")
    reduce = "tf.reduce_mean" if strategy == "mirrored" else "jnp.mean"
    with pytest.raises(nbdist.CellError, match=message):
        step(prepared, f"loss = {reduce}(batch)", strategy, data="apart")
    assert prepared.run("1").results[0] == "1"


def test_different_state_on_ranks_is_refused(prepared: nbdist.Cluster) -> None:
    prepared.run("params = np.random.default_rng(rank).normal(size=3)\nsame = np.ones(3)")
    with pytest.raises(nbdist.CellError, match=r"not the same on all ranks: `params` \(line 2\)"):
        step(prepared, "params = params * 0.5 + same\nloss = batch.mean()", "pjrt")


@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "pjrt"])
@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("{'a': None}", "reports `a` as None"),
        pytest.param("{'a': 'x'}", "reports `a` as 'x'", marks=pytest.mark.full),
        pytest.param("{'a': {'b': 1.0}}", "reports `a` as {'b': 1.0}", marks=pytest.mark.full),
        pytest.param("{3: 1.0}", "under 3: names must be strings", marks=pytest.mark.full),
    ],
)  # test_step_contract.py covers all messages
def test_reports_of_non_scalars_are_refused(
    prepared: nbdist.Cluster, strategy: str, report: str, message: str
) -> None:
    with pytest.raises(nbdist.CellError, match=message):
        step(prepared, report, strategy)


@pytest.mark.parametrize(
    ("rate", "message"), [("jnp.float32(0.1)", ""), ("lambda step: 0.1", "--scale-lr found no")]
)
def test_scale_lr_scales_arrays_and_refuses_functions(
    prepared: nbdist.Cluster, rate: str, message: str
) -> None:
    prepared.run(f"lr = {rate}", strategy="pjrt")
    cell = "rate = lr\n{'loss': batch.mean(), 'rate': rate}"
    if message:
        with pytest.raises(nbdist.CellError, match=message):
            step(prepared, cell, "pjrt", scale_lr=True)
        return
    run = step(prepared, cell, "pjrt", scale_lr=True, epochs=10)
    assert run.history["rate"][0, -1] == pytest.approx(0.2)


def test_string_batch_is_refused_under_jax(prepared: nbdist.Cluster) -> None:
    prepared.run("words = np.array(['a', 'b'] * 8)")
    with pytest.raises(
        nbdist.CellError, match="the batch contains an array of <U1, but JAX supports"
    ):
        step(prepared, "loss = 1.0", "pjrt", data="words")


def test_nonfinite_metric_does_not_stop_the_run(prepared: nbdist.Cluster) -> None:
    """Only the loss stops a run, under both strategies; nbdist reports the metric once."""
    cell = "{'loss': batch.mean(), 'ratio': jnp.log(-1.0 - batch.mean())}"
    run = step(prepared, cell, "pjrt")
    assert run.loss.shape == (2,)
    assert len([n for n in run.notes if n.topic == "nan" and n.rank == 0]) == 1
