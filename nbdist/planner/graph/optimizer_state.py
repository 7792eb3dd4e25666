"""Carried arrays that are not parameters: optimizer state, counters, averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model, Op


def states_of(model: Model) -> frozenset[int]:
    """Return the numbers of carried arrays that no operation combines with the batch."""
    batch = model.batch_groups
    carried = [t.value.number for t in model.tensors if t.role == "carried"]
    origins = {number: 1 << place for place, number in enumerate(carried)}
    met = 0
    for op in model.ops:
        values = (*op.ins, *op.outs)
        meets = any(not batch.isdisjoint(v.groups) for v in values) or _loops_over(op, batch)
        mask = 0
        for value in op.ins:
            mask |= origins.get(value.number, 0)
        if meets:
            met |= mask
        elif mask and op.kind in ("stream", "reduce"):
            for value in op.outs:
                origins[value.number] = origins.get(value.number, 0) | mask
    return frozenset(n for place, n in enumerate(carried) if not met >> place & 1)


def _loops_over(op: Op, batch: frozenset[int]) -> bool:
    return any(
        not batch.isdisjoint(value.groups) or _loops_over(inner, batch)
        for inner in op.body
        for value in inner.outs
    )
