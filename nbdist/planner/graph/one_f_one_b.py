"""A 1F1B pipeline as one operation of the planner.

The loss section, between the layers' forward pass and their backward pass, runs on one microbatch
at a time. `jaxpr/pipeline/loss_section.py` selects it with the functions of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.errors import PlanError
from nbdist.planner.graph.layers import is_over_layers
from nbdist.planner.graph.model import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from nbdist.planner.graph.model import Model, Value

PIPELINE_1F1B = "1f1b"
"""Name of a pipeline operation; its body is the forward loop, the loss section and the backward
loop."""


def as_1f1b(program: tuple[Op, ...], model: Model) -> tuple[Op, ...]:
    """Return a program in which both loops over layers and the loss section are one operation.

    Args:
        program: the step's operations, fused.
        model: the step.

    Raises:
        PlanError: the loops over layers are not one loop and its backward pass.
    """
    loops = [op for op in program if is_over_layers(op, model)]
    if len(loops) != 2:
        raise PlanError(
            "schedule=1f1b is not possible: the step needs exactly one scan over layers and its "
            "backward pass; use schedule=gpipe"
        )
    forward, backward = loops
    batch = model.batch_groups

    def is_own(op: Op) -> bool:
        return all(not batch.isdisjoint(value.groups) for value in op.outs)

    others = [_flow(op) for op in program if op is not forward and op is not backward]
    late = reached(others, _flow(backward).outs)
    needed_elsewhere = {*model.results, *_flow(forward).ins, *_flow(backward).ins}
    middle = reached(others, _flow(forward).outs) - late
    loss_ops = joined(others, middle, late, wanted=set(), others=needed_elsewhere, may_join=is_own)
    inside = {id(op) for op in (forward, *loss_ops, backward)}
    before = [op for op in program if id(op) not in inside and late.isdisjoint(_flow(op).outs)]
    after = [op for op in program if id(op) not in inside and not late.isdisjoint(_flow(op).outs)]
    body = (forward, *loss_ops, backward)
    needed = {value.number for op in after for value in op.ins} | model.results
    made = {value.number for op in body for value in op.outs}
    ins = {v.number: v for op in body for v in op.ins if v.number not in made}
    outs = {v.number: v for op in body for v in op.outs if v.number in needed}
    whole = Op("loop", PIPELINE_1F1B, tuple(ins.values()), tuple(outs.values()), body=body)
    return (*before, whole, *after)


class Flow(NamedTuple):
    """The data flow of one operation: of the planner, or an equation of a jaxpr.

    Attributes:
        op: the operation.
        ins: keys of the values that it reads.
        outs: keys of the values that it makes.
    """

    op: Any
    ins: frozenset[Any]
    outs: frozenset[Any]


def _flow(op: Op) -> Flow:
    ins, outs = (frozenset(value.number for value in side) for side in (op.ins, op.outs))
    return Flow(op, ins, outs)


def reached(flows: Iterable[Flow], start: Iterable[Any]) -> set[Any]:
    """Return the keys of all values that depend on some values, and the keys of these.

    Args:
        flows: operations in program order.
        start: keys of the values to start from.
    """
    found = set(start)
    for flow in flows:
        if not found.isdisjoint(flow.ins):
            found.update(flow.outs)
    return found


def joined(
    flows: Sequence[Flow],
    middle: Collection[Any],
    late: Collection[Any],
    *,
    wanted: set[Any],
    others: set[Any],
    may_join: Callable[[Any], bool],
    is_repeatable: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """Return the operations of the loss section, which runs once for each microbatch.

    These are the operations that depend on the last layer's output and not on the backward pass,
    and those that are needed by them alone.

    Args:
        flows: the program in order, without the scans over layers.
        middle: keys of the values that depend on the last layer's output.
        late: keys of the values that depend on the backward pass.
        wanted: keys of the values that the section must make; those that it reads are added.
        others: keys of the values that are needed elsewhere; more are added.
        may_join: returns True if an operation that only the section needs can run on a microbatch.
        is_repeatable: returns True if an operation can run both in the section and outside of it.
    """
    found = []
    for op, ins, outs in reversed(flows):
        is_own = wanted.issuperset(outs) and others.isdisjoint(outs)
        joins = (
            not outs.isdisjoint(middle)
            or (is_own and may_join(op))
            or (not outs.isdisjoint(wanted) and is_repeatable(op))
        )
        if joins and outs.isdisjoint(late):
            found.append(op)
            wanted.update(ins)
        else:
            others.update(ins)
    return found[::-1]


def parts_of(op: Op) -> tuple[Op, tuple[Op, ...], Op]:
    """Return the forward loop, the loss section and the backward loop of a pipeline operation."""
    forward, *loss_ops, backward = op.body
    return forward, tuple(loss_ops), backward


def stored_results(forward: Op, backward: Op) -> tuple[Value, ...]:
    """Return the stacked results of the forward loop that the backward loop reads."""
    given = {value.number for value in forward.ins}
    wanted = {value.number for value in backward.ins} - given
    return tuple(value for value in forward.over if value.number in wanted)
