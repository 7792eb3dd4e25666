"""The rows of a global batch that a replica computes, and their weight in a mean over replicas."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import tensorflow as tf

Count = Any
"""An int, or a scalar int32 tensor where the number of rows is known at run time only."""


class Share(msgspec.Struct, frozen=True):
    """Rows `offset` to `offset + rows` of a global batch of `total` rows, on one replica.

    Attributes:
        total: rows of the global batch.
        rows: rows of this replica.
        offset: first row of this replica.
        replicas: how many replicas there are.
        whole: every replica computes all rows, and all compute the same.
        even: every replica has the same number of rows.
    """

    total: Count
    rows: Count
    offset: Count
    replicas: int
    whole: bool
    even: bool

    def weight(self, dtype: tf.DType) -> tf.Tensor | None:
        """Factor that makes a mean over replicas the mean over all rows; None is 1."""
        if self.even:
            return None
        return tf.cast(self.rows * self.replicas, dtype) / tf.cast(self.total, dtype)

    def part(self, dtype: tf.DType) -> tf.Tensor:
        """The part of all rows that are this replica's; of a whole batch, one of `replicas`."""
        if self.even:
            return tf.constant(1 / self.replicas, dtype)
        kind = dtype if dtype.is_floating else tf.float64
        return tf.cast(tf.cast(self.rows, kind) / tf.cast(self.total, kind), dtype)

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """`value` times `weight`."""
        weight = self.weight(value.dtype)
        return value if weight is None else value * weight

    def summed(self, value: tf.Tensor) -> tf.Tensor:
        """A sum over own rows, so that its weighted mean over replicas is the sum over all rows."""
        if self.whole:
            return value
        return value * (tf.cast(self.total, value.dtype) / tf.cast(self.rows, value.dtype))


class Division(Protocol):
    """How the rows of a global batch are divided over replicas.

    Attributes:
        total: rows of the global batch; None if only the parts are known.
        replicas: how many replicas there are.
        whole: every replica computes all rows.
    """

    @property
    def total(self) -> Count | None: ...
    @property
    def replicas(self) -> int: ...
    @property
    def whole(self) -> bool: ...

    def here(self) -> Share:
        """The share of the replica in whose context this is called."""
        ...


class Shares(msgspec.Struct, frozen=True):
    """A global batch that nbdist divides.

    The first `total % replicas` replicas have one row more than the others. `Share`s are made in a
    replica, of its own id.

    Attributes:
        total: rows of the global batch.
        replicas: how many replicas there are.
        whole: every replica computes all rows.
        even: `total` divides by `replicas`.
    """

    total: Count
    replicas: int
    whole: bool = False
    even: bool = True

    def here(self) -> Share:
        return self.of(replica_id())

    def of(self, replica: Count, count: int = 1) -> Share:
        """The share of `count` replicas together, of which `replica` is the first."""
        total = self.total
        if self.whole:
            return Share(total, total, 0, self.replicas, whole=True, even=True)
        first, end = (self._start(total, replica + more) for more in (0, count))
        return Share(total, end - first, first, self.replicas, whole=False, even=self.even)

    def _start(self, total: Count, replica: Count) -> Count:
        each, more = total // self.replicas, total % self.replicas
        if isinstance(replica, int) and isinstance(total, int):
            return replica * each + min(replica, more)
        return replica * each + tf.minimum(replica, more)


class CountedShares:
    """Parts of a global batch that the user has distributed: replicas count their rows.

    The rows of the replicas follow one another. Their order in the user's data is unknown.

    Args:
        replicas: how many replicas there are.
    """

    total = None
    whole = False

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._shares: dict[Count, Share] = {}

    def count(self, rows: Count) -> None:
        """Note the rows of the replica in whose context this is called, after those before it."""
        replica = replica_id()
        own = tf.one_hot(replica, self.replicas, rows, 0)
        counts = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        total, offset = tf.reduce_sum(counts), tf.reduce_sum(counts[:replica])
        self._shares[replica] = Share(total, rows, offset, self.replicas, whole=False, even=False)

    def here(self) -> Share:
        return self._shares[replica_id()]


def replica_id() -> Count:
    """The id of the replica, an int if it is known while a step is traced."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    known = tf.get_static_value(replica) if tf.is_tensor(replica) else replica
    return replica if known is None else int(known)
