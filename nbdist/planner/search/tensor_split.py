"""Which dimensions the model's axis cuts: a small integer program.

Every group of dimensions is cut or not; of the groups of one operation, or of one array, at most
one is, as one axis cuts an array once. What is minimised is the time of the operations, which cut
groups make shorter, and of the sums that they make necessary; what the arrays take is bounded.
HiGHS solves it (`scipy.optimize.milp`), the same way for the same input.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.planner.cost.time import Cost
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.search.legal_splits import splittable
from nbdist.records import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.model import Model, Op, Tensor
    from nbdist.records import Extent

MANY = 24
"""Groups from which on those of repeated layers are decided together."""


def split_for(
    model: Model,
    program: tuple[Op, ...],
    layout: Layout,
    states: frozenset[int],
    target: Target,
    extents: dict[str, Extent],
    budget: float,
    large: Sequence[Tensor],
) -> frozenset[int] | None:
    """The groups to cut over `layout.model` devices.

    Args:
        model: the step.
        program: its operations, fused.
        layout: the sizes of the axes, with nothing cut over the model's yet.
        states: what is carried and no parameter.
        target: the hardware.
        extents: how the axes lie in it.
        budget: bytes that what the step is given may take on each device, if that can be had.
        large: arrays that are cut, if they can be.

    Returns:
        None where nothing can be cut.
    """
    reasons = splittable(model, layout.model)
    free = {group for group, reason in reasons.items() if not reason}
    classes = _classes(model, free)
    if not classes:
        return None
    found = _Program(model, program, layout, states, target, extents, classes)
    tried = (budget, large), (math.inf, large), (budget, ()), (math.inf, ())
    return next(filter(None, (found.solved(*one) for one in tried)), None)


def _classes(model: Model, free: set[int]) -> dict[int, int]:
    """For each group that may be cut, the one that stands for all that are decided with it."""
    classes = {group: group for group in free}
    if len(free) <= MANY:
        return classes
    first: dict[tuple[str, int, int], int] = {}
    for tensor in model.tensors:
        pattern = re.sub(r"\d+", "#", tensor.path)
        for dim, group in enumerate(tensor.value.groups):
            if group in free:
                own = first.setdefault((pattern, dim, tensor.value.sizes[dim]), classes[group])
                _merge(classes, classes[group], own)
    return classes if _is_sound(model, classes) else {group: group for group in free}


def _merge(classes: dict[int, int], one: int, other: int) -> None:
    low, high = min(one, other), max(one, other)
    for group, own in classes.items():
        if own == high:
            classes[group] = low


def _is_sound(model: Model, classes: dict[int, int]) -> bool:
    """Whether no array has two dimensions that would be decided together."""
    for tensor in model.tensors:
        own = [classes[group] for group in set(tensor.value.groups) if group in classes]
        if len(own) != len(set(own)):
            return False
    return True


class _Program:
    """The integer program: for each class whether it is cut, for each bundle whether it is shared.

    A bundle is the operations, or the arrays, that the same classes would cut.
    """

    def __init__(
        self,
        model: Model,
        program: tuple[Op, ...],
        layout: Layout,
        states: frozenset[int],
        target: Target,
        extents: dict[str, Extent],
        classes: dict[int, int],
    ) -> None:
        self._classes = classes
        self._order = {c: place for place, c in enumerate(sorted(set(classes.values())))}
        self._saved: dict[frozenset[int], float] = defaultdict(float)
        self._summed: dict[int, float] = defaultdict(float)
        self._freed: dict[frozenset[int], float] = defaultdict(float)
        self._sharded = sharded = ShardedModel(model, layout, states)
        self._given = sum(sharded.device_bytes(tensor) for tensor in model.tensors)
        for tensor in model.tensors:
            whole = sharded.device_bytes(tensor)
            self._freed[self._of(tensor.value.groups)] += whole * (1 - 1 / layout.model)
        self._price(program, Cost(sharded, target, extents))

    def solved(self, budget: float, large: Sequence[Tensor]) -> frozenset[int] | None:
        import numpy as np
        from scipy.optimize import (  # type: ignore[import-untyped]
            Bounds,
            LinearConstraint,
            milp,
        )

        bundles = sorted({*self._saved, *self._freed} - {frozenset()}, key=sorted)
        width = len(self._order)
        shared = {bundle: width + place for place, bundle in enumerate(bundles)}
        costs = np.zeros(width + len(bundles))
        for group, seconds in self._summed.items():
            costs[self._order[group]] += seconds
        freed = np.zeros_like(costs)
        for bundle, column in shared.items():
            costs[column] -= self._saved.get(bundle, 0.0)
            freed[column] = self._freed.get(bundle, 0.0)
        some = np.zeros_like(costs)
        some[:width] = 1  # an axis that cuts nothing would be of no use
        rows, least, most = [freed, some], [self._given - budget, 1], [np.inf, np.inf]
        for tensor in large:
            row = np.zeros_like(costs)
            row[[self._order[group] for group in self._of(tensor.value.groups)]] = 1
            rows.append(row)
            least.append(1)
            most.append(np.inf)
        for bundle, column in shared.items():
            row = np.zeros_like(costs)
            row[[self._order[group] for group in bundle]] = 1
            rows.append(row.copy())  # at most one of them is cut
            least.append(-np.inf)
            most.append(1)
            row[column] = -1  # shared only where one is
            rows.append(row)
            least.append(0)
            most.append(np.inf)
        scale = max(np.abs(costs).max(), 1e-30)
        found = milp(
            costs / scale,
            constraints=LinearConstraint(np.array(rows), least, most),
            integrality=np.ones_like(costs),
            bounds=Bounds(0, 1),
        )
        if found.x is None:
            return None
        cut = {group for group, place in self._order.items() if found.x[place] > 0.5}
        return frozenset(group for group, own in self._classes.items() if own in cut)

    def _of(self, groups: tuple[int, ...]) -> frozenset[int]:
        return frozenset(self._classes[group] for group in groups if group in self._classes)

    def _price(self, ops: tuple[Op, ...], cost: Cost, times: int = 1) -> None:
        for op in ops:
            if op.kind == "loop":
                within, rounds = cost.inside(op)
                self._price(op.body, within, times * rounds)
                continue
            bundle = self._of(tuple(_groups(op)))
            if not bundle:
                continue
            seconds = times * cost.op_s(op)
            self._saved[bundle] += seconds * (1 - 1 / self._sharded.layout.model)
            nbytes = sum(map(cost.sharded.bytes_of, op.outs))
            out = self._of(tuple(group for value in op.outs for group in value.groups))
            for group in self._of(op.summed) - out:
                self._summed[group] += times * cost.all_reduce_s(MODEL, nbytes)


def _groups(op: Op) -> Iterator[int]:
    for value in (*op.ins, *op.outs):
        yield from value.groups
