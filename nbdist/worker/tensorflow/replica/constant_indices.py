"""Whether the rows of a variable that a gradient has are the same for each batch.

The gradient of an embedding is IndexedSlices: a list of indices and values. For tokens, the list of
the global batch is those of its parts, one after the other. For positions (`Embedding` of
`arange(length)`), the list has each index once, however many rows a batch has. Keras squares the
values of a list one by one (`worker/tensorflow/replica/single_device_math.py`), so the two lists
give other updates.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_OF_DATA = ("Iterator", "Random", "StatelessRandom", "Multinomial", "StatelessMultinomial")
"""What the types of operations begin with that make other values for each batch."""


def are_constant(indices: Any) -> bool:
    """Whether nothing that the traced function is given determines `indices`.

    The dimensions of a batch, but the first, determine the same on all replicas. Eager tensors do
    not tell what they were made from.
    """
    if not tf.is_symbolic_tensor(indices):
        return False
    pending, seen = [indices], set()
    while pending:
        tensor = pending.pop()
        operation = tensor.op
        if (id(tensor.graph), operation.name) in seen or _is_inner_dimension(operation):
            continue
        seen.add((id(tensor.graph), operation.name))
        if operation.type.startswith(_OF_DATA):
            return False
        if operation.type != "Placeholder":
            pending += operation.inputs
            continue
        outer = [outside for outside, inside in tensor.graph.captures if inside is tensor]
        if not outer:
            return False
        pending += filter(tf.is_symbolic_tensor, outer)
    return True


def _is_inner_dimension(operation: Any) -> bool:
    """Whether it takes a dimension of a tensor's shape that is not the first."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    rank = operation.inputs[0].op.inputs[0].shape.rank
    first = tf.get_static_value(operation.inputs[1])
    if rank is None or first is None or not operation.get_attr("shrink_axis_mask"):
        return False
    return bool(int(first[0]) % rank)
