"""`Dataset.shuffle` without a seed has the same order on all ranks.

TensorFlow draws a seed from its eager generator when a data set is shuffled. A draw on one rank
alone shifts all later ones, and ranks would share out batches of different data. Here the seed
depends on the seed of the workers, on the cell, and on how many shuffles the cell has made before:
it is also the same when the cell is run again after a recovery. With a global seed of the user's,
`shuffle` is as upstream. TensorFlow 2.21.
"""

from __future__ import annotations

import zlib
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from nbdist.worker.runtime import context as runtime_context
from nbdist.worker.runtime.seeding import ClusterSeed

_shuffle_upstream = tf.data.Dataset.shuffle


def apply() -> None:
    """Give every shuffle of a cell a seed."""
    tf.data.Dataset.shuffle = _shuffle


def is_seeded_by_user() -> bool:
    """Return whether a cell has set TensorFlow's global seed, to the cluster's own value or not."""
    seed = context.global_seed()
    return seed is not None and not isinstance(seed, ClusterSeed)


def _shuffle(
    self: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any
) -> tf.data.Dataset:
    worker = runtime_context.current()
    if seed is None and worker.strategy == "mirrored" and not is_seeded_by_user():
        state = worker.cell_state
        state.shuffles += 1
        words = f"{worker.identity.seed}:{state.source}:{state.shuffles}"
        seed = zlib.crc32(words.encode()) >> 1
    return _shuffle_upstream(self, buffer_size, seed, *args, **kwargs)
