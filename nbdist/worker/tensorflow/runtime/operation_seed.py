"""Operations with a seed of their own draw the same numbers as without nbdist.

TensorFlow derives an operation's numbers from its own seed and the global seed. nbdist sets the
global seed on every worker, because operations without a seed must draw the same numbers on all
ranks. As long as the user has set no global seed, an operation with a seed uses TensorFlow's
default global seed. TensorFlow has no setting for this. Written for TensorFlow 2.21.
"""

from __future__ import annotations

from typing import Any

from nbdist.private_api.tensorflow import context, ops, random_seed
from nbdist.worker.runtime.seeding import ClusterSeed

_get_seed_upstream = random_seed.get_seed


def apply() -> None:
    """Ignore the seed of the cluster in operations that have a seed."""
    random_seed.get_seed = _get_seed


def _get_seed(op_seed: Any) -> Any:
    seed = context.global_seed() if context.executing_eagerly() else ops.get_default_graph().seed
    if op_seed is None or not isinstance(seed, ClusterSeed):
        return _get_seed_upstream(op_seed)
    return random_seed.DEFAULT_GRAPH_SEED, random_seed._truncate_seed(op_seed)
