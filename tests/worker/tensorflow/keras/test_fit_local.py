"""Keras's `fit` on a rank with several replicas, as with several GPUs: two logical CPUs.

MultiWorkerMirroredStrategy uses one CPU of each worker. MirroredStrategy replaces it here, and a
rank without a notebook replaces the worker.
"""

from __future__ import annotations

import textwrap
from functools import cache
from typing import Any

import pytest

from tests.fit_programs import AFTER, FITS, program
from tests.references import plainly
from tests.whole_batch_programs import WHOLE
from tests.worker.tensorflow.keras.test_fit import assert_close

START = """
import tensorflow as tf
from nbdist.records import SocketAddress, WorkerIdentity
from nbdist.worker.runtime import context
from nbdist.worker.tensorflow.runtime import running_strategy, variable_scalars
from nbdist.worker.tensorflow.keras import fit_patch
from nbdist.worker.tensorflow.replica import summed_variables

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
nowhere = SocketAddress(url="inproc://nowhere", server_key=b"0" * 40)
identity = WorkerIdentity(rank=0, world_size=1, stream=nowhere, dispatch=nowhere)
context._worker = context.Worker(identity)
fit_patch._is_ours = lambda strategy: True
fit_patch.apply()
summed_variables.apply()
variable_scalars.apply()
running_strategy.apply()
with strategy.scope():
"""

BETWEEN = """
class Between(layers.Layer):
    def __init__(self, **given):
        super().__init__()
        self.dense, self.norm = layers.Dense(8, **given), layers.BatchNormalization()
    def call(self, x, training=None):
        self.add_loss(ops.mean(ops.square(x)))
        x = self.norm(self.dense(x), training=training)
        self.add_loss(ops.mean(ops.abs(x)))
        return x
"""
"""Layer in whose call replicas synchronize between two losses."""

PROCESS_PROGRAMS: dict[str, str] = {
    "losses before and after the moments": program(
        BETWEEN
        + """
model = keras.Sequential([
    keras.Input((8,)), keras.Sequential([Between(activity_regularizer="l2")]),
    layers.ActivityRegularization(0.1), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=33, verbose=0)
"""
    ),
    "two calls of a model": program(
        BETWEEN
        + """
class Twice(keras.Model):
    def __init__(self):
        super().__init__()
        self.between, self.out = Between(), layers.Dense(1)
    def call(self, x, training=None):
        return self.out(self.between(x, training=training))
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            first = self(x, training=True)
            loss = sum(self.losses)
            both = first + self(x / 2, training=True)
            loss += self.compute_loss(y=y, y_pred=both)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}
model = Twice()
model.compile(keras.optimizers.SGD(0.01), "mse")
history = model.fit(x, y, batch_size=33, epochs=2, verbose=0)
"""
    ),
    "tensors that a layer keeps": program(
        """
        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.hidden, self.out = layers.Dense(16, "tanh"), layers.Dense(1)
                self.norm = layers.BatchNormalization()
            def call(self, x, training=None):
                self.kept, self.parts = self.hidden(x), []
                self.parts.append(ops.mean(ops.abs(self.kept)))
                x = self.norm(self.kept, training=training)
                self.add_loss(ops.mean(ops.square(self.kept)) + sum(self.parts))
                return self.out(x)
        model = Net()
        model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=33, epochs=2, verbose=0)
        """
    ),
    "dropout masks of a recurrent cell with moments": program(
        """
        class Cell(layers.LSTMCell):
            def __init__(self, units, **given):
                super().__init__(units, **given)
                self.norm = layers.BatchNormalization()
            def build(self, shape):
                super().build(shape)
                self.norm.build((None, self.units))
            def call(self, inputs, states, training=False):
                outputs, states = super().call(inputs, states, training=training)
                return self.norm(outputs, training=training), states
        cell = Cell(4, dropout=0.3, recurrent_dropout=0.2)
        model = keras.Sequential([
            keras.Input((2, 8)), layers.BatchNormalization(), layers.RNN(cell, unroll=True),
            layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.02), "mse")
        history = model.fit(x[:, None] * np.ones((2, 1)), y, batch_size=33, verbose=0)
        """
    ),
    "scaled losses, embeddings and accumulated gradients": program(
        """
        words = draw.integers(0, 20, size=(71, 9))
        model = keras.Sequential([
            layers.Embedding(20, 8, mask_zero=True), layers.GlobalAveragePooling1D(),
            layers.Dense(1)])
        optimizers = [
            keras.optimizers.Adam(0.05, global_clipnorm=0.1),
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(
                1e-3, 20, warmup_target=0.05, warmup_steps=5), gradient_accumulation_steps=2)]
        losses = []
        for optimizer in optimizers:
            model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
            history = model.fit(words, y, batch_size=16, epochs=2, verbose=0)
            losses += history.history["loss"]
        """,
        after=AFTER + 'outcome["losses"] = losses\n',
    ),
}
"""Programs in which replicas of one process could overwrite each other's values."""


@cache
def outcomes(*, of_process_programs: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = PROCESS_PROGRAMS if of_process_programs else FITS
    programs = {name: START + textwrap.indent(code, "    ") for name, code in texts.items()}
    return plainly(programs, "tensorflow", "keras"), plainly(texts, "tensorflow", "keras")


@pytest.mark.full
@pytest.mark.parametrize("name", [*PROCESS_PROGRAMS, *FITS])
def test_two_replicas_of_a_rank_give_results_of_one(name: str) -> None:
    found = outcomes(of_process_programs=name in PROCESS_PROGRAMS)
    ours, reference = (programs[name] for programs in found)
    assert_close(ours, reference, {"float64": 1e-9, "float16": 1e-2}.get(name, 1e-5))


SHARED = """
import contextlib
from nbdist.worker.tensorflow.replica import layer_state
layer_state.separate_replicas = lambda strategy: contextlib.nullcontext()
"""


@pytest.mark.full
def test_keras_mixes_the_losses_of_replicas_in_one_process() -> None:
    name = "losses before and after the moments"
    code = SHARED + START + textwrap.indent(PROCESS_PROGRAMS[name], "    ")
    mixed = plainly({name: code}, "tensorflow", "keras")[name]
    with pytest.raises(AssertionError):
        assert_close(mixed, outcomes(of_process_programs=True)[1][name], 1e-3)


@pytest.mark.full  # rare
def test_update_inside_of_a_condition_is_refused_with_the_remedy() -> None:
    code = START + textwrap.indent(WHOLE["an update inside of a condition"][1], "    ")
    with pytest.raises(AssertionError, match="move the update out of it, or start workers with"):
        plainly({"own": code}, "tensorflow", "keras")
