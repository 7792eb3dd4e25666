"""Tables that rows are looked up in: cut over the data axis they need not be gathered.

XLA looks rows up where a table lies (seen in what it makes of programs for H100s, v5e and CPUs). If
columns are cut, every device takes its columns of the rows of all, and an all-to-all brings each
its own rows, whole; the gradient goes the same way back. If rows are cut, each takes those that it
has of all, and their sum is scattered: that is as much as all devices have together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.graph.model import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.graph.model import Model, Op


def tables_of(model: Model) -> Mapping[tuple[int, ...], Table]:
    """Those among what a step carries, by their groups.

    Args:
        model: the step; its `tables` are not looked at.
    """
    carried = {t.value.groups for t in model.tensors if t.role == "carried"}
    found: dict[tuple[int, ...], set[int]] = {}
    for op in model.every_op:
        if op.kind == "lookup" and op.ins[0].groups in carried:
            found.setdefault(op.ins[0].groups, set()).update(op.summed)
    met = set().union(*(_met(op, model.batch_groups) for op in model.every_op))
    return {
        groups: Table(frozenset(rows), is_alone=met.isdisjoint(rows))
        for groups, rows in found.items()
        if len(rows) < len(groups) and -1 not in groups
    }


def _met(op: Op, batch: frozenset[int]) -> set[int]:
    """Groups of what an operation makes more of with the batch than to look it up."""
    if op.kind in ("lookup", "scatter", "loop"):
        return set()
    groups = {group for value in (*op.ins, *op.outs) for group in value.groups}
    return groups if not batch.isdisjoint(groups) else set()
