"""Writes to rows of a mirrored variable that make its copies differ between replicas.

`bank[0:8].assign(rows)` and `bank.scatter_nd_update(indices, rows)` in a replica write to its own
copy. They must write values that all replicas have in common. The search follows the replica's own
rows of the batch through the graph of a step, with its branches, loops and calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.worker.tensorflow.row_dataflow import (
    BODIES,
    arguments,
    arguments_at,
    body_of,
    is_decided_by,
    on_own_rows,
    own_arguments,
    passed_to,
)
from nbdist.worker.tensorflow.variables import is_mirrored

if TYPE_CHECKING:
    from collections.abc import Set

    import tensorflow as tf


def unequal_write(graph: tf.Graph) -> tf.Operation | None:
    """Return an operation that makes the copies of a variable differ between replicas.

    Args:
        graph: graph of the step on one part. Its arguments are the arrays of the batch.

    Returns:
        The first operation that writes a value of the replica's own rows, not combined by a
        collective, to rows of a mirrored variable. In a branch or loop that such a value decides,
        the first one that writes any value. None without one.
    """
    mirrored = {inside.name for handle, inside in graph.captures if _is_mirrored(handle)}
    return _first(graph, arguments(graph), mirrored, is_decided=False)


def _first(
    graph: tf.Graph, reached: set[str], mirrored: Set[str], *, is_decided: bool
) -> tf.Operation | None:
    flow = on_own_rows(graph, reached)
    own = {operation.name: {tensor.name for tensor in given} for operation, given in flow}
    for operation in graph.get_operations():
        names = own.get(operation.name, set())
        if (names or is_decided) and _writes_rows(operation, mirrored):
            return operation
        for name in BODIES.get(operation.type, ()):
            found = _in_body(operation, name, names, mirrored, is_decided=is_decided)
            if found is not None:
                return found
    return None


def _writes_rows(operation: tf.Operation, mirrored: Set[str]) -> bool:
    kind = operation.type
    is_write = kind == "ResourceStridedSliceAssign" or kind.startswith("ResourceScatter")
    return is_write and operation.inputs[0].name in mirrored


def _in_body(
    operation: tf.Operation, name: str, own: Set[str], mirrored: Set[str], *, is_decided: bool
) -> tf.Operation | None:
    """Return the first such operation of a branch, a loop's body or a called function."""
    body = body_of(operation, name)
    pairs = zip(passed_to(operation, body), body.inputs, strict=True)
    inside = {tensor.name for outer, tensor in pairs if outer.name in mirrored}
    reached = arguments_at(body, own_arguments(operation, name, own))
    return _first(
        body, reached, inside, is_decided=is_decided or is_decided_by(operation, name, own)
    )


def _is_mirrored(handle: tf.Tensor) -> bool:
    """Return True if a resource is a copy of a variable that is equal on all replicas."""
    container = getattr(handle, "_distributed_container", lambda: None)()
    return container is not None and is_mirrored(container)
