"""Keras metrics of two replicas, as of one device with all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.replicas import WEIGHTS, Replicas, Y, close


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


@pytest.mark.parametrize("kind", [np.asarray, list, "tensor"])
def test_metrics_of_rows_without_weights(replicas: Replicas, kind: Any) -> None:
    """The result is also known where the replicas are not running."""
    import keras
    import tensorflow as tf

    with replicas.strategy.scope():
        metric = keras.metrics.Mean()

    def step(rows: slice) -> Any:
        metric.update_state(tf.constant(Y[rows]) if kind == "tensor" else kind(Y[rows]))
        return metric.result()

    close(replicas.run(step), Y.mean())
    assert float(metric.count.numpy()) == len(Y)
    with replicas.arithmetic(), replicas.strategy.scope():
        close([metric.result()], Y.mean())


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


@pytest.mark.parametrize("whole", [False, True])
def test_state_of_a_users_metric_may_be_a_minimum(strategy: Any, whole: bool) -> None:
    """Replicas with the same rows each update the whole state, also after an earlier step."""
    import keras
    import tensorflow as tf

    class Smallest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.least = self.add_variable((), keras.initializers.Constant(6.0), name="least")
            self.seen = self.add_variable((), "zeros", name="seen")

        def update_state(self, values: Any) -> None:
            self.least.assign(tf.minimum(self.least, tf.reduce_min(values)))
            self.seen.assign_add(tf.cast(tf.size(values), "float32"))

        def result(self) -> Any:
            return {"least": self.least, "seen": self.seen}

    with strategy.scope():
        metric = Smallest()
    values = np.array([5, 4, 3, 9, 8], "float32")

    def step(rows: slice) -> Any:
        metric.update_state(values[rows])
        return metric.result()

    replicas = Replicas(strategy, whole=whole)
    for steps in (1, 2):
        close([found["seen"] for found in replicas.run(step)], 5 * steps)
    least = [found["least"] for found in replicas.run(step)]
    close(least, 3 if whole else 3 + 6)  # the state of parts is the sum of their states
    assert float(metric.least.numpy()) == least[0]


def test_a_users_metric_may_have_no_state(strategy: Any) -> None:
    import keras
    import tensorflow as tf

    class Version(keras.metrics.Metric):
        def update_state(self, values: Any) -> None:
            pass

        def result(self) -> Any:
            return tf.constant(3.0)

    with strategy.scope():
        metric = Version()

    def step(rows: slice) -> Any:
        metric.update_state(Y[rows])
        return metric.result()

    close(Replicas(strategy, whole=True).run(step), 3)


def test_functions_and_classes_of_keras_are_known() -> None:
    import keras

    from nbdist.worker.tensorflow.replica.metrics import is_of_keras

    class Own(keras.metrics.Metric):
        pass

    known = [keras.metrics.Mean, keras.losses.mean_squared_error]
    assert all(map(is_of_keras, known))
    assert not any(map(is_of_keras, [Own, np.mean, 3, None]))
