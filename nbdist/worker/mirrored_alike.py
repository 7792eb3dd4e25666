"""What ranks should have alike under the mirrored strategy: what is trained, and what goes with it.

That is trainable variables, what optimizers keep, and seeds. Not so metrics, and not statistics
that layers take of their samples: a layer may assign another value on each replica, though
TensorFlow calls the variable mirrored. Those of Keras's BatchNormalization are the same on all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from nbdist.worker.digest import Digest, of_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Alike:
    """Mirrored variables.

    Args:
        owners: objects by the names that lead to them: variables, models, optimizers and the like.
        extra: further variables, by name.
    """

    def __init__(self, owners: Mapping[str, Any], extra: Iterable[tuple[str, Any]] = ()) -> None:
        listed = [
            (_described(name, variable, owner), variable)
            for name, owner in owners.items()
            for variable in _alike(owner)
        ]
        values = ((name, _value(variable)) for name, variable in (*listed, *extra))
        unlike = {id(value): (name, value) for name, value in values if _is_mirrored(value)}
        self._components = [(name, value.values[0]) for name, value in unlike.values()]
        self._ids = unlike.keys()

    def holds(self, value: Any) -> bool:
        """Whether a variable of TensorFlow's is one of them."""
        return id(value) in self._ids

    def digests(self) -> list[Digest]:
        """Of this rank's own copies; read by the op, for a fifth of what `numpy()` takes."""
        return [
            Digest(name, of_array(_read(component).numpy())) for name, component in self._components
        ]


def _read(component: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=component.handle, dtype=component.dtype)


def _alike(owner: Any) -> Iterable[Any]:
    if isinstance(owner, keras.layers.Layer):
        own = (*owner.non_trainable_weights, *owner.metrics_variables)
        others = {id(variable) for variable in own}
        return [variable for variable in owner.variables if id(variable) not in others]
    if isinstance(owner, BaseOptimizer):
        return list(owner.variables)
    if isinstance(owner, keras.metrics.Metric):
        return []
    if isinstance(owner, tf.Module):
        return list(owner.trainable_variables)
    return [owner] if owner.trainable else []


def _described(name: str, variable: Any, owner: Any) -> str:
    if variable is owner:
        return name
    path = variable.path if isinstance(variable, keras.Variable) else variable.name.split(":")[0]
    return f"{name}: {path}"


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _is_mirrored(value: Any) -> bool:
    if not isinstance(value, tf.distribute.DistributedValues):
        return False
    return bool(value.synchronization != tf.VariableSynchronization.ON_READ)
