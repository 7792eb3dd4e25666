"""MultiWorkerMirroredStrategy of an exported program."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from nbdist.records import MirroredWiring
from nbdist.worker.runtime import context
from nbdist.worker.script import rendezvous
from nbdist.worker.tensorflow import strategy
from nbdist.worker.tensorflow.runtime.rank_gather import gather_over

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from nbdist.records import Communication
    from nbdist.worker.script.placement import Placement


def build(
    placement: Placement, communication: Communication
) -> tuple[Callable[[], None], Callable[[np.ndarray], np.ndarray]]:
    """Build the strategy together with all other ranks.

    Returns:
        Function that waits for the other ranks. Function that gathers int32 numbers from them.
    """
    cluster = {"worker": placement.addresses or _exchanged(placement)}
    task = {"type": "worker", "index": placement.rank}
    config = json.dumps({"cluster": cluster, "task": task})
    strategy.build(MirroredWiring(tf_config=config, communication=communication))
    return strategy.prove, gather_over(context.current().strategies["mirrored"])


def _exchanged(placement: Placement) -> tuple[str, ...]:
    port = strategy.reserve_port()
    if placement.world_size == 1:
        return (f"127.0.0.1:{port}",)
    return rendezvous.addresses(placement, port)
