"""Padding of images in the memory of TPUs.

Values are stored in tiles of 8 x 128, and the compiler chooses the dimension along the 128 lanes.
For inputs and results of convolutions it is the batch's or the channels', whichever needs less
padding (seen in programs for v5e and v5p). Other values fit without padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.graph.model import Model

LANES = 128


def images_of(model: Model) -> Mapping[tuple[int, ...], frozenset[int]]:
    """Return the dimensions that may be along the lanes, by the groups of a convolution's values.

    Args:
        model: the step; its `images` are ignored.
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
    """Return the padding factor of a dimension along the lanes."""
    return -(-size // LANES) * LANES / size
