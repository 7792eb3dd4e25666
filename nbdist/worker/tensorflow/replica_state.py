"""Mirrored variables that should be equal on all ranks, as `--guard` and plain cells compare them.

These are trainable variables, weights and seeds of layers, and variables of optimizers. Metrics are
not included, because each rank has its own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.private_api.keras import BaseOptimizer
from nbdist.worker.checkpoint.digest import Digest, of_array
from nbdist.worker.tensorflow.keras_objects import WITH_VARIABLES, tensorflow_variable
from nbdist.worker.tensorflow.variables import (
    is_compared,
    is_mirrored,
    read,
    untrained_of,
    variables_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

KINDS = (*WITH_VARIABLES, tf.Variable, keras.Variable)
"""Types of objects that have variables, or are variables."""


class EqualVariables:
    """Mirrored variables that should be equal on all ranks.

    Args:
        owners: variables, models, optimizers and similar objects by name.
        extra: further variables with their names.
        of_step: True for a step cell. It also compares variables that no optimizer trains, such as
            `tf.Variable(0.0, trainable=False)`: an average in it would be that of own rows.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        extra: Iterable[tuple[str, Any]] = (),
        *,
        of_step: bool = False,
    ) -> None:
        listed = (
            each
            for name, owner in owners.items()
            for each in _described(name, owner, _alike(owner))
        )
        unlike = {id(v): (name, v) for name, v in (*listed, *extra) if is_mirrored(v)}
        self._components = [(name, value.values[0]) for name, value in unlike.values()]
        self._ids = unlike.keys()
        if of_step:
            self._components += [
                (label, variable.values[0])
                for name, owner in owners.items()
                for label, variable in _described(name, owner, _untrained(owner))
                if is_compared(variable)
            ]

    def holds(self, value: Any) -> bool:
        """Return True if a TensorFlow variable is one of them."""
        return id(value) in self._ids

    def digests(self) -> list[Digest]:
        """Return digests of this rank's own copies."""
        return [Digest(name, of_array(read(part).numpy())) for name, part in self._components]


def described(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the TensorFlow variables of an object and of its optimizers, with their paths."""
    yield from _described(path, owner, _alike(owner))
    if isinstance(owner, keras.Model):
        for name, part in vars(owner).items():
            if isinstance(part, BaseOptimizer):
                yield from _described(f"{path}.{name}", part, part.variables)


def _described(name: str, owner: Any, variables: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for variable in variables:
        yield _path(name, variable, owner), tensorflow_variable(variable)


def _alike(owner: Any) -> Iterable[Any]:
    if isinstance(owner, keras.layers.Layer):
        own = {id(variable) for variable in owner.metrics_variables}
        return [variable for variable in owner.variables if id(variable) not in own]
    if isinstance(owner, BaseOptimizer):
        return list(owner.variables)
    if isinstance(owner, keras.metrics.Metric):
        return []
    return variables_of(owner)


def _untrained(owner: Any) -> Iterable[Any]:
    if isinstance(owner, keras.Variable):
        return [] if owner.trainable else [owner]
    return untrained_of(owner)


def _path(name: str, variable: Any, owner: Any) -> str:
    if variable is owner:
        return name
    path = variable.path if isinstance(variable, keras.Variable) else variable.name.split(":")[0]
    return f"{name}: {path}"
