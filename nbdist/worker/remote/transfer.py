"""Transfer of objects to and from a rank, as cloudpickle bytes.

Arrays of TensorFlow and JAX are sent as NumPy arrays, so that the notebook needs neither framework.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import cloudpickle

from nbdist.worker.own_modules.reload import reload_changed
from nbdist.worker.runtime.shell import engine_shell

_KERAS = ".keras_transfer"


def put(payload: bytes) -> bool:
    """Bind every name in the pickled dict in the user's namespace, with current own modules.

    Returns:
        True if the objects belong into the scope of the strategy: call `put_in_scope` on all ranks.
        Any error of an object has appeared on its rank by then.
    """
    reload_changed(engine_shell().user_ns)
    reader = _Reader(io.BytesIO(payload))
    engine_shell().push(reader.load())
    if not reader.finds_keras:
        return False
    from nbdist.worker.remote import keras_transfer

    return keras_transfer.scope() is not None


def put_in_scope(payload: bytes) -> None:
    """Bind the names in the scope of Keras's strategy. Collective: variables are agreed."""
    from nbdist.worker.remote import keras_transfer

    scope = keras_transfer.scope()
    assert scope is not None
    with scope:
        engine_shell().push(cloudpickle.loads(payload))


class _Reader(pickle.Unpickler):
    """Reader of pushed objects.

    Attributes:
        finds_keras: True if the objects use Keras.
    """

    finds_keras = False

    def find_class(self, module: str, name: str) -> Any:
        self.finds_keras |= module.partition(".")[0] == "keras" or module.endswith(_KERAS)
        return super().find_class(module, name)


def missing(names: list[str]) -> list[str]:
    """Return the names that the user's namespace lacks."""
    return [name for name in names if name not in engine_shell().user_ns]


def get(names: list[str]) -> bytes | tuple[str, ...]:
    """Return the named objects as a pickled dict.

    Returns:
        The dict; or descriptions of the arrays that are split over ranks, if there are any. Then
        call `get_gathered` on all ranks.
    """
    buffer = io.BytesIO()
    pickler = _ArraysAsNumpy(buffer)
    pickler.dump(_named(names))
    return tuple(pickler.split) or buffer.getvalue()


def get_gathered(names: list[str]) -> bytes:
    """Return the named objects as a pickled dict. Collective: split arrays are gathered."""
    buffer = io.BytesIO()
    _ArraysAsNumpy(buffer, gathers=True).dump(_named(names))
    return buffer.getvalue()


def _named(names: list[str]) -> dict[str, Any]:
    namespace = engine_shell().user_ns
    return {name: namespace[name] for name in names}


class _ArraysAsNumpy(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles arrays of all loaded frameworks as NumPy arrays.

    Args:
        buffer: file to write to.
        gathers: gather arrays that are split over ranks, instead of listing them.

    Attributes:
        split: descriptions of the arrays that were not gathered.
    """

    def __init__(self, buffer: io.BytesIO, *, gathers: bool = False) -> None:
        super().__init__(buffer)
        self.split: list[str] = []
        self._gathers = gathers

    def reducer_override(self, obj: Any) -> Any:
        if not _is_framework_array(obj):
            return super().reducer_override(obj)
        if not self._gathers and _is_split(obj):
            self.split.append(f"{obj.dtype}{list(obj.shape)} over {obj.sharding}")
            return list, ()
        return _as_numpy(obj).__reduce__()


def _is_framework_array(obj: Any) -> bool:
    tensorflow, jax = sys.modules.get("tensorflow"), sys.modules.get("jax")
    if tensorflow is not None and isinstance(obj, (tensorflow.Tensor, tensorflow.Variable)):
        return True
    return jax is not None and isinstance(obj, jax.Array)


def _is_split(array: Any) -> bool:
    """Return True if an array of JAX is sharded over ranks."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array):
        return False
    return not (array.is_fully_addressable or array.is_fully_replicated)


def _as_numpy(array: Any) -> Any:
    import numpy as np

    if "jax" in sys.modules and isinstance(array, sys.modules["jax"].Array):
        from nbdist.worker.jax.arrays.leaves import gathered

        if not array.is_fully_addressable:
            return np.asarray(gathered(array).addressable_data(0))
    return np.asarray(array)
