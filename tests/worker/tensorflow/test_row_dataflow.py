"""Steps whose results depend on the kinds of rows. A process of its own imports TensorFlow."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.references import plainly

pytestmark = pytest.mark.processes

PROGRAM = """
import keras, tensorflow as tf
from nbdist.worker.tensorflow.row_dataflow import depends_on_kinds, kink

ROWS = 6
dense = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
convolutions = keras.Sequential([
    keras.layers.Reshape((4, 4, 1)), keras.layers.Conv2D(4, 3, activation="relu"),
    keras.layers.MaxPooling2D(), keras.layers.Dropout(0.5), keras.layers.Flatten(),
    keras.layers.Dense(3)])
embedding = keras.Sequential([
    keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)])
for model in (dense, convolutions):
    model.build((None, 16))
embedding.build((None, 16))
optimizer = keras.optimizers.Adam()
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
accuracy = keras.metrics.SparseCategoricalAccuracy()
mean = keras.metrics.Mean()
count = tf.Variable(0.0)

def trained(model, loss_of):
    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits)
        return loss, logits, tape.gradient(loss, model.trainable_variables)
    return step

def with_metrics(x, y):
    loss, logits, gradients = trained(dense, cross_entropy)(x, y)
    accuracy.update_state(y, logits)
    mean.update_state(loss)
    return loss, gradients, accuracy.result(), mean.result()

def masked_mean(y, logits):
    mask = tf.cast(y != 0, tf.float32)
    return tf.reduce_sum(each(y, logits) * mask) / tf.reduce_sum(mask)

def selected(y, logits):
    return tf.reduce_mean(tf.boolean_mask(each(y, logits), y != 0))

def by_a_variable(y, logits):
    count.assign(tf.reduce_sum(tf.cast(y != 0, tf.float32)))
    return tf.reduce_sum(each(y, logits)) / count

def right_answers(y, logits):
    right = tf.cast(tf.argmax(logits, 1), y.dtype) == y
    return tf.reduce_sum(each(y, logits)) / ROWS + tf.cast(tf.reduce_sum(tf.cast(right, tf.int32)),
                                                           tf.float32)

def by_reciprocal(y, logits):
    return tf.reduce_sum(each(y, logits)) * tf.math.reciprocal(
        tf.reduce_sum(tf.cast(y != 0, tf.float32)))

def if_any(y, logits):
    return tf.cond(tf.reduce_any(y == 0), lambda: 2.0, lambda: 1.0) * cross_entropy(y, logits)

def first_rows(y, logits):
    return tf.reduce_sum(each(y, logits)[: tf.reduce_sum(tf.cast(y != 0, tf.int32))])

def clipped(y, logits):
    kept = tf.maximum(each(y, logits), 0.1)
    return tf.reduce_mean(tf.where(y == 0, 2 * kept, kept))

def masked_in_each_row(x, y):
    mask = tf.cast(x != 0, tf.float32)
    vectors = embedding.layers[0](x) * mask[:, :, None]
    means = tf.reduce_sum(vectors, 1) / tf.reduce_sum(mask, 1, keepdims=True)
    return cross_entropy(y, embedding.layers[2](means))

labels = tf.TensorSpec([ROWS], tf.int32)
numbers, tokens = tf.TensorSpec([ROWS, 16]), tf.TensorSpec([ROWS, 16], tf.int32)

def depends(step, rows=numbers):
    return depends_on_kinds(tf.function(step).get_concrete_function(rows, labels).graph, ROWS)

def flooded(y, logits):
    return tf.abs(cross_entropy(y, logits) - 0.1)

def free_bits(y, logits):
    return tf.reduce_sum(tf.maximum(tf.reduce_mean(logits**2, 0), 0.5)) + cross_entropy(y, logits)

def by_size(y, logits):
    loss = cross_entropy(y, logits)
    return tf.cond(loss > 1, lambda: 2 * loss, lambda: loss)

def root(y, logits):
    return tf.sqrt(cross_entropy(y, logits))

normalized = keras.Sequential([
    keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU(),
    keras.layers.Reshape((2, 4)), keras.layers.LSTM(4), keras.layers.LayerNormalization(),
    keras.layers.Dense(3)])
normalized.build((None, 16))
precision = keras.metrics.AUC(num_thresholds=5)

def with_curve(x, y):
    loss, logits, gradients = trained(dense, cross_entropy)(x, y)
    precision.update_state(y != 0, tf.sigmoid(logits[:, 0]))
    return loss, gradients

def kinks(step, rows=numbers):
    return kink(tf.function(step).get_concrete_function(rows, labels).graph, ROWS)

KINKS = {
    "flooding": kinks(trained(dense, flooded)),
    "free bits": kinks(trained(dense, free_bits)),
    "a condition on the loss": kinks(trained(dense, by_size)),
    "a root of the loss": kinks(trained(dense, root)),
    "a dense model": kinks(trained(dense, cross_entropy)),
    "choices in each row": kinks(trained(dense, clipped)),
    "convolutions and dropout": kinks(trained(convolutions, cross_entropy)),
    "normalization and recurrence": kinks(trained(normalized, cross_entropy)),
    "an embedding": kinks(trained(embedding, cross_entropy), tokens),
    "metrics": kinks(with_metrics),
    "a curve": kinks(with_curve),
}
outcome = {"kinks": KINKS,
    "a dense model": depends(trained(dense, cross_entropy)),
    "convolutions and dropout": depends(trained(convolutions, cross_entropy)),
    "an embedding": depends(trained(embedding, cross_entropy), tokens),
    "metrics": depends(with_metrics),
    "a number of right answers": depends(trained(dense, right_answers)),
    "choices in each row": depends(trained(dense, clipped)),
    "a mask in each row": depends(masked_in_each_row, tokens),
    "a mean over a mask": depends(trained(dense, masked_mean)),
    "selected rows": depends(trained(dense, selected)),
    "a count in a variable": depends(trained(dense, by_a_variable)),
    "a reciprocal": depends(trained(dense, by_reciprocal)),
    "a number of rows": depends(trained(dense, first_rows)),
    "a condition on the batch": depends(trained(dense, if_any)),
    "an unknown operation": depends(lambda x, y: tf.linalg.logdet(tf.matmul(x, x, True))),
}
"""


@cache
def outcome() -> dict[str, Any]:
    found: dict[str, Any] = plainly({"steps": PROGRAM}, "tensorflow", "keras")["steps"]
    return found


@pytest.mark.parametrize(
    "step",
    [
        "a dense model",
        "convolutions and dropout",
        "an embedding",
        "metrics",
        "a number of right answers",
        "choices in each row",
        "a mask in each row",
    ],
)
def test_a_step_that_adds_up_rows_is_right_for_all_kinds_of_rows(step: str) -> None:
    assert not outcome()[step]


@pytest.mark.parametrize(
    "step",
    [
        "a mean over a mask",
        "selected rows",
        "a count in a variable",
        "a reciprocal",
        "a number of rows",
        "a condition on the batch",
        "an unknown operation",
    ],
)
def test_a_step_that_is_not_linear_in_sums_over_rows_depends_on_their_kinds(step: str) -> None:
    assert outcome()[step]


def test_kink_of_a_sum_over_rows_is_found() -> None:
    assert outcome()["kinks"] == {
        "flooding": "applies `Abs` to a mean or sum over the rows of a batch",
        "free bits": "applies `Maximum` to a mean or sum over the rows of a batch",
        "a condition on the loss": "applies `Greater` to a mean or sum over the rows of a batch",
        "a root of the loss": "",
        "a dense model": "",
        "choices in each row": "",
        "convolutions and dropout": "",
        "normalization and recurrence": "",
        "an embedding": "",
        "metrics": "",
        "a curve": "",
    }
