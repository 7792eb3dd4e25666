"""Reader of TensorFlow's variables and tensors, for `worker/inspection/placement.py`.

Under MultiWorkerMirroredStrategy a worker knows only the copies of its own replicas.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from nbdist.records import OWN_RANK, LayoutKind, PlacedDevice
from nbdist.worker.inspection.types import ABSTRACT, ArrayLocation, Found, Inside

_CompositeTensor = tf.__internal__.CompositeTensor
_NO_DATA = (tf.resource, tf.variant)


def read(value: Any) -> Found | Inside | None:
    if isinstance(value, tf.distribute.DistributedValues):
        return _read_distributed(value)
    if isinstance(value, tf.Variable):
        return _found(value, _where("one device", value.device))
    if isinstance(value, tf.Tensor):
        if not isinstance(value, tf.__internal__.EagerTensor):
            return Found(_shape(value), value.dtype.name, 0, ABSTRACT)
        return (
            None if value.dtype in _NO_DATA else _found(value, _where("one device", value.device))
        )
    if isinstance(value, tf.Module):
        own = {k: part for k, part in vars(value).items() if not k.startswith("_self_")}
        return Inside([((f".{name}",), part) for name, part in own.items()])
    if isinstance(value, _CompositeTensor):
        parts = tf.nest.flatten(value, expand_composites=True)
        return Inside([((f"[{i}]",), part) for i, part in enumerate(parts)])
    return None


def _read_tensor(value: Any) -> Found | None:
    if value.dtype in _NO_DATA:
        return None
    if not isinstance(value, tf.__internal__.EagerTensor):
        return Found(_shape(value), value.dtype.name, 0, ABSTRACT)
    return _found(value, _where("one device", value.device))


def _read_distributed(value: Any) -> Found | Inside:
    replicas = value.values
    if not all(isinstance(replica, (tf.Variable, tf.Tensor)) for replica in replicas):
        return Inside([((f"[{i}]",), replica) for i, replica in enumerate(replicas)])
    if _is_kept_alike(value):
        return _found(replicas[0], _where("mirrored", *(r.device for r in replicas)))
    if len({(_shape(replica), replica.dtype) for replica in replicas}) > 1:
        return Inside([((f"[{i}]",), replica) for i, replica in enumerate(replicas)])
    return _found(replicas[0], _where("per replica", *(r.device for r in replicas)))


def _is_kept_alike(value: Any) -> bool:
    if isinstance(value, tf.Variable):
        return bool(value.synchronization != tf.VariableSynchronization.ON_READ)
    return isinstance(value, tf.types.experimental.distributed.Mirrored)


def _found(value: Any, where: ArrayLocation) -> Found:
    """Return the array; 0 bytes for strings, whose size is unknown."""
    shape, dtype = _shape(value), value.dtype
    nbytes = 0 if dtype == tf.string else dtype.size * value.shape.num_elements()
    return Found(shape, dtype.name, nbytes, where)


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape; -1 for unknown dimensions of a tensor in a graph."""
    if value.shape.rank is None:
        return ()
    return tuple(-1 if n is None else n for n in value.shape)


@functools.lru_cache
def _where(kind: LayoutKind, *devices: str) -> ArrayLocation:
    placed = tuple(map(_device, devices))
    owners = len(placed) if kind == "per replica" else 1
    return ArrayLocation(kind, placed, (0,) * len(placed), owners=owners)


def _device(name: str) -> PlacedDevice:
    """Convert a device name: `gpu:0` for `/job:worker/replica:0/task:1/device:GPU:0`."""
    spec = tf.DeviceSpec.from_string(name)
    return PlacedDevice(OWN_RANK, f"{(spec.device_type or 'cpu').lower()}:{spec.device_index or 0}")
