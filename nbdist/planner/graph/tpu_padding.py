"""How a TPU's memory pads images.

It has values in tiles of 8 x 128, and a compiler chooses which dimension lies along the 128 lanes:
of what convolutions are given and make the batch's or the channels' (seen in what XLA makes of
programs for v5e and v5p), whichever has to be padded less. Of all else it finds one that fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.graph.model import Model

LANES = 128


def images_of(model: Model) -> Mapping[tuple[int, ...], frozenset[int]]:
    """By the groups of what a step's convolutions are given and make, those that lie along lanes.

    Args:
        model: the step; its `images` are not looked at.
    """
    batch = model.batch_groups
    found: dict[tuple[int, ...], frozenset[int]] = {}
    for op in model.every_op:
        if op.kind != "conv":
            continue
        values = (*op.ins, *op.outs)
        channels = {g for value in values if batch.isdisjoint(value.groups) for g in value.groups}
        for value in values:
            if not batch.isdisjoint(value.groups):
                along = (batch | channels).intersection(value.groups) - {-1}
                found[value.groups] = found.get(value.groups, along) | along
    return found


def padded(size: float) -> float:
    """How many times as much room a dimension takes along the lanes."""
    return -(-size // LANES) * LANES / size
