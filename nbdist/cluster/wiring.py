"""What every rank must know of the others before a framework starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from nbdist.records import MirroredWiring, PjrtWiring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.records import Bench, Communication


def mirrored(addresses: Sequence[str], communication: Communication) -> dict[int, MirroredWiring]:
    """TF_CONFIG for every rank; index 0 is the chief.

    Args:
        addresses: host:port of each rank's TensorFlow server, in rank order.
        communication: how collectives are made.
    """
    cluster = {"worker": list(addresses)}
    return {
        rank: MirroredWiring(
            tf_config=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
            communication=communication,
        )
        for rank in range(len(addresses))
    }


def pjrt(
    address: str, world_size: int, cpu_devices: int, compiled: str, bench: Bench | None
) -> dict[int, PjrtWiring]:
    """What each JAX process needs to join the others.

    Args:
        address: host:port of the coordination service.
        world_size: number of processes.
        cpu_devices: virtual CPU devices of each; 0 leaves it to JAX.
        compiled: a folder for what they compile.
        bench: what was measured of the devices, if it was.
    """
    return {
        rank: PjrtWiring(
            address=address,
            rank=rank,
            world_size=world_size,
            cpu_devices=cpu_devices,
            compiled=compiled,
            bench=bench,
        )
        for rank in range(world_size)
    }
