"""Dimensions that are layers, which pipelines split into stages.

In a scan over layers, rows of the batch pass from iteration to iteration, and each iteration has
its own parameters. The scan of its backward pass goes over the same layers. (In a scan over time,
each iteration has its own rows.)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.planner.graph.model import Model, Op, Value


def layers_of(model: Model, stacks: Iterable[Value] = ()) -> frozenset[int]:
    """Return the groups that scans over layers go over, including those of the backward pass.

    Args:
        model: the step; its `layers` are ignored.
        stacks: parameters that the step stacks.
    """
    batch = model.batch_groups
    owned = {g for t in model.tensors if t.role != "batch" for g in t.value.groups if g >= 0}
    owned.update(stack.groups[0] for stack in stacks)
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


def with_stacked_layers(model: Model) -> Model:
    """Return the model of a step that stacks separate layers for its scans over layers.

    Layers of a stack are `lookup`: a slice of a stack that stages share reads no more than itself.
    """
    stacks = list(_stacks(model))
    layers = layers_of(model, stacks)
    ops = (
        replace(op, kind="lookup") if op.name == "slice" and op.ins[0].groups[0] in layers else op
        for op in model.ops
    )
    stacked = frozenset(s.groups[1:] for s in stacks if s.groups[0] in layers)
    return replace(model, ops=tuple(ops), layers=layers, stacked=stacked)


def _stacks(model: Model) -> Iterator[Value]:
    """Yield real arrays without rows that the step puts together from carried ones."""
    batch = model.batch_groups
    own = {tensor.value.number for tensor in model.tensors if tensor.role != "batch"}
    for op in model.ops:
        if own.isdisjoint(value.number for value in op.ins):
            continue
        for value in op.outs:
            if not batch.isdisjoint(value.groups):
                continue
            own.add(value.number)
            if op.name == "concatenate" and value.is_inexact and value.groups[0] >= 0:
                yield value


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
