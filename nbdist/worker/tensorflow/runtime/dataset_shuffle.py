"""`Dataset.shuffle` without a seed uses the same order on all ranks.

TensorFlow draws a seed from its eager generator when a dataset is shuffled. A draw on a single rank
shifts all its later draws, and ranks would divide batches of different data. nbdist derives the
seed from the seed of the workers, the cell, and the number of earlier shuffles in the cell. The
seed is the same again when the cell reruns after a recovery. If the user sets a global seed,
`shuffle` behaves as upstream. Written for TensorFlow 2.21.
"""

from __future__ import annotations

import zlib
from typing import Any

import tensorflow as tf

from nbdist.private_api.tensorflow import context
from nbdist.worker.runtime import context as runtime_context
from nbdist.worker.runtime.seeding import ClusterSeed

_shuffle_upstream = tf.data.Dataset.shuffle


def apply() -> None:
    """Set a seed for every unseeded shuffle of a cell."""
    tf.data.Dataset.shuffle = _shuffle


def is_seeded_by_user() -> bool:
    """Return True if a cell has set TensorFlow's global seed, to any value."""
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
