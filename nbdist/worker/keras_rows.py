"""Whether a model's step can be computed by parts of the rows of a batch.

Replicas share the rows of a batch. That gives the numbers of one device if losses and metrics are
means or sums over rows and no row depends on another. Models of Keras's own layers, losses and
metrics are known to be so. Another model is tried: a few rows of the first batch by parts on all
replicas, and as a whole on each. If gradients or results differ, every replica computes all rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.metrics.reduction_metrics import MeanMetricWrapper
from tensorflow.python.ops import gen_random_ops

from nbdist.worker import state
from nbdist.worker.finite import FiniteWatch
from nbdist.worker.keras_batches import Batch, has_equal_rows, rows_of
from nbdist.worker.keras_inputs import gather_over
from nbdist.worker.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TRIED_ROWS = 64
"""Rows of each replica in a trial, at most."""

_OF_STEP = ("train_step", "test_step", "compute_loss", "_compute_loss", "compute_metrics")
_MIXING_LAYERS = (
    *("Lambda", "MixUp", "CutMix", "RandAugment", "AugMix"),
    *("TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper"),
)
_MIXING_LOSSES = ("dice", "tversky", "circle")
"""Those of Keras's own in which rows meet, or that call functions of the user's."""

_SEPARABLE = (None, "sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")
_TOLERANCE = {"float64": 1e-9, "float32": 2e-5}
"""Relative to the largest number of a value; float32 adds up rows in another order."""

_COARSE_TOLERANCE = 5e-2

Trial = dict[str, np.ndarray]
"""Gradients over all replicas and results of a step, by name."""


class Rows:
    """What is known of how a model treats rows.

    Args:
        model: a Keras model.
        try_out: runs the step on a batch, with all rows at once or by parts, and leaves no trace
            in the model.
        predicts: the step is a prediction, without losses and metrics.
    """

    def __init__(
        self, model: Any, try_out: Callable[[Batch, bool], Trial], *, predicts: bool = False
    ) -> None:
        self._model = model
        self._try_out = try_out
        self._predicts = predicts
        self._all_needed = self._tried = False

    def are_all_needed(self, batch: Batch) -> bool:
        """Whether every replica has to compute all rows of this batch.

        A model that is not known is tried again with the first batch of each pass.
        """
        if not has_equal_rows(batch.data):
            _note(self._model, "is given parts with different numbers of rows in one batch")
            return True
        if self._all_needed or self.are_apart:
            return self._all_needed
        if batch.is_first or not self._tried:
            self._tried, self._all_needed = True, self._find(batch)
        return self._all_needed

    @functools.cached_property
    def are_apart(self) -> bool:
        """Whether the model is known to treat each row by itself."""
        model = self._model
        if _has_fixed_rows(model) or not _has_separable_layers(model):
            return False
        return self._predicts or has_separable_step(model)

    def _find(self, batch: Batch) -> bool:
        model = self._model
        if _has_fixed_rows(model):
            _note(model, "is made for batches of one size, or keeps a state of each row")
            return True
        if model.run_eagerly:
            _note(model, "runs eagerly, and is not made of Keras's own layers, losses and metrics")
            return True
        if batch.is_part:
            return False  # no rank has all rows to compare with: the user answers for it
        differing = self._differing(batch)
        if differing:
            _note(model, f"gives another `{differing}` for a part of a batch than for all of it")
        return bool(differing)

    def _differing(self, batch: Batch) -> str:
        """A result that is another by parts; empty if there is none. Parts are unequal."""
        strategy = self._model.distribute_strategy
        replicas = int(strategy.num_replicas_in_sync)
        rows = min(TRIED_ROWS * replicas, batch.total)
        rows -= rows % replicas == 0 and rows > replicas
        few = Batch(rows_of(batch.data, 0, rows), rows, batch.spec)
        with repeatable():
            parts = self._try_out(few, False)
        with repeatable():
            every = self._try_out(few, True)
        found = _first_difference(parts, every)
        names = list(every)
        number = names.index(found) if found else -1
        agreed = int(gather_over(strategy)(np.array([number], np.int32)).max())
        return names[agreed] if agreed >= 0 else ""


def _note(model: Any, why: str) -> None:
    state.current().note(
        "batch",
        f"{type(model).__name__} {why}: every worker computes all rows, as one device, without "
        "a speed-up. Use losses and metrics that are means over rows, or a step cell (--data)",
        warning=True,
    )


def _has_fixed_rows(model: Any) -> bool:
    inputs = getattr(model, "inputs", None) or []
    stateful = any(getattr(layer, "stateful", False) for layer in model._flatten_layers())
    return stateful or any(tensor.shape and tensor.shape[0] is not None for tensor in inputs)


def _has_separable_layers(model: Any) -> bool:
    """Whether all operations are layers of Keras's own that treat each row by itself."""
    return all(map(_is_separable_layer, model._flatten_layers()))


def _is_separable_layer(layer: Any) -> bool:
    """Whether it is Keras's own, and so is all that it calls."""
    if not _is_of_keras(type(layer)) or type(layer).__name__ in _MIXING_LAYERS:
        return False
    values = vars(layer)
    axes = [*np.ravel(values.get("axis", -1)), *np.ravel(values.get("axes", -1))]
    operations = getattr(layer, "operations", [])
    return (
        0 not in axes
        and all(isinstance(operation, keras.layers.Layer) for operation in operations)
        and (isinstance(layer, keras.Model) or all(map(_is_of_keras_or_data, values.values())))
    )


def _is_of_keras_or_data(value: Any) -> bool:
    """Whether it calls no function of the user's, as an activation or a regularizer would."""
    if not callable(value) or isinstance(value, keras.layers.Layer):
        return True
    return any(_is_of_keras(what) for what in (value, type(value)))


def has_separable_step(model: Any) -> bool:
    """Whether step, losses and metrics are Keras's own, and means or sums over rows."""
    own = any(
        name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)
        for name in _OF_STEP
    )
    return (
        not own
        and all(map(_is_separable_loss, tree.flatten(model.loss)))
        and all(map(_is_separable_metric, _metrics_of(model)))
    )


def _is_separable_loss(loss: Any) -> bool:
    if loss is None or isinstance(loss, str):
        return loss is None or loss.lower() not in _MIXING_LOSSES
    if isinstance(loss, keras.losses.Loss):
        name, reduction = type(loss).__name__, loss.reduction
        made_of = getattr(loss, "fn", loss.call)
        return (
            _is_of_keras(type(loss))
            and _is_of_keras(made_of)
            and name.lower() not in _MIXING_LOSSES
            and reduction in _SEPARABLE[1:]
        )
    return _is_of_keras(loss) and loss.__name__ not in _MIXING_LOSSES


def _metrics_of(model: Any) -> list[Any]:
    groups = model.metrics
    return [m for group in groups for m in (group, *getattr(group, "metrics", []))]


def _is_separable_metric(metric: Any) -> bool:
    made_of = metric._fn if isinstance(metric, MeanMetricWrapper) else type(metric)
    return _is_of_keras(type(metric)) and _is_of_keras(made_of)


def _is_of_keras(what: Any) -> bool:
    module = getattr(what, "__module__", "") or ""
    return module.startswith("keras.src.")


class Recorder(FiniteWatch):
    """Keeps the gradients of a step that is tried out.

    Of IndexedSlices also the squares of their rows, which Keras makes before it adds up equal ones.
    """

    def __init__(self, *, is_traced: bool) -> None:
        super().__init__()
        self.is_traced = is_traced
        self.gradients: list[tf.Tensor] = []

    def after_mean(self, means: Sequence[Any]) -> list[Any]:
        rows = [mean for mean in means if isinstance(mean, tf.IndexedSlices)]
        squares = [tf.IndexedSlices(r.values**2, r.indices, r.dense_shape) for r in rows]
        self.gradients += [tf.convert_to_tensor(mean) for mean in (*means, *squares)]
        return list(means)


@contextlib.contextmanager
def unchanged(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Put back the values that variables have now."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Random operations without a state of TensorFlow's draw the same numbers in each trial."""
    numbers = itertools.count()

    def normal(shape: Any, dtype: Any, **_: Any) -> Any:
        return tf.random.stateless_normal(shape, [next(numbers), 0], dtype=dtype)

    def uniform(shape: Any, dtype: Any, **_: Any) -> Any:
        return tf.random.stateless_uniform(shape, [next(numbers), 0], dtype=dtype)

    def integers(shape: Any, minval: Any, maxval: Any, **_: Any) -> Any:
        return tf.random.stateless_uniform(
            shape, [next(numbers), 0], minval, maxval, dtype=minval.dtype
        )

    def truncated(shape: Any, dtype: Any, **_: Any) -> Any:
        return tf.random.stateless_truncated_normal(shape, [next(numbers), 0], dtype=dtype)

    with contextlib.ExitStack() as changes:
        for name, ours in [
            ("random_standard_normal", normal),
            ("random_uniform", uniform),
            ("random_uniform_int", integers),
            ("truncated_normal", truncated),
        ]:
            changes.enter_context(replaced(gen_random_ops, name, ours))
        yield


def _first_difference(parts: Trial, every: Trial) -> str:
    """The name of the first result that differs by more than rounding; empty if none does."""
    gradients = [_size(value) for name, value in every.items() if name.startswith("gradient")]
    floor = 1e-5 * max(gradients, default=0.0)
    for name, one in every.items():
        tolerance = _TOLERANCE.get(str(one.dtype), _COARSE_TOLERANCE)
        allowed = tolerance * max(_size(one), floor)
        other = parts[name]
        if one.shape != other.shape or not np.allclose(
            one.astype(np.float64), other.astype(np.float64), rtol=0, atol=allowed, equal_nan=True
        ):
            return name
    return ""


def _size(value: np.ndarray) -> float:
    return float(np.abs(value.astype(np.float64)).max(initial=0.0))
