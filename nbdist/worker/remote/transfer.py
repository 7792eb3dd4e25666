"""Transfer of objects to and from a rank, as cloudpickle bytes.

Arrays of TensorFlow and JAX are sent as NumPy arrays, so that the notebook needs neither framework.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import cloudpickle

from nbdist.worker.runtime.shell import engine_shell


def put(payload: bytes) -> None:
    """Bind every name in the pickled dict in the user's namespace."""
    engine_shell().push(cloudpickle.loads(payload))


def missing(names: list[str]) -> list[str]:
    """Return the names that the user's namespace lacks."""
    return [name for name in names if name not in engine_shell().user_ns]


def get(names: list[str]) -> bytes:
    """Return the named objects as a pickled dict."""
    namespace = engine_shell().user_ns
    buffer = io.BytesIO()
    _ArraysAsNumpy(buffer).dump({name: namespace[name] for name in names})
    return buffer.getvalue()


class _ArraysAsNumpy(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles arrays of all loaded frameworks as NumPy arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if _is_framework_array(obj):
            return _as_numpy(obj).__reduce__()
        return super().reducer_override(obj)


def _is_framework_array(obj: Any) -> bool:
    tensorflow, jax = sys.modules.get("tensorflow"), sys.modules.get("jax")
    if tensorflow is not None and isinstance(obj, (tensorflow.Tensor, tensorflow.Variable)):
        return True
    return jax is not None and isinstance(obj, jax.Array)


def _as_numpy(array: Any) -> Any:
    import numpy as np

    if "jax" in sys.modules and isinstance(array, sys.modules["jax"].Array):
        if not array.is_fully_addressable and not array.is_fully_replicated:
            raise ValueError(
                f"an array of shape {array.shape} is split over ranks by {array.sharding.spec}; "
                "gather it in a cell first: multihost_utils.process_allgather(x, tiled=True)"
            )
        if not array.is_fully_addressable:
            return np.asarray(array.addressable_data(0))
    return np.asarray(array)
