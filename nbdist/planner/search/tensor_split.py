"""Choice of the dimensions that the model axis shards, by a small integer program.

Every group of dimensions is sharded or not. At most one group of an operation or an array is
sharded, because one axis shards an array once. The program minimizes the time of operations, which
sharding reduces, plus that of the sums that it needs; memory of arrays is bounded. HiGHS solves it
(`scipy.optimize.milp`) deterministically.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.cost.time import Cost
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.program import Program
from nbdist.records import MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.model import Model, Op, Tensor, Value
    from nbdist.records import Extent

MANY = 24
"""Number of groups from which on groups of repeated layers are decided together."""


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
    """Return the groups to shard over `layout.model` devices.

    Args:
        model: the step.
        program: its operations, fused.
        layout: sizes of the axes, without groups over the model axis.
        states: numbers of carried values that are not parameters.
        target: the hardware.
        extents: extents of the axes.
        budget: bytes for the step's inputs on each device, if possible.
        large: arrays that are sharded, if possible.

    Returns:
        The groups; None if nothing can be sharded.
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
    """Return the representative of each group that may be sharded; equal ones share one."""
    classes = {group: group for group in free}
    if len(free) <= MANY:
        return classes
    first: dict[tuple[str, int, int], int] = {}
    members = {group: [group] for group in free}
    for tensor in model.tensors:
        pattern = re.sub(r"\d+", "#", tensor.path)
        for dim, group in enumerate(tensor.value.groups):
            if group in free:
                own = first.setdefault((pattern, dim, tensor.value.sizes[dim]), classes[group])
                _merge(classes, members, classes[group], own)
    return classes if _is_sound(model, classes) else {group: group for group in free}


def _merge(classes: dict[int, int], members: dict[int, list[int]], one: int, other: int) -> None:
    """Give the groups of two classes the lower representative.

    Args:
        classes: the representative of each group.
        members: the groups of each representative.
        one: a representative.
        other: another representative, or one whose class has been merged.
    """
    low, high = min(one, other), max(one, other)
    if low == high:
        return
    moved = members.pop(high, [])
    classes.update(dict.fromkeys(moved, low))
    members.setdefault(low, []).extend(moved)


def _is_sound(model: Model, classes: dict[int, int]) -> bool:
    """Return True if no array has two dimensions that are decided together."""
    for tensor in model.tensors:
        own = [classes[group] for group in set(tensor.value.groups) if group in classes]
        if len(own) != len(set(own)):
            return False
    return True


class _Constraint(NamedTuple):
    """Bounds on a weighted sum of all variables."""

    weights: np.ndarray
    least: float = -math.inf
    most: float = math.inf


def _minimum(costs: np.ndarray, constraints: Sequence[_Constraint]) -> np.ndarray | None:
    """Return the variables, 0 or 1, with the least cost; None if no values fit the constraints."""
    import numpy as np
    from scipy.optimize import (  # type: ignore[import-untyped]
        Bounds,
        LinearConstraint,
        milp,
    )

    weights, least, most = zip(*constraints, strict=True)
    found: np.ndarray | None = milp(
        costs / max(np.abs(costs).max(), 1e-30),
        constraints=LinearConstraint(np.array(weights), least, most),
        integrality=np.ones_like(costs),
        bounds=Bounds(0, 1),
    ).x
    return found


class _Program:
    """The integer program, with a variable for each class (sharded) and each bundle (shared).

    A bundle is the operations, or the arrays, that the same classes would shard.
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
        bundles = sorted({*self._saved, *self._freed} - {frozenset()}, key=sorted)
        width = len(self._order)
        shared = {bundle: width + place for place, bundle in enumerate(bundles)}
        costs, freed = self._coefficients(shared)
        found = _minimum(costs, self._constraints(freed, shared, budget, large))
        if found is None:
            return None
        sharded = {group for group, place in self._order.items() if found[place] > 0.5}
        return frozenset(group for group, own in self._classes.items() if own in sharded)

    def _coefficients(self, shared: dict[frozenset[int], int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds that each variable costs, and the bytes that it frees.

        Args:
            shared: the variable of each bundle.
        """
        import numpy as np

        costs = np.zeros(len(self._order) + len(shared))
        for group, seconds in self._summed.items():
            costs[self._order[group]] += seconds
        freed = np.zeros_like(costs)
        for bundle, column in shared.items():
            costs[column] -= self._saved.get(bundle, 0.0)
            freed[column] = self._freed.get(bundle, 0.0)
        return costs, freed

    def _constraints(
        self,
        freed: np.ndarray,
        shared: dict[frozenset[int], int],
        budget: float,
        large: Sequence[Tensor],
    ) -> list[_Constraint]:
        """Return the constraints on all variables.

        Args:
            freed: the bytes that each variable frees.
            shared: the variable of each bundle.
            budget: the bytes that a device may store.
            large: the arrays that must be sharded.
        """
        import numpy as np

        some = np.zeros_like(freed)
        some[: len(self._order)] = 1  # the axis must shard something
        constraints = [_Constraint(freed, least=self._given - budget), _Constraint(some, least=1)]
        for tensor in large:
            row = np.zeros_like(freed)
            row[[self._order[group] for group in self._of(tensor.value.groups)]] = 1
            constraints.append(_Constraint(row, least=1))
        for bundle, column in shared.items():
            row = np.zeros_like(freed)
            row[[self._order[group] for group in bundle]] = 1
            constraints.append(_Constraint(row.copy(), most=1))  # at most one of them is sharded
            row[column] = -1  # shared only if one is sharded
            constraints.append(_Constraint(row, least=0))
        return constraints

    def _of(self, groups: tuple[int, ...]) -> frozenset[int]:
        return frozenset(self._classes[group] for group in groups if group in self._classes)

    def _price(self, ops: tuple[Op, ...], cost: Cost, times: int = 1) -> None:
        prices = cost.prices(ops)
        bundles = self._bundles(ops)
        part = 1 - 1 / self._sharded.layout.model
        for op, number, (bundle, summed) in zip(ops, prices.numbers, bundles, strict=True):
            if op.kind == "loop":
                within, rounds = cost.inside(op)
                self._price(op.body, within, times * rounds)
                continue
            if not bundle:
                continue
            self._saved[bundle] += times * prices.seconds[number] * part
            for group in summed:
                nbytes = sum(map(cost.sharded.bytes_of, op.outs))
                self._summed[group] += times * cost.all_reduce_s(MODEL, nbytes)

    def _bundles(self, ops: tuple[Op, ...]) -> list[tuple[frozenset[int], frozenset[int]]]:
        """Return the classes of groups of each operation, and those whose sums need a transfer."""
        numbers, firsts = (ops if isinstance(ops, Program) else Program(ops)).different
        known: dict[tuple[int, ...], frozenset[int]] = {}

        def of(values: Sequence[Value]) -> frozenset[int]:
            found: frozenset[int] = frozenset()
            for value in values:
                if value.groups not in known:
                    known[value.groups] = self._of(value.groups)
                found |= known[value.groups]
            return found

        found = []
        for op in firsts:
            outs = of(op.outs)
            found.append((of(op.ins) | outs, self._of(op.summed) - outs))
        return [found[number] for number in numbers]


def splittable(model: Model, parts: int) -> dict[int, str]:
    """Return, for each group of carried or read arrays, why it cannot be sharded into `parts`.

    The reason is empty if the group can be sharded.
    """
    batch, doubled = model.batch_groups, model.doubled
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
        return "it belongs to the batch"
    if found.blocked:
        return found.blocked
    if group in doubled:
        return "an operation has it in two dimensions"
    if found.divisor % parts:
        pad = -found.divisor % parts
        return f"{found.divisor} is not a multiple of {parts} (pad it by {pad})"
    return ""
