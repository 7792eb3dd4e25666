"""Agreement of two replicas on finite steps, and scaled losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.replicas import Replicas, X, close

if TYPE_CHECKING:
    from nbdist.worker.tensorflow.replica.finite import LossScaling

FINE = np.zeros(2, "float32")
BAD = np.array([0, np.inf], "float32")
"""A value for each replica. The second replica's value is not finite."""


def own(values: Any) -> Any:
    from nbdist.worker.tensorflow.replica.batch_share import replica_id

    return values[replica_id()]


@pytest.mark.parametrize(
    ("shapes", "marked"),
    [
        ({"vector": (4,)}, "vector"),
        ({"vector": (4,), "scalar": ()}, "scalar"),
        ({"scalar": (), "vector": (4,)}, "scalar"),
        ({"empty": (0,), "vector": (4,)}, "vector"),
        ({"unknown": None, "vector": (4,)}, "vector"),
        ({"unknown": None}, "unknown"),
        ({"table": (6, 4)}, ""),
    ],
)
def test_smallest_gradient_shows_a_loss_that_is_not_finite(
    strategy: Any, shapes: dict[str, Any], marked: str
) -> None:
    """The loss of one replica is infinite, and all gradients are finite."""
    import tensorflow as tf

    with strategy.scope():
        variables = {
            name: tf.Variable(
                tf.ones((3,) if shape is None else shape),
                shape=tf.TensorShape(None) if shape is None else None,
            )
            for name, shape in shapes.items()
        }
    replicas = Replicas(strategy)

    def step(rows: slice, values: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = own(values)
            for name, variable in variables.items():
                used = tf.gather(variable, [1, 2]) if name == "table" else variable
                loss += tf.reduce_sum(used)
        found = dict(zip(variables, tape.gradient(loss, [*variables.values()]), strict=True))
        found = {name: tf.convert_to_tensor(gradient) for name, gradient in found.items()}
        return replicas.watch.agreed({"loss": loss}), found

    for agreed, gradients in replicas.run(step, FINE):
        assert agreed
        for name, gradient in gradients.items():
            assert set(np.unique(gradient)) <= ({0, 1} if name == "table" else {1})
    for agreed, gradients in replicas.run(step, BAD):
        assert not agreed
        for name, gradient in gradients.items():
            assert np.isfinite(gradient).all() == (name != marked)


@pytest.mark.parametrize("values", [FINE, BAD])
def test_steps_without_gradients_compare_their_report(replicas: Replicas, values: Any) -> None:
    import tensorflow as tf

    def step(rows: slice, given: Any) -> Any:
        return replicas.watch.agreed({"count": tf.constant(3), "loss": own(given) + 1})

    assert replicas.run(step, values) == [values is FINE] * 2


class Scaled:
    """Step with scaled losses, whose gradient overflows if a value is infinite."""

    def __init__(self, strategy: Any, vector: Any) -> None:
        import keras

        from nbdist.worker.tensorflow.replica.finite import LossScaling

        self.watch: LossScaling = LossScaling(strategy)
        self.scale, self.good = self.watch.variables()
        self.vector = vector
        with strategy.scope():
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build([vector])
        self.replicas = Replicas(strategy, watch=self.watch)

    def run(self, values: Any = FINE) -> Any:
        """Run a step, and return whether the replicas agree and their gradient."""
        import tensorflow as tf

        def step(rows: slice, given: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.linalg.matvec(X[rows], self.vector)) * (own(given) + 1)
            gradient = tape.gradient(loss, self.vector)
            self.optimizer.apply([gradient], [self.vector])
            return self.watch.agreed({"loss": tf.constant(1.0)}), gradient

        (agreed, gradient), (other, _) = self.replicas.run(step, values)
        assert agreed == other
        return bool(agreed), gradient

    @property
    def state(self) -> tuple[float, int]:
        """Scale, and number of finite steps since its last change."""
        return float(self.scale.numpy()), int(self.good.numpy())


@pytest.fixture
def scaled(strategy: Any, vector: Any) -> Scaled:
    return Scaled(strategy, vector)


def test_scaling_begins_with_the_values_of_keras(scaled: Scaled) -> None:
    import keras

    from nbdist.worker.tensorflow.replica.finite import GROWTH_STEPS

    expected = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    assert scaled.state == (expected.initial_scale, 0)
    assert expected.dynamic_growth_steps == GROWTH_STEPS
    assert not any(variable.trainable for variable in scaled.watch.variables())


def test_scaled_losses_give_the_same_gradients(scaled: Scaled) -> None:
    before = scaled.vector.numpy()
    agreed, gradient = scaled.run()
    assert agreed
    close([gradient], X.mean(0))
    close([scaled.vector.numpy()], before - X.mean(0))
    assert scaled.state == (2**15, 1)
    scaled.run()
    close([scaled.vector.numpy()], before - 2 * X.mean(0))
    assert scaled.state == (2**15, 2)


def test_all_replicas_skip_an_update_that_overflows(scaled: Scaled) -> None:
    scaled.good.assign(7)
    before = scaled.vector.numpy()
    agreed, gradient = scaled.run(BAD)
    assert agreed
    assert not np.isfinite(gradient).all()
    np.testing.assert_array_equal(scaled.vector.numpy(), before)
    assert int(scaled.optimizer.iterations.numpy()) == 0
    assert scaled.state == (2**14, 0)


@pytest.mark.parametrize(
    ("good", "expected"), [(1997, (8, 1998)), (1998, (8, 1999)), (1999, (16, 0))]
)
def test_scale_doubles_after_many_finite_steps(
    scaled: Scaled, good: int, expected: tuple[float, int]
) -> None:
    scaled.scale.assign(8)
    scaled.good.assign(good)
    assert scaled.run()[0]
    assert scaled.state == expected


def test_replicas_disagree_below_the_smallest_scale(scaled: Scaled) -> None:
    scaled.scale.assign(2)
    assert scaled.run(BAD)[0]
    assert scaled.state == (1, 0)
    assert not scaled.run(BAD)[0]
    assert scaled.state == (0.5, 0)


def test_gradients_without_a_tape_are_not_scaled(scaled: Scaled) -> None:
    import tensorflow as tf

    before = scaled.vector.numpy()

    def step(rows: slice) -> Any:
        scaled.optimizer.apply([tf.reduce_mean(X[rows], 0)], [scaled.vector])
        return tf.identity(scaled.vector)

    close(scaled.replicas.run(step), before - X.mean(0))


@pytest.mark.parametrize("values", [FINE, BAD])
def test_first_update_of_an_unbuilt_optimizer_is_scaled(
    strategy: Any, vector: Any, values: Any
) -> None:
    import keras

    scaled = Scaled(strategy, vector)
    with strategy.scope():
        scaled.optimizer = keras.optimizers.Adam(1.0)
    before = scaled.vector.numpy()
    assert scaled.run(values)[0]
    expected = before - np.sign(X.mean(0)) if values is FINE else before
    np.testing.assert_allclose(scaled.vector.numpy(), expected, atol=1e-4)
    assert int(scaled.optimizer.iterations.numpy()) == (values is FINE)
