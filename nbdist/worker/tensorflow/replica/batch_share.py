"""Rows of a global batch that a replica computes, and their weight in a mean over replicas."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import tensorflow as tf

Count = Any
"""Number of rows: an int, or a scalar int32 tensor if it is known at run time only."""


class Share(msgspec.Struct, frozen=True):
    """Rows `offset` to `offset + rows` of a global batch of `total` rows, on one replica.

    Attributes:
        total: number of rows of the global batch.
        rows: number of rows of this replica.
        offset: first row of this replica.
        replicas: number of replicas.
        whole: True if every replica computes all rows.
        even: True if every replica has the same number of rows.
    """

    total: Count
    rows: Count
    offset: Count
    replicas: int
    whole: bool
    even: bool

    def weight(self, dtype: tf.DType) -> tf.Tensor | None:
        """Return the factor from a mean over replicas to the mean over all rows. None means 1."""
        if self.even:
            return None
        return _ratio(self.rows * self.replicas, self.total, dtype)

    def part(self, dtype: tf.DType) -> tf.Tensor:
        """Return this replica's fraction of all rows, or `1 / replicas` for a whole batch."""
        if self.even:
            return tf.constant(1 / self.replicas, dtype)
        return _ratio(self.rows, self.total, dtype)

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """Return `value` times `weight`."""
        weight = self.weight(value.dtype)
        return value if weight is None else value * weight

    def summed(self, value: tf.Tensor) -> tf.Tensor:
        """Scale a sum over own rows: its weighted mean over replicas is the sum over all rows."""
        if self.whole:
            return value
        return value * _ratio(self.total, self.rows, value.dtype)


def _ratio(one: Count, other: Count, dtype: tf.DType) -> tf.Tensor:
    """Divide in float64: in float16, numbers above 65504 are infinite, and above 2048 inexact."""
    return tf.cast(tf.cast(one, tf.float64) / tf.cast(other, tf.float64), dtype)


class Division(Protocol):
    """Division of the rows of a global batch over replicas.

    Attributes:
        total: number of rows of the global batch. None if only the parts are known.
        replicas: number of replicas.
        whole: True if every replica computes all rows.
    """

    @property
    def total(self) -> Count | None: ...
    @property
    def replicas(self) -> int: ...
    @property
    def whole(self) -> bool: ...

    def here(self) -> Share:
        """Return the share of the calling replica."""
        ...


class Shares(msgspec.Struct, frozen=True):
    """Global batch that nbdist divides.

    The first `total % replicas` replicas have one row more than the others. Call `here` in a
    replica.

    Attributes:
        total: number of rows of the global batch.
        replicas: number of replicas.
        whole: True if every replica computes all rows.
        even: True if `total` is divisible by `replicas`.
    """

    total: Count
    replicas: int
    whole: bool = False
    even: bool = True

    def here(self) -> Share:
        return self.of(replica_id())

    def of(self, replica: Count, count: int = 1) -> Share:
        """Return the combined share of `count` replicas, starting at `replica`."""
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


class OnePart(msgspec.Struct, frozen=True):
    """The same rows of a global batch on every replica: a part in a trial of this rank alone."""

    share: Share

    @property
    def total(self) -> Count:
        return self.share.total

    @property
    def replicas(self) -> int:
        return self.share.replicas

    @property
    def whole(self) -> bool:
        return self.share.whole

    def here(self) -> Share:
        return self.share


class CountedShares:
    """Parts of a global batch that the user has distributed. Replicas count their rows.

    The parts are numbered in the order of the replicas. Their order in the user's data is unknown.

    Args:
        replicas: number of replicas.
    """

    total = None
    whole = False

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._shares: dict[Count, Share] = {}

    def count(self, rows: Count) -> None:
        """Record the number of rows of the calling replica, and their offset."""
        replica = replica_id()
        own = tf.one_hot(replica, self.replicas, rows, 0)
        counts = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        total, offset = tf.reduce_sum(counts), tf.reduce_sum(counts[:replica])
        self._shares[replica] = Share(total, rows, offset, self.replicas, whole=False, even=False)

    def here(self) -> Share:
        return self._shares[replica_id()]


def replica_id() -> Count:
    """Return the id of the replica, an int if it is static."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    known = tf.get_static_value(replica) if tf.is_tensor(replica) else replica
    return replica if known is None else int(known)
