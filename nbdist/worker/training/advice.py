"""What could be better about the batch of a step, with what to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.records import StepBegun

SMALL_BATCH = 4
"""A replica's part of a batch that is too small to be worth a replica."""


def remarks(begun: StepBegun) -> list[str]:
    """A line for each."""
    replicas, rows = begun.replicas, begun.batch
    if replicas == 1:
        return []
    found = []
    if 0 <= begun.samples < replicas:
        found.append(
            f"the data have {begun.samples} samples for {replicas} replicas, which all compute the "
            f"same: type %dist_start {max(1, begun.samples)}, or bring more data"
        )
    elif rows % replicas:
        below, above = rows - rows % replicas, rows + replicas - rows % replicas
        fitting = f"{below} or --batch {above}" if below else f"{above}"
        found.append(
            f"a batch of {rows} does not divide over {replicas} replicas, and each computes all of "
            f"it: type --batch {fitting}"
        )
    elif rows // replicas <= SMALL_BATCH:
        found.append(
            f"each replica has {rows // replicas} samples of a batch of {rows}, too few to be "
            f"worth it: type --batch {8 * replicas} or more"
        )
    return found
