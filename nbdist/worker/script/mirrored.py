"""MultiWorkerMirroredStrategy of an exported program."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from nbdist.records import MirroredWiring
from nbdist.utils.sockets import LOOPBACK
from nbdist.worker.runtime import context
from nbdist.worker.script import rendezvous
from nbdist.worker.tensorflow import strategy
from nbdist.worker.tensorflow.runtime.rank_gather import gather_over

if TYPE_CHECKING:
    from nbdist.records import Communication
    from nbdist.worker.script.placement import Placement


def build(placement: Placement, communication: Communication) -> rendezvous.Connection:
    """Build the strategy together with all other ranks."""
    cluster = {"worker": placement.addresses or _exchanged(placement)}
    task = {"type": "worker", "index": placement.rank}
    config = json.dumps({"cluster": cluster, "task": task})
    devices = strategy.build(MirroredWiring(tf_config=config, communication=communication))
    gather = gather_over(context.current().strategies["mirrored"])
    return rendezvous.Connection(strategy.prove, gather, devices)


def _exchanged(placement: Placement) -> tuple[str, ...]:
    port = strategy.reserve_port()
    if placement.world_size == 1:
        return (f"{LOOPBACK}:{port}",)
    return rendezvous.addresses(placement, port)
