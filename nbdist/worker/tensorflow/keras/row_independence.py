"""Detection of models whose step replicas can compute on parts of a batch.

Replicas share the rows of a batch. The results equal those of one device if losses and metrics are
means or sums over rows, and no row depends on another. This is known for models of Keras's own
layers, losses and metrics. nbdist tries other models (`worker/tensorflow/keras/step_trial.py`). If
gradients or results of parts differ from those of the whole batch, every replica computes all rows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from nbdist.private_api.keras import MeanMetricWrapper, tree
from nbdist.worker.runtime import context
from nbdist.worker.tensorflow.keras.batches import has_equal_rows
from nbdist.worker.tensorflow.keras.row_kinds import RowKinds, rare_first
from nbdist.worker.tensorflow.keras.step_trial import Trials
from nbdist.worker.tensorflow.replica.metrics import is_of_keras

if TYPE_CHECKING:
    from nbdist.worker.tensorflow.keras.batches import Batch
    from nbdist.worker.tensorflow.keras.step_trial import Trace

_OF_STEP = ("train_step", "test_step", "compute_loss", "_compute_loss", "compute_metrics")
_MIXING_LAYERS = (
    *("Lambda", "MixUp", "CutMix", "RandAugment", "AugMix"),
    *("TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper"),
)
_MIXING_LOSSES = ("dice", "tversky", "circle")
"""Layers and losses of Keras that combine rows or call functions of the user."""

_SEPARABLE = (None, "sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")


class Rows:
    """Test of whether a model treats each row independently.

    Args:
        model: Keras model.
        trace: traces its step for trials.
        predicts: True if the step is a prediction, without losses and metrics.
    """

    def __init__(self, model: Any, trace: Trace, *, predicts: bool = False) -> None:
        self._model = model
        self._trials = Trials(model.distribute_strategy, trace)
        self._predicts = predicts
        self._all_needed = self._tried = False
        self._kinds = RowKinds()

    def are_all_needed(self, batch: Batch) -> bool:
        """Return True if every replica must compute all rows of this batch.

        An unknown model is tried with the first batch of each pass. In the first pass through the
        data, it is also tried with batches 2, 3, 5, 9, ... and with batches that contain a new kind
        of row (`worker/tensorflow/keras/row_kinds.py`).
        """
        if not has_equal_rows(batch.data):
            why = "is given parts with different numbers of rows in one batch"
            _note(self._model, why, "Give all parts the same number of rows to divide them")
            return True
        if not (self._all_needed or self.treats_rows_independently) and self._is_due(batch):
            self._all_needed = self._find(batch)
            self._tried = True
        return self._all_needed

    @functools.cached_property
    def treats_rows_independently(self) -> bool:
        """Return True if the model is known to treat each row independently."""
        return treats_rows_independently(self._model, predicts=self._predicts)

    def _is_due(self, batch: Batch) -> bool:
        if self._tried and (batch.is_part or (batch.number and not batch.is_new)):
            return False
        has_new = self._kinds.is_new(batch.data)
        if not self._tried or batch.number & (batch.number - 1) == 0:
            return True
        return bool(self._trials.agree(has_new))

    def _find(self, batch: Batch) -> bool:
        model = self._model
        if _is_stateful(model):
            _note(model, "keeps a state for each row")
            return True
        if model.run_eagerly:
            _note(model, "runs eagerly, and is not made of Keras's own layers, losses and metrics")
            return True
        if batch.is_part:
            return False  # no rank has all rows to compare with: the user must ensure it
        if not self._tried and self._trials.agree(_is_known(model)):
            _note(model, "needed all rows in an earlier run of this cell")
            return True
        found = self._trials.difference(batch, rare_first(batch.data))
        if found and self._tried:
            _known.add(_key(model))
        if found:
            late = _LATE.format(number=batch.number + 1) if self._tried else ""
            _note(model, found + late, _MEANS if found.startswith("computes") else "")
        return bool(found)


def treats_rows_independently(model: Any, *, predicts: bool = False) -> bool:
    """Return True if the model is known to treat each row independently, without trials."""
    if _is_stateful(model) or not _has_separable_layers(model):
        return False
    return predicts or has_separable_step(model)


_LATE = (
    ", first in batch {number}. Earlier batches may have different results than on one device: "
    "run the cell again with a new model to compute all rows from the first batch on"
)
_MEANS = "Use losses and metrics that are means over rows, or a step cell (--data)"
_known: set[tuple[int, str]] = set()
"""Cells and models that needed all rows in a late batch."""


def _key(model: Any) -> tuple[int, str]:
    return context.current().cell_state.source, type(model).__qualname__


def _is_known(model: Any) -> bool:
    return _key(model) in _known


def _note(model: Any, why: str, remedy: str = "") -> None:
    text = (
        f"{type(model).__name__} {why}. Therefore every worker computes all rows, as one device "
        "would, without a speed-up"
    )
    text += f". {remedy}" * bool(remedy)
    context.current().reporter.note_once("batch", text, warning=True)


def _is_stateful(model: Any) -> bool:
    return any(getattr(layer, "stateful", False) for layer in model._flatten_layers())


def _has_separable_layers(model: Any) -> bool:
    """Return True if all operations are layers of Keras that treat each row independently."""
    return all(map(_is_separable_layer, model._flatten_layers()))


def _is_separable_layer(layer: Any) -> bool:
    """Return True if the layer and all that it calls belong to Keras and keep rows separate."""
    if not is_of_keras(type(layer)) or type(layer).__name__ in _MIXING_LAYERS:
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
    """Return True unless the value is a function of the user, such as an activation."""
    if not callable(value) or isinstance(value, keras.layers.Layer):
        return True
    return any(is_of_keras(what) for what in (value, type(value)))


def has_separable_step(model: Any) -> bool:
    """Return True if step, losses and metrics are Keras's own, and means or sums over rows."""
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
            is_of_keras(type(loss))
            and is_of_keras(made_of)
            and name.lower() not in _MIXING_LOSSES
            and reduction in _SEPARABLE[1:]
        )
    return is_of_keras(loss) and loss.__name__ not in _MIXING_LOSSES


def _metrics_of(model: Any) -> list[Any]:
    groups = model.metrics
    return [m for group in groups for m in (group, *getattr(group, "metrics", []))]


def _is_separable_metric(metric: Any) -> bool:
    made_of = metric._fn if isinstance(metric, MeanMetricWrapper) else type(metric)
    return is_of_keras(type(metric)) and is_of_keras(made_of)
