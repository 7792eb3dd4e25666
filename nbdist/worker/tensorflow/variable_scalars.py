"""Variables of a strategy convert to Python's bool, int, float and complex, as other variables do.

TensorFlow's `DistributedVariable` has none of these methods: `if flag:` is true whatever the
variable contains, and `float(optimizer.learning_rate)` raises TypeError. TensorFlow itself asks
`bool(destinations)` of variables, so `check_destinations` and `_broadcast_to` are replaced too.
Seen with TensorFlow 2.21.0; `tests/worker/tensorflow/test_strategy.py` fails if the patch is no
longer needed.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, mirrored_strategy, values

PATCHED_SERIES = "2.21."
_log = logging.getLogger(__name__)
_check_upstream = cross_device_ops.check_destinations
_broadcast_upstream = mirrored_strategy.MirroredExtended._broadcast_to


def apply() -> None:
    """Patch the versions that were tested; for another version, print so and change nothing."""
    if not tf.__version__.startswith(PATCHED_SERIES):
        _log.warning(
            "variables of TensorFlow %s are not patched: only %sx was tested",
            tf.__version__,
            PATCHED_SERIES,
        )
        return
    cross_device_ops.check_destinations = _check_destinations
    mirrored_strategy.MirroredExtended._broadcast_to = _broadcast_to
    variable: Any = values.DistributedVariable
    variable.__bool__ = _bool
    variable.__int__ = _int
    variable.__float__ = _float
    variable.__complex__ = _complex


def _check_destinations(destinations: Any) -> bool:
    """Whether any are given: a variable is one, whatever it contains."""
    if isinstance(destinations, values.DistributedVariable):
        return True
    given: bool = _check_upstream(destinations)
    return given


def _broadcast_to(self: Any, tensor: Any, destinations: Any) -> Any:
    if isinstance(tensor, (float, int)) or not isinstance(destinations, values.DistributedVariable):
        return _broadcast_upstream(self, tensor, destinations)
    return self._get_cross_device_ops(tensor).broadcast(tensor, destinations)


def _bool(self: Any) -> bool:
    """As upstream in a graph, and for arrays: TensorFlow asks there whether it was given one."""
    if tf.inside_function() or self.shape.rank != 0:
        return True
    return bool(self.numpy())


def _int(self: Any) -> int:
    return int(self.numpy())


def _float(self: Any) -> float:
    return float(self.numpy())


def _complex(self: Any) -> complex:
    return complex(self.numpy())
