"""A pipeline whose microbatches go back as soon as they have come through, as one operation (1F1B).

What is between the layers' forward pass and their backward pass is made of one microbatch at a
time: what the worker does in `jaxpr/pipeline/one_f_one_b.py`, with the planner's operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.graph.layers import is_over_layers
from nbdist.planner.graph.model import Op

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model, Value

ALTERNATING = "1f1b"
"""Name of such an operation; its body is the loop there, what is between, and the loop back."""


def alternating(program: tuple[Op, ...], model: Model) -> tuple[Op, ...]:
    """A program with its two loops over layers, and what is between them, as one operation.

    Args:
        program: the step's operations, fused.
        model: the step.

    Raises:
        PlanError: it has more loops over layers than one and its way back.
    """
    loops = [op for op in program if is_over_layers(op, model)]
    if len(loops) != 2:
        raise PlanError("no 1F1B: it takes one scan over layers and its way back")
    there, back = loops
    late = _reached(program, back)
    between = _between(program, there, late, model)
    inside = {id(op) for op in (there, *between, back)}
    before = [op for op in program if id(op) not in inside | late]
    after = [op for op in program if id(op) in late and id(op) not in inside]
    body = (there, *between, back)
    needed = {value.number for op in after for value in op.ins} | model.results
    made = {value.number for op in body for value in op.outs}
    ins = {v.number: v for op in body for v in op.ins if v.number not in made}
    outs = {v.number: v for op in body for v in op.outs if v.number in needed}
    whole = Op("loop", ALTERNATING, tuple(ins.values()), tuple(outs.values()), body=body)
    return (*before, whole, *after)


def _reached(program: tuple[Op, ...], of: Op) -> set[int]:
    """All that is made of what an operation makes, and it."""
    made = {value.number for value in of.outs}
    found = {id(of)}
    for op in program:
        if any(value.number in made for value in op.ins):
            found.add(id(op))
            made.update(value.number for value in op.outs)
    return found


def _between(program: tuple[Op, ...], there: Op, late: set[int], model: Model) -> list[Op]:
    """What is made of what has come through, and what is made of rows for that alone."""
    reached, batch = _reached(program, there) - late, model.batch_groups
    wanted: set[int] = set()
    others = set(model.results)
    found = []

    def is_own(op: Op) -> bool:
        numbers = {value.number for value in op.outs}
        has_rows = all(not batch.isdisjoint(value.groups) for value in op.outs)
        return has_rows and numbers <= wanted and not numbers & others

    for op in reversed(program):
        if op is there or id(op) in late or not (id(op) in reached or is_own(op)):
            others.update(value.number for value in op.ins)
        else:
            found.append(op)
            wanted.update(value.number for value in op.ins)
    return found[::-1]


def parts_of(op: Op) -> tuple[Op, tuple[Op, ...], Op]:
    """Of such an operation, the loop there, what is between, and the loop back."""
    there, *between, back = op.body
    return there, tuple(between), back


def kept(there: Op, back: Op) -> tuple[Value, ...]:
    """What layers leave for the way back, stacked."""
    given = {value.number for value in there.ins}
    wanted = {value.number for value in back.ins} - given
    return tuple(value for value in there.over if value.number in wanted)
