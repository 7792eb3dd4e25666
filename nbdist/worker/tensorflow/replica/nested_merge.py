"""Synchronization of replicas within TensorFlow functions and conditions of Keras optimizers.

If a process has one replica, a call for all replicas (an optimizer's update, an assignment, an
all-reduce) can be placed in any graph. TensorFlow rejects it outside of the replica's own graph, to
protect several local replicas (https://github.com/tensorflow/tensorflow/issues/32498). Keras then
cannot accumulate gradients or overwrite weights by their average.

A condition of an optimizer is the same on all replicas. If a process has several replicas, they
synchronize before it, and one condition contains the branch of each replica. A user's condition or
loop is rejected as upstream unless all replicas compute the same rows: it may depend on the rows of
the replica, and the other replicas would wait. Written for TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.keras import BaseOptimizer, ops
from nbdist.private_api.tensorflow import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
    distribute_lib,
    mirrored_run,
)
from nbdist.worker.runtime.replaced_attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_cond_upstream = ops.cond
_optimizer_upstream = BaseOptimizer._backend_apply_gradients
_merge_upstream = mirrored_run._MirroredReplicaContext._merge_call


_BRANCHES = (CondBranchFuncGraph, WhileBodyFuncGraph)


def allowed(
    strategy: tf.distribute.Strategy, *, equal_rows: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Allow synchronization while a step is traced: anywhere if each process has one replica.

    Args:
        strategy: strategy of the step.
        equal_rows: True if all replicas compute the same rows. The user's conditions may then
            synchronize too.
    """
    if isinstance(strategy.extended, distribute_lib._DefaultDistributionExtended):
        return contextlib.nullcontext()
    if len(strategy.extended.worker_devices) > 1:
        return _joint_conditions()
    return _allowed(equal_rows=equal_rows)


@contextlib.contextmanager
def _joint_conditions() -> Iterator[None]:
    """Merge the conditions of an optimizer on the replicas of a process into one."""
    updating: list[int] = []

    def update(self: Any, *args: Any) -> Any:
        updating.append(threading.get_ident())
        try:
            return _optimizer_upstream(self, *args)
        finally:
            updating.remove(threading.get_ident())

    def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        replica = tf.distribute.get_replica_context()
        if replica is None or threading.get_ident() not in updating or tf.executing_eagerly():
            return _cond_upstream(pred, true_fn, false_fn)
        return replica.merge_call(_cond_of_all, args=(pred, true_fn, false_fn))

    with (
        replaced(ops, "cond", cond),
        replaced(BaseOptimizer, "_backend_apply_gradients", update),
    ):
        yield


def _cond_of_all(strategy: tf.distribute.Strategy, pred: Any, true_fn: Any, false_fn: Any) -> Any:
    """Create a condition outside of the replicas whose branches contain those of all replicas."""

    def branch(functions: Any) -> Callable[[], Any]:
        each = strategy.extended.call_for_each_replica
        return lambda: each(_called, args=(functions,))

    first = strategy.experimental_local_results(pred)[0]
    return _cond_upstream(first, branch(true_fn), branch(false_fn))


def _called(function: Callable[[], Any]) -> Any:
    return function()


def is_refused(error: Exception) -> bool:
    """Return True for TensorFlow's error for replicas that synchronize in a condition or loop."""
    return "merge_call" in str(error)


@contextlib.contextmanager
def _allowed(*, equal_rows: bool) -> Iterator[None]:
    updated: list[Any] = []

    def update(self: Any, *args: Any) -> Any:
        updated.append(tf.compat.v1.get_default_graph())
        try:
            return _optimizer_upstream(self, *args)
        finally:
            updated.pop()

    def merge(self: Any, *args: Any) -> Any:
        return _merge_call(self, *args, updated=updated, equal_rows=equal_rows)

    with (
        replaced(mirrored_run._MirroredReplicaContext, "_merge_call", merge),
        replaced(BaseOptimizer, "_backend_apply_gradients", update),
    ):
        yield


def _merge_call(
    self: Any, function: Any, args: Any, kwargs: Any, *, updated: list[Any], equal_rows: bool
) -> Any:
    graph = updated[-1] if updated else tf.compat.v1.get_default_graph()
    while graph is not _own_graph() and not isinstance(graph, _BRANCHES):
        graph = graph.outer_graph
    in_branch = graph is not _own_graph() and isinstance(graph, _BRANCHES)
    if (in_branch and not equal_rows) or tf.compat.v1.get_default_graph() is _own_graph():
        return _merge_upstream(self, function, args, kwargs)
    (device,) = self._strategy.extended.worker_devices
    placed = [_on(device, given) for given in (args, kwargs)]
    return distribute_lib.ReplicaContextBase._merge_call(self, function, *placed)


def _on(device: str, values: Any) -> Any:
    """Place tensors on a device, because a nested graph does not place them."""

    def one(value: Any) -> Any:
        if not isinstance(value, (tf.Tensor, tf.IndexedSlices)):
            return value
        with tf.device(device):
            return tf.identity(value)

    return tf.nest.map_structure(one, values)


def _own_graph() -> Any:
    """Return the graph of the replica's thread."""
    thread: Any = mirrored_run.threading.current_thread()
    return thread.graph
