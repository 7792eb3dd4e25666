"""What of a plan its user should know before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.hardware.lookup import host_of
from nbdist.records import DATA

if TYPE_CHECKING:
    from nbdist.planner.graph.layout import ShardedModel
    from nbdist.records import PlannedTime, Topology

FEW_ROWS = 4
"""Samples on a device below which its units are mostly idle."""

MUCH_TRAFFIC = 0.20
"""Of a step, the share of collectives from which on they are worth a word."""

MUCH_BUBBLE = 0.15
"""Of a step, the share in which stages wait for microbatches from which on it is worth a word."""

MUCH_INPUT = 1e9
"""Bytes a second that a host has to have of the batches, from which on reading them may be what a
step waits for: what one process reads and copies, at best. Assumed."""


def warnings_of(sharded: ShardedModel, time: PlannedTime, topology: Topology) -> tuple[str, ...]:
    """In whole sentences."""
    found = []
    each = sharded.model.rows / sharded.layout.axes[DATA]
    if each <= FEW_ROWS and sharded.layout.data > 1:
        samples = "sample" if round(each) == 1 else "samples"
        found.append(f"each device has {each:.0f} {samples} of a batch of {sharded.model.rows}")
    share = time.exposed / time.step if time.step else 0.0
    if share > MUCH_TRAFFIC:
        slowest = max(time.traffic, key=lambda traffic: traffic.seconds)
        found.append(
            f"{share:.0%} of a step is spent in collectives, most of it over {slowest.level}"
        )
    if time.bubble > MUCH_BUBBLE:
        found.append(
            f"{time.bubble:.0%} of a step stages wait for microbatches (the pipeline's bubble): a "
            "larger batch, in more of them, makes it smaller"
        )
    fed = _fed(sharded, time, topology)
    if fed > MUCH_INPUT:
        found.append(
            f"each host has to have {fed / 1e9:.1f} GB/s of batches, more than a process usually "
            "reads: type --prefetch auto"
        )
    return tuple(found)


def _fed(sharded: ShardedModel, time: PlannedTime, topology: Topology) -> float:
    """Bytes of the batches a second, on each host; each reads its devices' part."""
    batch = sum(t.value.nbytes for t in sharded.model.tensors if t.role == "batch")
    on_host = min(topology.devices, host_of(topology.chip).devices)
    return batch * on_host / topology.devices / time.step if time.step else 0.0
