"""Which dimensions of arrays can be cut over the axis of the model, and why the others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model, Op


def splittable(model: Model, parts: int) -> dict[int, str]:
    """For each group of the arrays that are carried or read, why it cannot be cut in `parts`.

    Empty where it can.
    """
    batch, doubled = model.batch_groups, _doubled(model.ops)
    reasons: dict[int, str] = {}
    for tensor in model.tensors:
        for group in tensor.value.groups if tensor.role != "batch" else ():
            if group >= 0 and group not in reasons:
                reasons[group] = _reason(model, group, parts, batch, doubled)
    return reasons


def _reason(
    model: Model, group: int, parts: int, batch: frozenset[int], doubled: frozenset[int]
) -> str:
    found = model.groups[group]
    if group in batch:
        return "it is the batch's"
    if found.blocked:
        return found.blocked
    if group in doubled:
        return "an operation has it twice"
    if found.divisor % parts:
        pad = -found.divisor % parts
        return f"{found.divisor} is no multiple of {parts} (pad it by {pad})"
    return ""


def _doubled(ops: tuple[Op, ...]) -> frozenset[int]:
    """Groups that a value of an operation has twice: one axis cannot cut both."""
    found: set[int] = set()
    for op in ops:
        found |= _doubled(op.body)
        for value in (*op.ins, *op.outs):
            groups = [group for group in value.groups if group >= 0]
            found |= {group for group in groups if groups.count(group) > 1}
    return frozenset(found)
