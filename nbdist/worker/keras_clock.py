"""`fit` under TensorFlow tells how long a step waited for its data, and for its collectives.

Keras takes the batch within the graph of the step, so that Python sees one call and none of its
parts. Timestamps in that graph tell them apart: one when this rank's own batch is there, and two
beside each of its collectives, as in a step cell (`worker/collective_clock.py`). Nothing waits for
them. TensorFlow asks all workers for each batch whether anyone has data left: that is a collective,
in which a rank waits for the data of another, and none of its own waiting for data.

They leave the graph beside Keras's metrics and are taken out again before Keras sees those. With
`steps_per_execution` only the last step's metrics leave it: there, a variable adds up what steps
have waited for data.

Keras 3.15 and TensorFlow 2.21; `worker/keras_patch.py` applies it for versions that were tested.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.distribute import input_lib

from nbdist.worker import collective_clock
from nbdist.worker.collective_clock import when_there
from nbdist.worker.keras_times import TimedFunction, Unknown
from nbdist.worker.one_device import changed
from nbdist.worker.spans import covered

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.keras_times import Took

STAMPS = "?times"
COLLECTIVES = "?collectives"
"""Beside the metrics that a step returns."""

_make_train_upstream = keras_trainer.TensorFlowTrainer.make_train_function
_make_upstream = keras_trainer.TensorFlowTrainer._make_function
_convert_upstream = keras_trainer.TensorFlowTrainer._autoconvert_optionals
_have_values_upstream = input_lib._calculate_replicas_with_values

_running: list[_Clock] = []
"""That of the train function which runs, and may be traced."""


def apply() -> None:
    """Time every train function that is made from here on."""
    keras_trainer.TensorFlowTrainer.make_train_function = _make_train_function
    input_lib._calculate_replicas_with_values = _have_values


def reduced(values: Any, reduce: Callable[[Any], Any]) -> Any:
    """What Keras's metrics come to over replicas; with the times of a train function's step.

    Args:
        values: a step's metrics.
        reduce: makes one of all replicas' values.
    """
    if not _running:
        return tree.map_structure(reduce, values)
    return _running[-1].reduced(values, reduce)


def _have_values(strategy: Any, workers: Any, optionals: Any) -> Any:
    """On how many replicas there is a batch, of all workers."""
    if not _running:
        return _have_values_upstream(strategy, workers, optionals)
    return _running[-1].have_values(
        optionals, lambda: _have_values_upstream(strategy, workers, optionals)
    )


def _make_train_function(self: Any, force: bool = False) -> Any:
    if self.train_function is not None and not force:
        return self.train_function
    if self.run_eagerly:
        return _make_train_upstream(self, force)
    clock = _Clock(self)
    trainer = keras_trainer.TensorFlowTrainer
    with (
        changed(trainer, "_make_function", clock.made),
        changed(trainer, "_autoconvert_optionals", clock.converted),
    ):
        _make_train_upstream(self, force)
    self.train_function = TimedFunction(functools.partial(clock.call, self.train_function))
    return self.train_function


class _Took(msgspec.Struct, frozen=True):
    """One step.

    Attributes:
        began_s: when it was called, on `time.perf_counter`.
        called_at: the same since 1970.
        stamps: when the batch was there, and begin and end of each collective, since 1970: shape
            (1 + 2 * collectives,), or () where there are no collectives.
    """

    began_s: float
    called_at: float
    stamps: tf.Tensor

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        del steps
        there_at, *collectives = self.stamps.numpy().reshape(-1).tolist()
        there_s = self.began_s + there_at - self.called_at
        measured = {"input_s": max(0.0, there_s - max(self.began_s, since_s))}
        if collectives:
            measured["collective_s"] = covered(np.array(collectives).reshape(-1, 2))
        return measured


class _TookSome(msgspec.Struct, frozen=True):
    """Some steps of `steps_per_execution`.

    Attributes:
        called_at: when they were called, since 1970.
        before: of the steps before, like `tally`.
        tally: when the last step had ended, since 1970, and the seconds that were waited for data
            between all steps, those between two calls too: shape (2,).
    """

    called_at: float
    before: tf.Tensor
    tally: tf.Tensor

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        del since_s
        (ended_at, before_s), (_, waited_s) = self.before.numpy(), self.tally.numpy()
        return {
            "input_s": float(max(0.0, waited_s - before_s - (self.called_at - ended_at)) / steps)
        }


class _Clock:
    """Places the timestamps of one train function, and reads them.

    Args:
        model: whose function it is.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._collectives = collective_clock.choose(
            model.distribute_strategy, COLLECTIVES, jit=bool(model.jit_compile)
        )
        self._several = model.steps_per_execution > 1
        self._there: list[tuple[Any, tf.Tensor]] = []
        if self._several:
            self._before = tf.zeros(2, tf.float64)
            with tf.device("CPU:0"):
                self._tally = tf.Variable(self._before, trainable=False)

    def call(self, function: Callable[[Any], Any], iterator: Any) -> tuple[Any, Took]:
        called_at, began_s = time.time(), time.perf_counter()
        _running.append(self)
        try:
            outputs = function(iterator)
        finally:
            _running.pop()
        if not isinstance(outputs, dict) or STAMPS not in outputs:
            return outputs, Unknown()
        metrics = dict(outputs)
        stamps = metrics.pop(STAMPS)
        if not self._several:
            return metrics, _Took(began_s, called_at, stamps)
        before, self._before = self._before, stamps
        return metrics, _TookSome(called_at, before, stamps)

    def made(self, step: Callable[[Any], Any]) -> Any:
        """Keras's train function of a step on a replica."""

        def timed(data: Any) -> Any:
            with self._collectives.installed():
                return step(data)

        return _make_upstream(self._model, timed)

    def converted(self, step: Callable[[Any], Any]) -> Any:
        """A step on all replicas; what is placed here is outside of what XLA compiles."""
        run = _convert_upstream(self._model, step)

        def timed(data: Any) -> Any:
            there = None if tf.executing_eagerly() else self._when_there(data)
            outputs = run(data)
            if isinstance(outputs, dict):
                outputs = self._stamped(dict(outputs), there)
            return outputs

        return timed

    def have_values(self, optionals: Any, ask: Callable[[], Any]) -> Any:
        graph = tf.compat.v1.get_default_graph()
        self._there.append((graph, when_there(_tensors(optionals))))
        return self._collectives.around(ask)

    def reduced(self, values: Any, reduce: Callable[[Any], Any]) -> Any:
        metrics = self._collectives.around(lambda: tree.map_structure(reduce, values))
        if isinstance(metrics, dict):
            return {**metrics, **self._collectives.stamps()}
        return metrics

    def _when_there(self, data: Any) -> tf.Tensor:
        """Before the workers tell each other that they have data, or else once it is here."""
        graph = tf.compat.v1.get_default_graph()
        told = [stamp for placed, stamp in self._there if placed is graph]
        self._there.clear()
        return told[0] if told else when_there(_tensors(data))

    def _stamped(self, outputs: dict[str, Any], there: tf.Tensor | None) -> dict[str, Any]:
        """A single batch (`train_on_batch`) has been given, and is waited for by nobody."""
        inner = outputs.pop(COLLECTIVES, None)
        outer = self._collectives.noted()
        self._collectives.begin()
        if there is None:
            return outputs
        with tf.device("CPU:0"):
            if self._several:
                return {**outputs, STAMPS: self._added_up(there, _tensors(outputs))}
            stamps = tf.stack([there, *outer]) if outer else there
            if inner is not None:
                stamps = tf.concat([tf.reshape(stamps, [-1]), inner], 0)
            return {**outputs, STAMPS: stamps}

    def _added_up(self, there: tf.Tensor, outputs: list[tf.Tensor]) -> tf.Tensor:
        ended_at, waited_s = tf.unstack(self._tally)
        tally = tf.stack([when_there(outputs), waited_s + there - ended_at])
        self._tally.assign(tally)
        return tally


def _tensors(values: Any) -> list[tf.Tensor]:
    return [v for v in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(v)]
