"""Shuffles of a `tf.data.Dataset`, applied to another input with the same order of positions.

A data set that reshuffles draws new seeds for each pass from a resource of the kernel. Python has
no name for it, but the serialized graph of the data set contains its handle. The other data set
uses the same resource, so each pass through either of them counts for both.
"""

from __future__ import annotations

import sys
from typing import Any

MOST_BYTES = 256 << 20
"""Size of arrays below a shuffle that is serialized. A graph has at most 2 GiB."""

_GENERATOR = 4
"""Position of the handle among the inputs of a shuffle."""


def can_move(operation: Any) -> bool:
    """Return True if `reshuffled` can read the seeds of a shuffle."""
    return not operation._reshuffle_each_iteration or _array_bytes(operation) <= MOST_BYTES


def reshuffled(operation: Any, dataset: Any) -> Any:
    """Return a data set with its elements in the order of a shuffle.

    Args:
        operation: the shuffle, a `_ShuffleDataset`.
        dataset: data set with as many elements as the input of the shuffle.
    """
    from nbdist.private_api.tensorflow import dataset_ops

    variant = sys.modules["tensorflow"].raw_ops.ShuffleDatasetV3(
        input_dataset=dataset._variant_tensor,
        buffer_size=operation._buffer_size,
        seed=operation._seed,
        seed2=operation._seed2,
        seed_generator=_seed_generator(operation),
        reshuffle_each_iteration=operation._reshuffle_each_iteration,
        **dataset._flat_structure,
    )
    return dataset_ops.UnaryUnchangedStructureDataset(dataset, variant)


def _seed_generator(operation: Any) -> Any:
    """Return the handle of the resource from which a shuffle draws its seeds."""
    tf = sys.modules["tensorflow"]
    if not operation._reshuffle_each_iteration:
        return tf.raw_ops.DummySeedGenerator()
    ignores = tf.data.experimental.ExternalStatePolicy.IGNORE
    serialized = operation._as_serialized_graph(external_state_policy=ignores).numpy()
    graph = tf.compat.v1.GraphDef.FromString(serialized)
    nodes = {node.name: node for node in graph.node}
    (result,) = (node for node in graph.node if node.op == "_Retval")
    name = nodes[result.input[0]].input[_GENERATOR]
    only = tf.compat.v1.GraphDef(node=[nodes[name]])

    def handle() -> Any:
        (found,) = tf.graph_util.import_graph_def(only, return_elements=[f"{name}:0"], name="")
        return found

    return tf.function(handle, autograph=False).get_concrete_function()()


def _array_bytes(dataset: Any) -> int:
    """Return the size of the arrays that a data set and its inputs contain."""
    dataset = vars(dataset).get("_impl", dataset)
    captured = [t for f in dataset._functions() for t in f.function.captured_inputs]
    own = sum(map(_bytes, (*vars(dataset).get("_tensors", ()), *captured)))
    return own + sum(map(_array_bytes, dataset._inputs()))


def _bytes(tensor: Any) -> int:
    """Return the size of a tensor, at least one byte for each text."""
    return int(tensor.shape.num_elements() or 0) * (tensor.dtype.size or 1)
