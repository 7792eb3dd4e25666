"""Keras's train, test and predict functions over all replicas, with the results of one device.

Each function takes global batches and gives every replica its rows
(`worker/tensorflow/keras/batches.py`). It runs Keras's step on them with the arithmetic of one
device (`worker/tensorflow/replica/single_device_math.py`). A single all-reduce combines the results
of a step over all replicas. Metrics come from the sums of their variables, other scalars are the
mean over all rows. `worker/tensorflow/keras/fit_patch.py` applies it to Keras.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import tensorflow as tf

from nbdist.errors import StepError
from nbdist.private_api.keras import tensorflow_trainer as keras_trainer
from nbdist.private_api.keras import tree
from nbdist.worker.runtime import context
from nbdist.worker.runtime.signals import Signals, note_missing
from nbdist.worker.tensorflow.keras.batches import (
    Batch,
    Place,
    given,
    has_known_rows,
    rows_in,
    rows_of,
)
from nbdist.worker.tensorflow.keras.inputs import agreed
from nbdist.worker.tensorflow.keras.results import Results
from nbdist.worker.tensorflow.keras.row_independence import Rows, has_separable_step
from nbdist.worker.tensorflow.keras.step_trial import Recorder, unchanged
from nbdist.worker.tensorflow.replica import (
    layer_state,
    nested_merge,
    sample_random,
    signals,
    single_device_math,
)
from nbdist.worker.tensorflow.replica import metrics as keras_metrics
from nbdist.worker.tensorflow.replica.batch_share import CountedShares, OnePart, Share, Shares
from nbdist.worker.tensorflow.replica.finite import FiniteWatch
from nbdist.worker.tensorflow.replica.inlined_functions import inlined_functions
from nbdist.worker.tensorflow.replica.sample_random import Draws
from nbdist.worker.tensorflow.runtime import collective_timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.keras.train_function_timing import CallTimes
    from nbdist.worker.tensorflow.keras.step_trial import Results as TrialResults
    from nbdist.worker.tensorflow.replica.batch_share import Division

COLLECTIVES = "?collectives"
"""Name of the timestamps that nbdist adds to the values that a step returns."""


class _CallTimes(msgspec.Struct, frozen=True):
    """Times of one call of a train function.

    Attributes:
        inputs: request and arrival of each batch, in seconds of `time.perf_counter`.
        stamps: begin and end of each collective of the last step: shape (2 * collectives,).
        clock: clock that reads the stamps.
        signals: reads the signals of the last step.
    """

    inputs: tuple[tuple[float, float], ...]
    stamps: tf.Tensor | None
    clock: collective_timing.NoClock
    signals: Callable[[], Signals]

    def measured(self, since_s: float, steps: int) -> dict[str, float]:
        waited = sum(max(0.0, there - max(asked, since_s)) for asked, there in self.inputs)
        return {"input_s": waited / steps, **self.clock.measured(self.stamps)}


class ReplicatedStep:
    """Keras step on all replicas. Keras calls it with an iterator.

    Args:
        model: model of the step.
        step: `train_step` or `test_step`. It takes the rows of a replica.
        trains: True for `train_step`.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], *, trains: bool = False) -> None:
        self._model = model
        self._step = model._autoconvert_optionals(step)
        self._strategy = model.distribute_strategy
        self._signals: signals.AnySignals = signals.NO_SIGNALS
        if trains:
            self._signals = signals.signals_of(self._strategy, lambda: {"": model.optimizer})
        self._place = Place.of(self._strategy)
        self._rows = Rows(model, self._trace_trial)
        self._watch = FiniteWatch()
        self._draws = Draws()
        self._clock = collective_timing.choose(
            self._strategy, COLLECTIVES, jit=bool(model.jit_compile) or model.run_eagerly
        )
        self._compiled = {
            False: _compiled(model, self._on_replicas),
            True: _compiled(model, self._on_replicas_recorded),
        }
        self._records = False
        self._traced: dict[bool, dict[Any, Callable[..., Any]]] = {False: {}, True: {}}

    def __call__(self, iterator: Iterator[Any]) -> tuple[Any, CallTimes]:
        """Run `steps_per_execution` steps, or fewer at the end of the data.

        Raises:
            StopIteration: no data remain.
        """
        outputs: Any = None
        inputs = []
        self._records = self._signals.prepare(self._model.steps_per_execution)
        for _ in range(self._model.steps_per_execution):
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            inputs.append((asked, time.perf_counter()))
            outputs = self._made(batch)
        if not inputs:
            raise StopIteration
        stamps = found = None
        if isinstance(outputs, dict):
            outputs = dict(outputs)
            stamps, found = outputs.pop(COLLECTIVES, None), outputs.pop(signals.NAME, None)
        elif self._records:
            note_missing("signals of training", "the train_step of the model returns no dict")
        read = functools.partial(self._signals.read, found)
        return outputs, _CallTimes(tuple(inputs), stamps, self._clock, read)

    def _made(self, batch: Any) -> Any:
        """Run one step on a global batch, or on a batch that the user has distributed."""
        if not isinstance(batch, Batch):
            if _is_distributed(batch):
                return self._of_user(batch)
            batch = self._given(batch)
        place, total = self._place, batch.total
        whole = place.replicas == 1 or total < place.replicas or self._rows.are_all_needed(batch)
        if whole and batch.is_part:
            raise StepError(
                f"--own-data: every worker must compute all rows of {type(self._model).__name__}'s "
                "batches, and has only its own: give all ranks the same data and remove --own-data"
            )
        data = batch.data if whole or batch.is_part else place.rank_rows(batch.data, total)
        even = whole or total % place.replicas == 0
        function, traced = self._compiled[self._records], self._traced[self._records]
        return _call(function, traced, batch, data, whole=whole, even=even)

    def _of_user(self, parts: Any) -> Any:
        """Run a step on user-distributed parts of a batch. Its size and order are unknown."""
        if self._place.replicas > 1 and not self._rows.treats_rows_independently:
            raise StepError(
                f"{type(self._model).__name__} is not made of Keras's own layers, losses and "
                "metrics: nbdist cannot test whether parts of a distributed data set give the "
                "results of one device. Pass the original data set to `fit`: nbdist divides it"
            )
        return self._compiled[self._records](parts, None, whole=False, even=False)

    def _given(self, data: Any) -> Batch:
        """Return the batch of `train_on_batch` or `test_on_batch`. Ranks compare their batches."""
        batch = given(data)
        return batch if self._place.replicas == 1 else agreed(batch, self._strategy)

    def _on_replicas(self, data: Any, total: Any, *, whole: bool, even: bool) -> Any:
        return self._over_shares(data, self._shares(total, whole, even), self._watch)

    def _on_replicas_recorded(self, data: Any, total: Any, *, whole: bool, even: bool) -> Any:
        shares = self._shares(total, whole, even)
        return self._over_shares(data, shares, self._watch, self._signals)

    def _shares(self, total: Any, whole: bool, even: bool) -> Shares | CountedShares:
        replicas = self._place.replicas
        if total is None:
            return CountedShares(replicas)
        return Shares(total, replicas, whole=whole, even=even)

    def _over_shares(
        self,
        data: Any,
        shares: Shares | CountedShares,
        watch: FiniteWatch,
        recorder: signals.AnySignals = signals.NO_SIGNALS,
    ) -> Any:
        if shares.replicas == 1:
            with nested_merge.allowed(self._strategy, equal_rows=True), recorder.installed():
                return self._strategy.run(self._recorded, args=(data, recorder))
        results = Results(shares)
        self._clock.begin()

        def on_replica(data: Any) -> Any:
            watch.begin()
            if isinstance(shares, CountedShares):
                shares.count(rows_in(data))
            elif self._place.local > 1 and not shares.whole:
                data = _of_replica(data, shares, self._place)
            recorder.begin()
            outputs = results.over_replicas(self._step(data))
            if isinstance(outputs, dict):
                outputs = {**outputs, **self._clock.stamps(), **recorder.values()}
            return outputs

        with (
            single_device_math.arithmetic(
                shares, watch, self._draws, keras_metrics.look_up(shares, self._look(results))
            ),
            self._clock.installed(),
            inlined_functions(),
            nested_merge.allowed(self._strategy, equal_rows=shares.whole),
            layer_state.separate_replicas(self._strategy),
            recorder.installed(),
        ):
            outputs = self._strategy.run(on_replica, args=(data,))
        return first_of(self._strategy, outputs)

    def _recorded(self, data: Any, recorder: signals.AnySignals) -> Any:
        """Run the step on the only replica, and add its signals."""
        recorder.begin()
        outputs = self._step(data)
        return {**outputs, **recorder.values()} if isinstance(outputs, dict) else outputs

    def _look(self, results: Results) -> Callable[..., Any] | None:
        """Return how to make results of metrics. None if the user's step may compute with them."""
        return results.of if has_separable_step(self._model) else None

    def _trace_trial(self, few: Batch, whole: bool) -> Callable[[Any], TrialResults]:
        """Trace a step for a trial. The trial leaves the model's variables unchanged."""
        rank_rows = functools.partial(self._place.rank_rows, total=few.total)

        def tried(data: Any) -> tuple[Any, list[tf.Tensor]]:
            recorder = Recorder(is_traced=not self._model.run_eagerly)
            shares = Shares(few.total, self._place.replicas, whole=whole, even=whole)
            outputs = self._over_shares(data, shares, recorder)
            return outputs, first_of(self._strategy, recorder.gradients)

        data = few.data if whole else rank_rows(few.data)
        spec = tree.map_structure(tf.type_spec_from_value, data)
        traced = tf.function(tried, autograph=False).get_concrete_function(spec)

        def run(data: Any) -> TrialResults:
            with unchanged(traced.graph.variables):
                outputs, gradients = traced(data if whole else rank_rows(data))
                written = self._written()
            return _named(outputs, gradients) | written

        return run

    def _written(self) -> TrialResults:
        """Return this replica's layer variables without an optimizer, such as statistics."""
        counted = {id(v) for metric in self._model.metrics for v in metric.variables}
        return {
            f"variable {n}: {v.path}": first_of(self._strategy, v.value).numpy()
            for n, v in enumerate(self._model.non_trainable_variables)
            if id(v) not in counted
        }


class ReplicatedPredict:
    """Prediction on all replicas. Keras calls it with a list of batches.

    Every rank gets the predictions for all rows.

    Args:
        model: model whose `predict_step` is run.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._step = model._autoconvert_optionals(model.predict_step)
        self._strategy = model.distribute_strategy
        self._place = Place.of(self._strategy)
        self._rows = Rows(model, self._trace_trial, predicts=True)
        self._draws = Draws()
        self._compiled = _compiled(model, self._on_replicas)
        self._traced: dict[Any, Callable[..., Any]] = {}

    def __call__(self, batches: list[Any]) -> Any:
        outputs = [self._made(batch) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return tree.map_structure(lambda *parts: keras_trainer.concat(list(parts)), *outputs)

    def _made(self, batch: Any) -> Any:
        if not isinstance(batch, Batch):  # from `predict_on_batch`, or distributed by the user
            return self._compiled(batch, None, gathers=_is_distributed(batch))
        total = batch.total
        replicas = self._place.replicas
        if batch.is_part and context.current().request.options.own_data:
            if self._place.local > 1:
                raise StepError(
                    "--own-data: predict needs one replica on each rank: remove --own-data"
                )
            return self._compiled(batch.data, None, gathers=False)
        gathers = 1 < replicas <= total and not self._rows.are_all_needed(batch)
        takes = gathers and not batch.is_part
        data = self._place.rank_rows(batch.data, total) if takes else batch.data
        return _call(self._compiled, self._traced, batch, data, gathers=gathers)

    def _on_replicas(self, data: Any, total: Any, *, gathers: bool) -> Any:
        if not gathers or total is None:
            return self._over_shares(data, None, gathers=gathers)
        return self._over_shares(data, Shares(total, self._place.replicas, even=False))

    def _over_shares(self, data: Any, shares: Division | None, *, gathers: bool = True) -> Any:
        """Predict the rows of each replica, with the random numbers of these rows.

        Args:
            data: rows of this rank.
            shares: division of the global batch. None if each replica draws for itself.
            gathers: True to return the predictions of all replicas.
        """

        def on_replica(data: Any) -> Any:
            if gathers and self._place.local > 1 and isinstance(shares, Shares):
                data = _of_replica(data, shares, self._place)
            outputs = self._step(data)
            if not gathers:
                return outputs
            replica = tf.distribute.get_replica_context()
            return tree.map_structure(  # an output may be the input, which has no device
                lambda value: replica.all_gather(tf.identity(value), axis=0), outputs
            )

        with contextlib.ExitStack() as changes:
            if shares is not None:
                changes.enter_context(sample_random.installed(shares, self._draws))
            return first_of(self._strategy, self._strategy.run(on_replica, args=(data,)))

    def _trace_trial(self, few: Batch, whole: bool) -> Callable[[Any], TrialResults]:
        """Trace a trial on this rank alone: predictions for two parts, or for all rows."""
        halves = Shares(few.total, 2, whole=whole, even=False)
        traced = [self._traced_part(few, halves.of(n)) for n in range(1 if whole else 2)]

        def run(data: Any) -> TrialResults:
            parts = [function(data) for function in traced]
            return {
                f"output {n}": np.concatenate([np.asarray(part) for part in output])
                for n, output in enumerate(zip(*parts, strict=True))
            }

        return run

    def _traced_part(self, few: Batch, share: Share) -> Callable[[Any], list[Any]]:
        """Trace predictions of some rows of a trial. They leave the states of draws unchanged."""

        def predict(data: Any) -> Any:
            return self._over_shares(data, OnePart(share), gathers=False)

        rows = share.offset, share.rows
        traced = tf.function(predict, autograph=False)
        function = traced.get_concrete_function(rows_of(few.data, *rows))

        def run(data: Any) -> list[Any]:
            with unchanged([v for v in function.graph.variables if not v.trainable]):
                outputs: list[Any] = tree.flatten(function(rows_of(data, *rows)))
                return outputs

        return run


def _named(outputs: Any, gradients: list[tf.Tensor]) -> TrialResults:
    """Return results and gradients of a step by name, as a flat dict."""
    named = {f"gradient {n}": gradient for n, gradient in enumerate(gradients)}
    if isinstance(outputs, dict):
        named |= {name: value for name, value in outputs.items() if name != COLLECTIVES}
    return {
        f"{name} {n}".removesuffix(" 0"): np.asarray(leaf)
        for name, value in named.items()
        for n, leaf in enumerate(tree.flatten(value))
    }


def _compiled(model: Any, function: Callable[..., Any]) -> Any:
    replicas = model.distribute_strategy.num_replicas_in_sync
    if model.jit_compile and replicas > 1 and not tf.config.list_physical_devices("GPU"):
        raise StepError(
            "jit_compile=True: TensorFlow's XLA has no collectives between CPUs, and this model "
            f"has {replicas} replicas: remove it from `compile`, or use --strategy pjrt"
        )
    if model.run_eagerly:
        return function
    return tf.function(
        function, autograph=False, reduce_retracing=True, jit_compile=model.jit_compile
    )


def _call(function: Any, traced: dict[Any, Any], batch: Batch, data: Any, **kind: bool) -> Any:
    """Call a function that is traced once for each spec of the data.

    Partial batches share a trace.

    Args:
        function: takes the data of a rank and the number of rows of the global batch.
        traced: existing traces of the function.
        batch: global batch.
        data: this rank's rows of the batch, or all rows.
        kind: Python values that the function depends on.
    """
    if batch.spec is None or not isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function(data, batch.total, **kind)
    spec, total = batch.spec, tf.TensorSpec([], tf.int32)
    if has_known_rows(spec):
        spec, total = tree.map_structure(tf.type_spec_from_value, data), batch.total
    key = (str(spec), total, *kind.items())
    if key not in traced:
        traced[key] = function.get_concrete_function(spec, total, **kind)
    return traced[key](data, batch.total, **kind)


def first_of(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """Return the values of this rank's first replica, for values that are equal on all replicas."""
    return tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)


def _of_replica(data: Any, shares: Shares, place: Place) -> Any:
    """Return a replica's rows out of the rows of its rank."""
    share = shares.here()
    return rows_of(data, share.offset - shares.of(place.first).offset, share.rows)


def _is_distributed(data: Any) -> bool:
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tree.flatten(data))
