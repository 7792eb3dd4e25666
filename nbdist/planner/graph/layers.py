"""Dimensions that are layers, which pipelines split into stages.

In a scan over layers, rows of the batch pass from iteration to iteration, and each iteration has
its own parameters. The scan of its backward pass goes over the same layers. (In a scan over time,
each iteration has its own rows.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model, Op


def layers_of(model: Model) -> frozenset[int]:
    """Return the groups of dimensions that scans over layers go over.

    Args:
        model: the step; its `layers` are ignored.
    """
    batch = model.batch_groups
    owned = {g for t in model.tensors if t.role != "batch" for g in t.value.groups if g >= 0}
    found: set[int] = set()
    for op in model.ops:
        if all(batch.isdisjoint(value.groups) for value in op.carried):
            continue
        groups = {value.groups[0] for value in op.over} - {-1}
        if op.times == 1:
            continue
        if _is_forward(op, batch, owned) or not groups.isdisjoint(found):
            found |= groups
    return frozenset(found - batch)


def stages_of(model: Model) -> tuple[int, ...]:
    """Return the numbers of stages that the layers allow; empty without a scan over layers."""
    return tuple(range(2, min(_sizes_of(model), default=0) + 1))


def blocks_of(model: Model) -> tuple[int, ...]:
    """Return the numbers of blocks that divide the layers; empty without a scan over layers."""
    most = math.gcd(*_sizes_of(model))
    return tuple(blocks for blocks in range(2, most + 1) if not most % blocks)


def _sizes_of(model: Model) -> list[int]:
    """Return the numbers of layers."""
    return [model.groups[group].divisor for group in model.layers]


def is_over_layers(op: Op, model: Model) -> bool:
    """Return True if an operation is a scan over layers."""
    return any(value.groups[0] in model.layers for value in op.over)


def _is_forward(op: Op, batch: frozenset[int], owned: set[int]) -> bool:
    """Return True if iterations have their own parameters and no rows of their own."""
    given = {value.number for value in op.ins}
    own = [value for value in op.over if value.number in given]
    return all(batch.isdisjoint(value.groups) for value in own) and any(
        value.groups[0] in owned and value.is_inexact for value in own
    )
