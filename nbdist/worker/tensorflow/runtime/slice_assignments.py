"""Reads and writes of rows of a strategy's variables, as in `bank[0:8].assign(rows)`.

TensorFlow gives the slice of a variable a method `assign`. Outside of replicas, the slice of a
mirrored variable is that of a copy and has none. In a replica its method ignores the variable's
aggregation. In nbdist both assign as `DistributedVariable.assign` does: to all copies of the
worker, and with the aggregation of the variable.

A strategy's variable has no `scatter_nd_update` and similar methods, which raise a
NotImplementedError without a text. In nbdist they write as its `scatter_update` does. Tested with
TensorFlow 2.21.0.
`tests/worker/tensorflow/runtime/test_slice_assignments.py` fails if the patch is no longer needed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.tensorflow import DistributedVariable, scatter_error_msg

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITES = tuple(f"scatter_nd_{kind}" for kind in ("add", "max", "min", "sub", "update"))
_WITHOUT_AGGREGATION = (
    tf.VariableAggregation.NONE,
    tf.VariableAggregation.ONLY_FIRST_REPLICA,
)
_getitem_upstream = DistributedVariable.__getitem__


def apply() -> None:
    """Patch slices of the variables of strategies."""
    DistributedVariable.__getitem__ = _getitem
    DistributedVariable.batch_scatter_update = _batch_scatter_update
    DistributedVariable.gather_nd = _gather_nd
    DistributedVariable.sparse_read = _sparse_read
    for name in _WRITES:
        setattr(DistributedVariable, name, functools.partialmethod(_scatter_nd, name))


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


def _scatter_nd(self: Any, method: str, indices: Any, updates: Any, name: str | None = None) -> Any:
    def update(component: Any, given: Any) -> Any:
        return getattr(component, method)(indices, given, name=name)

    return _scatter(self, method, update, updates)


def _batch_scatter_update(
    self: Any, sparse_delta: Any, use_locking: bool = False, name: str | None = None
) -> Any:
    def update(component: Any, given: Any) -> Any:
        return component.batch_scatter_update(given, use_locking=use_locking, name=name)

    return _scatter(self, "batch_scatter_update", update, sparse_delta)


def _scatter(variable: Any, method: str, update: Callable[..., Any], value: Any) -> Any:
    """Write rows of all copies, and return the variable.

    Raises:
        NotImplementedError: in a replica, if the variable has an aggregation. That of `updates` for
            different rows is not defined. TensorFlow's `scatter_update` raises the same error.
    """
    if variable.aggregation not in _WITHOUT_AGGREGATION:
        text = scatter_error_msg.format(op_name=method, aggregation=variable.aggregation)
        raise NotImplementedError(text)
    variable._update(update_fn=update, value=value)
    return variable


def _gather_nd(self: Any, indices: Any, name: str | None = None) -> Any:
    return tf.gather_nd(self.read_value(), indices, name=name)


def _sparse_read(self: Any, indices: Any, name: str | None = None) -> Any:
    return tf.gather(self.read_value(), indices, name=name)
