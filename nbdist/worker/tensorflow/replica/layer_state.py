"""Separate layer attributes for each replica of a process.

The replicas of one process are threads that share the layers of a model. They take turns at
synchronization points, such as the moments of BatchNormalization. Keras stores the losses of a call
in its layers, and the first layer of a call clears them. A replica can therefore clear the losses
of another, so that their gradients are lost or counted twice. The same happens to dropout masks of
recurrent cells, and to tensors that a user's layer assigns to `self`.

In nbdist each replica reads the values that it has assigned itself. After the step, the layers
contain the values of the first replica. A list that was assigned before the step is shared, as
upstream. Written for Keras 3.15. `tests/worker/tensorflow/keras/test_fit_local.py` fails if the
patch is no longer needed.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.replica.batch_share import replica_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COLLECTIONS: dict[str, Callable[[], Any]] = {"_losses": list, "_loss_ids": set}
"""Attributes that Keras layers modify in place. They are empty at the start of a step."""

_TENSORS = (tf.Tensor, tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)
_set_upstream = keras.layers.Layer.__setattr__


@contextlib.contextmanager
def separate_replicas(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Separate layer state while a step is traced or run, if a process has several replicas."""
    if len(strategy.extended.worker_devices) == 1:
        yield
        return
    replica_values = _ReplicaValues()
    with contextlib.ExitStack() as changes:

        def set_attribute(layer: Any, name: str, value: Any) -> None:
            owner = type(layer)
            is_free = not inspect.isdatadescriptor(inspect.getattr_static(owner, name, None))
            if is_free and _replica() is not None and _is_state(value):
                changes.enter_context(
                    replaced(owner, name, _Attribute(replica_values, owner, name))
                )
            _set_upstream(layer, name, value)

        layers = keras.layers.Layer
        for name in _COLLECTIONS:
            changes.enter_context(replaced(layers, name, _Attribute(replica_values, layers, name)))
        changes.enter_context(replaced(layers, "__setattr__", set_attribute))
        changes.callback(replica_values.give_first)
        yield


class _ReplicaValues:
    """Values by layer, name and replica."""

    def __init__(self) -> None:
        self._layers: dict[int, Any] = {}
        self._values: dict[tuple[int, str], dict[int, Any]] = {}

    def of(self, layer: Any, name: str) -> dict[int, Any]:
        """Return the values of an attribute by replica."""
        self._layers[id(layer)] = layer
        return self._values.setdefault((id(layer), name), {})

    def give_first(self) -> None:
        """Set layers to the values of the first replica."""
        for (layer, name), values in self._values.items():
            if values:
                vars(self._layers[layer])[name] = values[min(values)]


class _Attribute:
    """Attribute with a value for each replica. The default is the value of the layer.

    Args:
        replica_values: values of the step.
        owner: class that gets the attribute.
        name: name of the attribute.
    """

    def __init__(self, replica_values: _ReplicaValues, owner: type, name: str) -> None:
        self._replica_values = replica_values
        self._name = name
        self._default = inspect.getattr_static(owner, name, None)
        self._has_default = name in dir(owner)

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self._inherited(owner)
        replica = _replica()
        values = self._replica_values.of(layer, self._name)
        if replica is not None and replica not in values and self._name in _COLLECTIONS:
            values[replica] = _COLLECTIONS[self._name]()
        if replica in values:
            return values[replica]
        if self._name in vars(layer):
            return vars(layer)[self._name]
        return values[min(values)] if values else self._inherited(owner)

    def __set__(self, layer: Any, value: Any) -> None:
        replica = _replica()
        if replica is None:
            vars(layer)[self._name] = value
        else:
            self._replica_values.of(layer, self._name)[replica] = value

    def __delete__(self, layer: Any) -> None:
        replica = _replica()
        if replica is not None:
            self._replica_values.of(layer, self._name).pop(replica, None)
        vars(layer).pop(self._name, None)

    def _inherited(self, owner: type | None) -> Any:
        if not self._has_default:
            raise AttributeError(f"{owner and owner.__name__} has no attribute {self._name!r}")
        return self._default


def _replica() -> int | None:
    """Return the id of the calling replica. None outside of replicas."""
    is_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return replica_id() if is_replica else None


def _is_state(value: Any) -> bool:
    """Return True for tensors, for collections with tensors, and for empty collections."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        return not value or any(_is_state(part) for part in value)
    return isinstance(value, _TENSORS)
