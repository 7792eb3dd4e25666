"""Conversion of a strategy's variables to NumPy's arrays and Python's bool, int, float and complex.

Other variables of TensorFlow have these conversions, `DistributedVariable` does not: `if flag:` is
true for every value, and `float(optimizer.learning_rate)` and `np.exp(scalar)` raise TypeError.
NumPy reads variables of higher rank element by element. TensorFlow itself
evaluates `bool(destinations)` for variables, so `check_destinations` and `_broadcast_to` are
replaced too. Tested with TensorFlow 2.21.0. `tests/worker/tensorflow/test_strategy.py` fails if the
patch is no longer needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from nbdist.private_api.tensorflow import DistributedVariable, cross_device_ops, mirrored_strategy

_check_upstream = cross_device_ops.check_destinations
_broadcast_upstream = mirrored_strategy.MirroredExtended._broadcast_to


def apply() -> None:
    """Patch the variables of strategies."""
    cross_device_ops.check_destinations = _check_destinations
    mirrored_strategy.MirroredExtended._broadcast_to = _broadcast_to
    variable: Any = DistributedVariable
    variable.__array__ = _array
    variable.__bool__ = _bool
    variable.__int__ = _int
    variable.__float__ = _float
    variable.__complex__ = _complex


def _check_destinations(destinations: Any) -> bool:
    """Return True for given destinations. A variable is one, whatever its value."""
    if isinstance(destinations, DistributedVariable):
        return True
    given: bool = _check_upstream(destinations)
    return given


def _broadcast_to(self: Any, tensor: Any, destinations: Any) -> Any:
    if isinstance(tensor, (float, int)) or not isinstance(destinations, DistributedVariable):
        return _broadcast_upstream(self, tensor, destinations)
    return self._get_cross_device_ops(tensor).broadcast(tensor, destinations)


def _array(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    del copy  # `numpy` returns a copy
    return np.asarray(self.numpy(), dtype)


def _bool(self: Any) -> bool:
    """Return the value of a scalar. True, as upstream, in a graph and for other shapes."""
    if tf.inside_function() or self.shape.rank != 0:
        return True
    return bool(self.numpy())


def _int(self: Any) -> int:
    return int(self.numpy())


def _float(self: Any) -> float:
    return float(self.numpy())


def _complex(self: Any) -> complex:
    return complex(self.numpy())
