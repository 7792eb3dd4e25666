"""New metrics in a compiled step, such as `mean = keras.metrics.Mean()` in each epoch.

A compiled step updates the variables of the metric that it was compiled with. A new metric of the
same kind takes over these variables, and the old one receives those of the new one.
"""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING, Any

import keras

from nbdist.private_api.keras import MeanMetricWrapper
from nbdist.worker.lifting.constants import Constants, is_same
from nbdist.worker.tensorflow.keras_objects import tensorflow_variable
from nbdist.worker.tensorflow.replica.metrics import is_of_keras

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import CodeType

    import tensorflow as tf


class BoundValues:
    """Values that the compiled programs of a step contain.

    Args:
        code: code of the step.
        names: names that the step reads.
        namespace: namespace of the step's function.
        weights: variables that a user may freeze.
    """

    def __init__(
        self,
        code: CodeType,
        names: Iterable[str],
        namespace: dict[str, Any],
        weights: Sequence[keras.Variable],
    ) -> None:
        read = {name: namespace[name] for name in names if name in namespace}
        self._constants = Constants(code, read)
        self._weights = () if self._constants.has_compiled else weights
        self._namespace = namespace
        self._values = read | self.behind()

    def behind(self, *, begins: bool = True) -> dict[str, Any]:
        """Return the values behind the step's functions, and which weights are trained.

        Args:
            begins: True at the first step of a pass through the loop.
        """
        trained = bytes(weight.trainable for weight in self._weights)
        return {**self._constants(begins=begins), "trainable": trained}

    def new_metrics(self, values: dict[str, Any]) -> list[tuple[Any, Any]] | None:
        """Return old and new metrics; None if other values have changed too."""
        before = self._values
        changed = {
            id(value): (before.get(name), value)
            for name, value in values.items()
            if not is_same(value, before.get(name))
        }
        if values.keys() != before.keys() or not all(starmap(_are_alike, changed.values())):
            return None
        return list(changed.values())

    def replace(self, values: dict[str, Any]) -> None:
        """Use these values in programs that are compiled later."""
        self._namespace.update(values)
        self._values = values


def _are_alike(old: Any, new: Any) -> bool:
    """Return True if two values are Keras's own metrics of one kind, with equal settings."""
    if not isinstance(old, keras.metrics.Metric) or type(old) is not type(new):
        return False
    made_of = old._fn if isinstance(old, MeanMetricWrapper) else type(old)
    return is_of_keras(type(old)) and is_of_keras(made_of) and _settings(old) == _settings(new)


def _settings(metric: Any) -> Any:
    """Return the settings of a metric without its name, and the shapes of its variables."""
    config = {name: value for name, value in metric.get_config().items() if name != "name"}
    return config, [(v.shape, v.dtype) for v in metric.variables]


def exchange(old: Any, new: Any, strategy: tf.distribute.Strategy) -> None:
    """Exchange the variables of two metrics. Both keep their values."""
    local = strategy.experimental_local_results
    for one, other in zip(old.variables, new.variables, strict=True):
        ours, theirs = tensorflow_variable(one), tensorflow_variable(other)
        for part, its in zip(local(ours), local(theirs), strict=True):
            value = part.numpy()
            part.assign(its.numpy())
            its.assign(value)
        one._value, other._value = theirs, ours
