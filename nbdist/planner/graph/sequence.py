"""Sequence parallelism: values between products are sharded along the sequence.

If the model axis shards the dimension that a product sums over, each device has a part of the sum.
The result passes through norms, residual sums and dropout, in which the axis could shard nothing
but the sequence. If it does, its devices share these operations and their memory. The sum is
reduce-scattered, and gathered before the next product (Korthikanti et al., arXiv:2205.05198,
section 4.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model


def sequence_of(model: Model, split: frozenset[int], parts: int) -> frozenset[int]:
    """Return the groups of dimensions along which results of products can be sharded.

    Dimensions that a product without the model axis sums over are excluded: its results would be
    parts of sums.

    Args:
        model: the step.
        split: groups that the model axis shards.
        parts: size of the model axis.
    """
    batch = model.batch_groups
    found: set[int] = set()
    summed: set[int] = set()
    for op in model.products:
        values = (*op.ins, *op.outs)
        of_rows = [value for value in op.ins if not batch.isdisjoint(value.groups)]
        (made,) = op.outs
        if all(split.isdisjoint(value.groups) for value in values):
            summed.update(op.summed if not batch.isdisjoint(made.groups) else ())
        elif len(of_rows) == 1 and split.intersection(op.summed) and split.isdisjoint(made.groups):
            found.update(set(made.groups).intersection(of_rows[0].groups))
    return frozenset(
        group
        for group in found - summed - batch - {-1}
        if not model.groups[group].blocked and model.groups[group].divisor % parts == 0
    )
