"""What every rank must know of the others before a framework starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from nbdist.records import MirroredWiring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.records import Communication


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
