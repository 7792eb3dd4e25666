"""Values that a step assigns, over all replicas, as one device would compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.cells.nested_steps import shown_name
from nbdist.worker.tensorflow.replica import metrics as keras_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.cells.loop_division import TrainingLoop
    from nbdist.worker.tensorflow.replica.batch_share import Shares


_GATHERED_AS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    tf.bfloat16: tf.float32,
}
"""Wider types for those that collectives do not gather."""


class StepOutputs:
    """Outputs of a step: those that the loop's body reads are combined in each step.

    An array with this replica's rows becomes the array of all rows. Another float is the mean over
    all rows: values that are equal on all replicas, such as gradients, remain the same. An integer
    scalar is the sum. Other values must be equal on all replicas, such as the gradient of an
    embedding, whose IndexedSlices contain the rows of all replicas. The comparison with one replica
    before the first step finds values for which this is wrong.

    Args:
        loop: the loop of the step.

    Attributes:
        others: values of the last trace that are no tensors, such as lists of variables, by name.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._used = {*loop.used, *loop.carried, *loop.conditional}
        self._summed: set[str] = set()
        self.others: dict[str, Any] = {}
        self._with_rows: set[str] = set()

    def continue_from(self, other: StepOutputs) -> None:
        """Combine outputs as the trials of another step of the loop have found."""
        self._summed |= other._summed
        self._with_rows |= other._with_rows

    def report(self, assigned: dict[str, Any], shares: Shares | None) -> dict[str, Any]:
        """Return the scalars to report, by name. The notebook shows their mean over replicas."""
        times = 1 if shares is None or shares.whole else shares.replicas
        return {
            path: leaf * times if path in self._summed else leaf
            for name, value in assigned.items()
            for path, leaf in _leaves(name, value)
            if tf.is_tensor(leaf) and leaf.shape.rank == 0 and leaf.dtype.is_floating
        }

    def over_replicas(self, assigned: dict[str, Any], shares: Shares | None) -> dict[str, Any]:
        """Return the tensors. Call it in a replica; without shares, on a single one."""
        tensors = {name: value for name, value in assigned.items() if _are_tensors(name, value)}
        self.others = {name: v for name, v in assigned.items() if name not in tensors}
        return {
            name: self.combined(name, value, shares) if name in self._used else value
            for name, value in tensors.items()
        }

    def find_rows(self, assigned: dict[str, Any], rows: int) -> bool:
        """Find the outputs with a row for each sample.

        The first axis of a gradient may have the length of a replica's part by chance.

        Args:
            assigned: outputs of a step on one replica.
            rows: rows of the whole batch.

        Returns:
            True if steps combine their outputs in another way than before.
        """
        before = self._with_rows
        self._with_rows = {
            path
            for name, value in assigned.items()
            for path, leaf in _leaves(name, value)
            if leaf is not None and leaf.shape.rank and leaf.shape[0] == rows
        }
        used = {
            path
            for name in self._used & assigned.keys()
            for path, _ in _leaves(name, assigned[name])
        }
        return not used.isdisjoint(before ^ self._with_rows)

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return the names that the loop's body does not read, in the same order on all ranks."""
        return sorted(set(names) - self._used)

    def add_up(self, path: str) -> None:
        """Combine a scalar as a sum from now on."""
        self._summed.add(path)

    def combined(self, name: str, value: Any, shares: Shares | None) -> Any:
        """Return a value that replicas have assigned to a name, over all of them."""
        paths = iter([path for path, _ in _leaves(name, value)])
        return tf.nest.map_structure(lambda leaf: self._leaf(next(paths), leaf, shares), value)

    def _leaf(self, path: str, leaf: Any, shares: Shares | None) -> Any:
        if shares is None or shares.whole or shares.replicas == 1:
            return leaf
        if not tf.is_tensor(leaf) or isinstance(leaf, tf.IndexedSlices):
            return leaf
        replica, own = tf.distribute.get_replica_context(), tf.identity(leaf)
        if path in self._with_rows and leaf.shape[0] == shares.total // shares.replicas:
            kind = _GATHERED_AS.get(own.dtype, own.dtype)
            return tf.cast(replica.all_gather(tf.cast(own, kind), axis=0), own.dtype)
        is_sum = path in self._summed or (leaf.dtype.is_integer and not leaf.shape.rank)
        if is_sum:
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, own)
        return keras_metrics.mean(own, shares) if leaf.dtype.is_floating else leaf


def _are_tensors(name: str, value: Any) -> bool:
    return all(
        leaf is None or (tf.is_tensor(leaf) and not isinstance(leaf, (tf.Variable, keras.Variable)))
        for _, leaf in _leaves(name, value)
    )


def leaves_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of named values, by path."""
    pairs = (pair for name in sorted(values) for pair in _leaves(name, values[name]))
    parts = (part for path, leaf in pairs for part in _parts(path, leaf))
    return {path: leaf for path, leaf in parts if tf.is_tensor(leaf)}


def _parts(path: str, leaf: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a leaf. Those of IndexedSlices matter one by one, as for a norm."""
    if not isinstance(leaf, tf.IndexedSlices):
        return [(path, leaf)]
    return [(f"{path}.values", leaf.values), (f"{path}.indices", leaf.indices)]


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a value with their paths, such as `losses['a']`."""
    if isinstance(value, dict):
        return [pair for key in sorted(value) for pair in _leaves(f"{name}[{key!r}]", value[key])]
    if isinstance(value, (tuple, list)):
        return [pair for i, part in enumerate(value) for pair in _leaves(f"{name}[{i}]", part)]
    return [(shown_name(name), value)]
