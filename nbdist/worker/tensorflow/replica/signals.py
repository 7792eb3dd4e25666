"""Signals of training in replicas (`nbdist/worker/runtime/signals.py`), computed in the graph.

The gradients are those that a tape returns in a replica. Under nbdist's arithmetic they are means
over all replicas, so each replica computes the norms of the global gradients without a collective.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from nbdist.worker.runtime import signals
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.replica.batch_share import replica_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.private_api.keras import BaseOptimizer

NAME = "?signals"
"""Name of the signals among the values of a step. It begins as other hidden names."""

_NO_RATE = "the step uses no Keras optimizer"
_NO_GRADIENTS = (
    "the step takes no gradient of variables with tf.GradientTape at its top level (inside of "
    "tf.range, tf.cond or a function with XLA it has none)"
)


class _Gradient(NamedTuple):
    """The last gradient of a variable in a step.

    Attributes:
        variable: the variable of TensorFlow.
        name: its path.
        before: its value before the step changed it.
        gradient: the gradient over the global batch.
    """

    variable: Any
    name: str
    before: tf.Tensor
    gradient: Any


class StepSignals:
    """Signals of a step, recorded while it is traced. Each replica is traced by its own thread.

    Args:
        strategy: strategy of all ranks.
        optimizers: returns the optimizers by name.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        optimizers: Callable[[], Mapping[str, BaseOptimizer]],
    ) -> None:
        self._optimizers = optimizers
        self._gradients: dict[int, dict[int, _Gradient]] = {}
        self._rates: dict[int, dict[str, tf.Tensor]] = {}
        self._scales: dict[int, Any] = {}
        self._names: tuple[str, ...] = ()
        self._rate_names: tuple[str, ...] = ()
        self._is_installed = self._is_due = False
        self._due: tf.Variable | None = None
        if signals.interval():
            with strategy.scope():
                first = tf.VariableAggregation.ONLY_FIRST_REPLICA
                self._due = tf.Variable(initial_value=False, trainable=False, aggregation=first)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Record gradients while a step is traced, after they are averaged over replicas."""
        gradient_before = tf.GradientTape.gradient

        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            found = gradient_before(tape, target, sources, *args, **kwargs)
            if tf.distribute.get_replica_context() is not None:
                self._note(tf.nest.flatten(sources), tf.nest.flatten(found))
            return found

        with (
            replaced(tf.GradientTape, "gradient", gradient),
            replaced(self, "_is_installed", ours=True),
        ):
            yield

    def prepare(self, steps: int = 1) -> bool:
        """Prepare the next steps, which run together. Returns True if they have signals."""
        is_due = self._due is not None and signals.is_due(steps)
        if self._due is not None and is_due != self._is_due:
            self._due.assign(is_due)
        self._is_due = is_due
        return signals.is_recorded(steps)

    def begin(self) -> None:
        """Begin the step of a replica: read the learning rates before the optimizers count it."""
        if not self._is_installed:
            return
        replica, optimizers = replica_id(), self._optimizers()
        self._gradients[replica] = {}
        self._rates[replica] = {
            _named(signals.RATE, name, optimizers): tf.cast(optimizer.learning_rate, tf.float32)
            for name, optimizer in optimizers.items()
        }
        scales = [
            tf.identity(optimizer.dynamic_scale)
            for optimizer in optimizers.values()
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        ]
        self._scales[replica] = scales[0] if len(scales) == len(optimizers) == 1 else None

    def values(self) -> dict[str, Any]:
        """Return the signals of this replica's step: numbers, and rows of histograms.

        Returns nothing for a program of the step without signals.
        """
        if not self._is_installed:
            return {}
        replica = replica_id()
        rates, found = self._rates[replica], self._found(replica)
        self._rate_names = tuple(rates)
        self._names = tuple(one.name for one in found)
        unknown = tf.constant(float("nan"))
        squares = [unknown] * 3
        if found:
            scale = self._scales[replica]
            factor = 1.0 if scale is None else 1 / tf.cast(scale, tf.float32)
            updates = [tf.cast(o.variable, o.before.dtype) - o.before for o in found]
            squares = [
                tf.square(factor) * _square([_dense(o.gradient) for o in found]),
                _square([o.before for o in found]),
                _square(updates),
            ]
        numbers = tf.stack([*squares, *rates.values()])
        if self._due is None or not found:
            return {NAME: (numbers,)}
        arrays = [array for o in found for array in (o.before, factor * _dense(o.gradient))]
        rows = tf.cond(
            tf.convert_to_tensor(self._due),
            lambda: tf.stack([_counted(array) for array in arrays]),
            lambda: tf.zeros((len(arrays), len(signals.MOMENTS) + signals.BINS)),
        )
        return {NAME: (numbers, rows)}

    def read(self, values: Any) -> signals.Signals:
        """Return the signals in the values of a step; empty without any.

        Args:
            values: value of `NAME` of one replica.
        """
        if values is None:
            return signals.NO_SIGNALS
        numbers, *rows = [value.numpy().tolist() for value in values]
        if not self._names:
            signals.note_missing("gradient norm, parameter norm and update ratio", _NO_GRADIENTS)
        if not self._rate_names:
            signals.note_missing("learning rate", _NO_RATE)
        rates = dict(zip(self._rate_names, numbers[3:], strict=True))
        return signals.Signals(
            signals.values_of(numbers[:3], rates), self._histograms(rows[0] if rows else [])
        )

    def _histograms(self, rows: Sequence[Sequence[float]]) -> dict[str, Any]:
        names = [f"{kind}/{n}" for n in self._names for kind in ("parameters", "gradients")]
        found = {n: signals.histogram_of(row) for n, row in zip(names, rows, strict=False)}
        return {name: histogram for name, histogram in found.items() if histogram is not None}

    def _note(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        noted = self._gradients.setdefault(replica_id(), {})
        for source, gradient in zip(sources, gradients, strict=True):
            if gradient is None or not isinstance(source, (tf.Variable, keras.Variable)):
                continue
            variable = source.value if isinstance(source, keras.Variable) else source
            known = noted.get(id(variable))
            before = tf.identity(variable) if known is None else known.before
            noted[id(variable)] = _Gradient(variable, _path(source), before, gradient)

    def _found(self, replica: int) -> list[_Gradient]:
        """Return all gradients; none if one is in another graph than the end of the step."""
        noted = list(self._gradients.get(replica, {}).values())
        if tf.executing_eagerly():
            return noted
        graph = tf.compat.v1.get_default_graph()
        are_here = (o.before.graph is graph and _graph_of(o.gradient) is graph for o in noted)
        return noted if all(are_here) else []


class NoSignals:
    """Signals of a step without `--watch`."""

    def installed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepare(self, steps: int = 1) -> bool:
        del steps
        return False

    def begin(self) -> None: ...

    def values(self) -> dict[str, Any]:
        return {}

    def read(self, values: Any) -> signals.Signals:
        del values
        return signals.NO_SIGNALS


AnySignals = StepSignals | NoSignals
NO_SIGNALS = NoSignals()


def signals_of(
    strategy: tf.distribute.Strategy, optimizers: Callable[[], Mapping[str, BaseOptimizer]]
) -> AnySignals:
    """Return the signals of a step; none unless the cell has the option `--watch`."""
    return StepSignals(strategy, optimizers) if signals.is_watched() else NO_SIGNALS


def _named(word: str, name: str, every: Mapping[str, object]) -> str:
    return f"{word} of {name}" if len(every) > 1 else word


def _path(variable: Any) -> str:
    path: str = getattr(variable, "path", None) or variable.name.split(":")[0]
    return path


def _graph_of(gradient: Any) -> Any:
    return (gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient).graph


def _dense(gradient: Any) -> tf.Tensor:
    """Return a gradient with each row once; the rows of IndexedSlices may repeat."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, tf.float32)
    rows, places = tf.unique(gradient.indices)
    values = tf.cast(gradient.values, tf.float32)
    return tf.math.unsorted_segment_sum(values, places, tf.size(rows))


def _square(arrays: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of the squares of all elements."""
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(array, tf.float32))) for array in arrays])


def _counted(array: tf.Tensor) -> tf.Tensor:
    """Return the row of a histogram: `MOMENTS`, then the counts."""
    flat = tf.reshape(tf.cast(array, tf.float32), [-1])
    finite = tf.boolean_mask(flat, tf.math.is_finite(flat))
    size = tf.size(finite)
    safe = tf.cond(size > 0, lambda: finite, lambda: tf.zeros((1,)))
    low = tf.reduce_min(safe)
    high = tf.maximum(tf.reduce_max(safe), low + tf.maximum(tf.abs(low), 1.0) * 1e-6)
    counts = tf.histogram_fixed_width(safe, [low, high], signals.BINS)
    moments = [
        *(low, high, tf.reduce_sum(finite), tf.reduce_sum(tf.square(finite))),
        tf.cast(size, tf.float32),
        tf.cast(tf.size(flat) - size, tf.float32),
    ]
    return tf.concat([tf.stack(moments), tf.cast(counts, tf.float32)], 0)
