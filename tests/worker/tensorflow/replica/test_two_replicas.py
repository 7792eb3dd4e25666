"""Gradients, losses, moments and metrics of two replicas, as of one device with all rows.

The replicas are two logical CPUs of this process. Their parts of the batch have 3 and 2 rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 5
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=ROWS).astype("float32")
WEIGHTS = np.array([1, 0, 2, 3, 0.5], "float32")


@pytest.fixture(scope="module")
def strategy() -> Any:
    """Import TensorFlow late: earlier tests check that the notebook does not load it."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


class Replicas:
    """Runs a function on both replicas, under the arithmetic of a step."""

    def __init__(self, strategy: Any, *, whole: bool = False, total: int = ROWS) -> None:
        from nbdist.worker.tensorflow.replica.batch_share import Shares

        self.strategy = strategy
        self.shares = Shares(total, 2, whole=whole, even=total % 2 == 0)

    def run(self, function: Callable[..., Any], *inputs: Any) -> list[Any]:
        """Return the results of both replicas, from the rows of each and the step's inputs."""
        import tensorflow as tf

        from nbdist.worker.tensorflow.replica.finite import FiniteWatch
        from nbdist.worker.tensorflow.replica.sample_random import Draws
        from nbdist.worker.tensorflow.replica.single_device_math import arithmetic

        def replica(*given: Any) -> Any:
            share = self.shares.here()
            return function(slice(share.offset, share.offset + share.rows), *given)

        @tf.function(autograph=False)
        def every(*given: Any) -> Any:
            with arithmetic(self.shares, FiniteWatch(), Draws()):
                return self.strategy.run(replica, args=given)

        local = self.strategy.experimental_local_results
        results = every(*map(tf.constant, inputs))
        flat = [local(value) for value in tf.nest.flatten(results)]
        return [
            tf.nest.pack_sequence_as(results, [np.asarray(parts[replica]) for parts in flat])
            for replica in (0, 1)
        ]


@pytest.fixture
def replicas(strategy: Any) -> Replicas:
    return Replicas(strategy)


def close(found: list[Any], expected: Any) -> None:
    for own in found:
        np.testing.assert_allclose(own, expected, rtol=2e-6, atol=1e-6)


@pytest.fixture
def kernel(strategy: Any) -> Any:
    import tensorflow as tf

    with strategy.scope():
        return tf.Variable([0.5, -1.0, 2.0, 0.25])


def test_gradient_is_that_of_the_mean_over_all_rows(replicas: Replicas, kernel: Any) -> None:
    import tensorflow as tf

    def step(rows: slice) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(X[rows], kernel) - Y[rows]) ** 2)
        return tape.gradient(loss, kernel)

    expected = 2 * X.T @ (X @ kernel.numpy() - Y) / ROWS
    close(replicas.run(step), expected)
    even = 2 * X[:4].T @ (X @ kernel.numpy() - Y)[:4] / 4
    close(Replicas(replicas.strategy, total=4).run(step), even)
    close(Replicas(replicas.strategy, whole=True).run(step), expected)


def test_gradient_of_a_vector_with_given_factors(replicas: Replicas, kernel: Any) -> None:
    """The gradient of own rows counts as a mean of them."""
    import tensorflow as tf

    def step(rows: slice) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.linalg.matvec(X[rows], kernel)
        count = rows.stop - rows.start
        return tape.gradient(errors, kernel, output_gradients=WEIGHTS[rows] / np.float32(count))

    close(replicas.run(step), X.T @ WEIGHTS / ROWS)


def test_gradient_by_inputs_is_the_replicas_own(replicas: Replicas, kernel: Any) -> None:
    """With variables among the sources, inputs keep the gradient of the replica's mean."""
    import tensorflow as tf

    def step(rows: slice) -> Any:
        x = tf.constant(X[rows])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.linalg.matvec(x, kernel))
        by_kernel, by_x, nothing = tape.gradient(loss, [kernel, x, tf.constant(1.0)])
        assert nothing is None
        return by_kernel, by_x[0]

    for rows, (by_kernel, by_x) in zip((3, 2), replicas.run(step), strict=True):
        close([by_kernel], X.mean(0))
        close([by_x], kernel.numpy() / rows)


def test_gradient_of_rows_of_a_table(strategy: Any) -> None:
    import tensorflow as tf

    with strategy.scope():
        table = tf.Variable(np.ones((6, 4), "float32"))
    tokens = np.array([1, 4, 1, 1, 5])

    def step(rows: slice, given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.gather(table, given[rows]) * X[rows], 1))
        return tf.convert_to_tensor(tape.gradient(loss, table))

    expected = np.zeros((6, 4), "float32")
    np.add.at(expected, tokens[:4], X[:4] / 4)
    close(Replicas(strategy, total=4).run(step, tokens), expected)


def test_gradients_without_a_tape_are_averaged_by_the_optimizer(
    replicas: Replicas, kernel: Any
) -> None:
    import keras
    import tensorflow as tf

    before = kernel.numpy()
    with replicas.strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([kernel])

    def step(rows: slice) -> Any:
        optimizer.apply([tf.reduce_mean(X[rows], 0)], [kernel])
        return tf.identity(kernel)

    close(replicas.run(step), before - X.mean(0))


def test_losses_of_keras_are_those_of_all_rows(replicas: Replicas) -> None:
    import keras
    import tensorflow as tf

    def loss(reduction: str, weights: Any, rows: slice) -> Any:
        made = keras.losses.MeanSquaredError(reduction=reduction)
        own = made(Y[rows, None], X[rows, :1], None if weights is None else weights[rows])
        share = replicas.shares.here()
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, share.weighted(own))

    errors = (X[:, 0] - Y) ** 2
    for reduction, weights, expected in [
        ("sum_over_batch_size", None, errors.mean()),
        ("sum_over_batch_size", WEIGHTS, (errors * WEIGHTS).mean()),
        ("sum", None, errors.sum()),
        ("mean_with_sample_weight", WEIGHTS, (errors * WEIGHTS).sum() / WEIGHTS.sum()),
        ("mean_with_sample_weight", None, errors.mean()),
    ]:
        close(replicas.run(lambda rows, r=reduction, w=weights: loss(r, w, rows)), expected)


def test_masked_losses_count_the_valid_entries_of_all_rows(replicas: Replicas) -> None:
    import keras
    import tensorflow as tf

    mask = np.array([1, 0, 1, 0, 1], bool)

    def step(rows: slice) -> Any:
        predicted = tf.constant(X[rows, :1])
        predicted._keras_mask = tf.constant(mask[rows])
        own = keras.losses.MeanSquaredError()(Y[rows, None], predicted)
        share = replicas.shares.here()
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, share.weighted(own))

    close(replicas.run(step), ((X[:, 0] - Y) ** 2)[mask].mean())


@pytest.mark.parametrize("whole", [False, True])
def test_moments_are_those_of_all_rows(strategy: Any, whole: bool) -> None:
    import keras
    import tensorflow as tf

    mask = np.array([1, 0, 1, 0, 1], bool)
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 4))

    def step(rows: slice) -> Any:
        own = tf.constant(X[rows])
        return layer._moments(own, None), layer._moments(own, tf.constant(mask[rows]))

    for plain, masked in Replicas(strategy, whole=whole).run(step):
        close([plain[0]], X.mean(0))
        close([plain[1]], X.var(0))
        close([masked[0]], X[mask].mean(0))
        close([masked[1]], X[mask].var(0))


def test_metrics_count_each_row_once(replicas: Replicas) -> None:
    import keras

    with replicas.strategy.scope():
        means = {whole: keras.metrics.Mean() for whole in (False, True)}

    def update(metric: Any, rows: slice) -> Any:
        metric.update_state(Y[rows], sample_weight=WEIGHTS[rows])
        return metric.result()

    expected = (Y * WEIGHTS).sum() / WEIGHTS.sum()
    for whole, metric in means.items():
        run = Replicas(replicas.strategy, whole=whole).run
        close(run(lambda rows, metric=metric: update(metric, rows)), expected)
        assert float(metric.count.numpy()) == WEIGHTS.sum()


@pytest.mark.parametrize("kind", [float, np.float32, np.array, "tensor"])
def test_metrics_count_a_scalar_once(replicas: Replicas, kind: Any) -> None:
    """A scalar of the step, such as a learning rate, is one value and not one for each replica."""
    import keras
    import tensorflow as tf

    with replicas.strategy.scope():
        total = keras.metrics.Sum()

    def step(rows: slice) -> Any:
        total.update_state(tf.constant(3.0) if kind == "tensor" else kind(3.0))
        return total.result()

    close(replicas.run(step), 3.0)


def test_metric_of_a_loss_is_the_mean_over_all_rows(replicas: Replicas) -> None:
    import keras
    import tensorflow as tf

    with replicas.strategy.scope():
        metric = keras.metrics.Mean()

    def step(rows: slice) -> Any:
        metric.update_state(tf.reduce_mean(Y[rows]))
        return metric.result()

    close(replicas.run(step), Y.mean())
    assert float(metric.count.numpy()) == 1


def test_shares_of_an_uneven_batch() -> None:
    from nbdist.worker.tensorflow.replica.batch_share import Shares

    shares = Shares(11, 4, even=False)
    parts = [shares.of(replica) for replica in range(4)]
    assert [(part.offset, part.rows) for part in parts] == [(0, 3), (3, 3), (6, 3), (9, 2)]
    assert [float(part.part(_float32())) for part in parts] == pytest.approx(
        [3 / 11] * 3 + [2 / 11]
    )
    assert [float(part.weight(_float32())) for part in parts] == pytest.approx(
        [12 / 11] * 3 + [8 / 11]
    )
    both = shares.of(2, count=2)
    assert (both.offset, both.rows) == (6, 5)
    whole = Shares(11, 4, whole=True).of(3)
    assert (whole.offset, whole.rows, whole.weight(_float32())) == (0, 11, None)
    assert float(whole.part(_float32())) == 0.25


def test_parts_that_the_user_distributed_are_counted(strategy: Any) -> None:
    import tensorflow as tf

    from nbdist.worker.tensorflow.replica.batch_share import CountedShares, replica_id

    shares = CountedShares(2)

    @tf.function(autograph=False)
    def every() -> Any:
        def replica() -> Any:
            shares.count(tf.constant([3, 4])[replica_id()])
            share = shares.here()
            return share.total, share.rows, share.offset

        return strategy.run(replica)

    local = strategy.experimental_local_results
    found = [[int(part) for part in local(value)] for value in every()]
    assert found == [[7, 7], [3, 4], [0, 3]]


def _float32() -> Any:
    import tensorflow as tf

    return tf.float32
