"""Assignments to slices of a strategy's variables, as in `bank[0:8].assign(rows)`.

TensorFlow gives the slice of a variable a method `assign`. Outside of replicas, the slice of a
mirrored variable is that of a copy and has none. In a replica its method ignores the variable's
aggregation. In nbdist both assign as `DistributedVariable.assign` does: to all copies of the
worker, and with the aggregation of the variable. Tested with TensorFlow 2.21.0.
`tests/worker/tensorflow/runtime/test_slice_assignments.py` fails if the patch is no longer needed.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from nbdist.worker.runtime.tested_versions import is_tested

_getitem_upstream = DistributedVariable.__getitem__


def apply() -> None:
    """Patch the tested versions. Leave other versions unchanged and log a warning."""
    if is_tested("TensorFlow", tf.__version__, "slices of variables cannot be assigned"):
        DistributedVariable.__getitem__ = _getitem


def _getitem(self: Any, item: Any) -> Any:
    taken = _getitem_upstream(self, item)
    if self._is_mirrored():
        taken.assign = functools.partial(_assign, self, item)
    return taken


def _assign(variable: Any, item: Any, value: Any, name: str | None = None) -> Any:
    """Assign a value to a slice of all copies, and return the variable."""

    def update(component: Any, given: Any) -> Any:
        return component[item].assign(given, name=name)

    variable._update(update_fn=update, value=value)
    return variable
