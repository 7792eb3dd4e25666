"""Gradients, losses and moments of two replicas, as of one device with all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.replicas import ROWS, WEIGHTS, Replicas, X, Y, close


def test_gradient_is_that_of_the_mean_over_all_rows(replicas: Replicas, vector: Any) -> None:
    import tensorflow as tf

    def step(rows: slice) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(X[rows], vector) - Y[rows]) ** 2)
        return tape.gradient(loss, vector)

    expected = 2 * X.T @ (X @ vector.numpy() - Y) / ROWS
    close(replicas.run(step), expected)
    even = 2 * X[:4].T @ (X @ vector.numpy() - Y)[:4] / 4
    close(Replicas(replicas.strategy, total=4).run(step), even)
    close(Replicas(replicas.strategy, whole=True).run(step), expected)


def test_gradient_of_a_vector_with_given_factors(replicas: Replicas, vector: Any) -> None:
    """The gradient of own rows counts as a mean of them."""
    import tensorflow as tf

    def step(rows: slice) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.linalg.matvec(X[rows], vector)
        count = rows.stop - rows.start
        return tape.gradient(errors, vector, output_gradients=WEIGHTS[rows] / np.float32(count))

    close(replicas.run(step), X.T @ WEIGHTS / ROWS)


def test_gradient_by_inputs_is_the_replicas_own(replicas: Replicas, vector: Any) -> None:
    """With variables among the sources, inputs keep the gradient of the replica's mean."""
    import tensorflow as tf

    def step(rows: slice) -> Any:
        x = tf.constant(X[rows])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.linalg.matvec(x, vector))
        nothing, by_kernel, by_x = tape.gradient(loss, [tf.constant(1.0), vector, x])
        assert nothing is None
        return by_kernel, by_x[0]

    for rows, (by_kernel, by_x) in zip((3, 2), replicas.run(step), strict=True):
        close([by_kernel], X.mean(0))
        close([by_x], vector.numpy() / rows)


def test_gradient_of_rows_of_a_table(strategy: Any) -> None:
    import tensorflow as tf

    with strategy.scope():
        table = tf.Variable(np.ones((6, 4), "float32"))
    tokens = np.array([1, 4, 1, 1, 5])

    def step(rows: slice, given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.gather(table, given[rows]) * X[rows], 1))
        return tf.convert_to_tensor(tape.gradient(loss, table))

    def summed(count: int) -> Any:
        expected = np.zeros((6, 4), "float32")
        np.add.at(expected, tokens[:count], X[:count] / count)
        return expected

    close(Replicas(strategy, total=4).run(step, tokens), summed(4))
    close(Replicas(strategy, whole=True).run(step, tokens), summed(ROWS))


def test_gradient_outside_of_replicas_is_that_of_tensorflow(strategy: Any) -> None:
    import tensorflow as tf

    vector = tf.Variable([0.5, -1.0, 2.0, 0.25])
    with strategy.scope(), Replicas(strategy).arithmetic():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(X, vector))
        found = tape.gradient(loss, vector)
    close([found], X.mean(0))


def test_equal_rows_of_a_gradient_are_added(strategy: Any) -> None:
    """Indices that are the same for all batches occur once. Others are concatenated."""
    import tensorflow as tf

    constant = ("constant", "variable", "positions", "positions from the end")
    others = (
        *("rows", "rows from the end", "both dimensions", "dimension of any rank"),
        *("dimension by a tensor", "condition", "tokens", "constant and tokens", "random"),
    )
    with strategy.scope():
        tables = {kind: tf.Variable(np.ones((6, 4), "float32")) for kind in (*constant, *others)}
        stored = tf.Variable([2, 0, 2])

    def indices_of(own: Any, number: Any) -> dict[str, Any]:
        of_two, of_any = (
            tf.shape(tf.raw_ops.PlaceholderWithDefault(input=own, shape=shape))
            for shape in ([None, None], None)
        )
        return {
            "constant": tf.constant([1, 4, 1]),
            "variable": tf.identity(stored),
            "positions": tf.range(of_two[1]),
            "positions from the end": tf.range(of_two[-1]),
            "rows": tf.range(of_two[0]),
            "rows from the end": tf.range(of_two[-2]),
            "both dimensions": tf.range(tf.reduce_sum(of_two[1:])),
            "dimension of any rank": tf.range(of_any[1]),
            "dimension by a tensor": tf.range(of_two[number]),
            "condition": tf.cond(number > 0, lambda: tf.range(of_two[1]), lambda: tf.range(3)),
            "tokens": own[:, 0],
            "constant and tokens": tf.concat([tf.range(2), own[:, 0]], 0),
            "random": tf.random.uniform([2], 0, 6, "int32"),
        }

    def step(rows: slice, tokens: Any, number: Any) -> Any:
        indices = indices_of(tokens[rows], number)
        with tf.GradientTape() as tape:
            found = (tf.gather(tables[kind], own) for kind, own in indices.items())
            loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
        gradients = tape.gradient(loss, [tables[kind] for kind in indices])
        return {
            kind: tf.shape(gradient.indices)[0] / tf.shape(own)[0]
            for (kind, own), gradient in zip(indices.items(), gradients, strict=True)
        }

    tokens = np.array([[1, 2, 3], [4, 0, 1], [1, 1, 1], [5, 5, 5]], "int32")
    parts = dict.fromkeys(constant, 1) | dict.fromkeys(others, 2)
    assert Replicas(strategy, total=4).run(step, tokens, 1) == [parts] * 2


def test_gradients_without_a_tape_are_averaged_by_the_optimizer(
    replicas: Replicas, vector: Any
) -> None:
    import keras
    import tensorflow as tf

    before = vector.numpy()
    with replicas.strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([vector])

    def step(rows: slice) -> Any:
        optimizer.apply([tf.reduce_mean(X[rows], 0)], [vector])
        return tf.identity(vector)

    close(replicas.run(step), before - X.mean(0))


def test_equal_rows_without_a_tape_are_added_before_they_are_squared(strategy: Any) -> None:
    """Keras squares the rows of a sparse gradient one by one."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        table = tf.Variable(np.zeros((3, 2), "float32"))
        optimizer = keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0)
        optimizer.build([table])
    values = np.array([[1, 2], [3, 4]], "float32")

    def step(rows: slice) -> Any:
        gradient = tf.IndexedSlices(tf.constant(values), tf.constant([0, 2]), tf.constant([3, 2]))
        optimizer.apply([gradient], [table])
        return tf.identity(optimizer.variables[-1])

    squares = np.zeros((3, 2), "float32")
    squares[[0, 2]] = values**2
    close(Replicas(strategy).run(step), squares)


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
@pytest.mark.parametrize("epsilon", [1e-7, 0.5])
def test_moments_are_those_of_all_rows(
    strategy: Any, monkeypatch: pytest.MonkeyPatch, whole: bool, epsilon: float
) -> None:
    """Keras adds its epsilon to the number of valid rows."""
    import keras
    import tensorflow as tf

    monkeypatch.setattr("keras.src.backend.epsilon", lambda: epsilon)
    monkeypatch.setattr("keras.backend.epsilon", lambda: epsilon)
    mask = np.array([1, 0, 1, 0, 1], bool)
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 4))
    all_rows = tf.constant(X)
    expected = layer._moments(all_rows, None), layer._moments(all_rows, tf.constant(mask))

    def step(rows: slice) -> Any:
        own = tf.constant(X[rows])
        return layer._moments(own, None), layer._moments(own, tf.constant(mask[rows]))

    for found in Replicas(strategy, whole=whole).run(step):
        for own, upstream in zip(found, expected, strict=True):
            for moment, reference in zip(own, upstream, strict=True):
                close([moment], reference)
