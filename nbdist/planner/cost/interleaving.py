"""What stages with several blocks of layers send each other once in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.graph.layout import ShardedModel
    from nbdist.planner.graph.model import Op, Value


def deals(sharded: ShardedModel, program: tuple[Op, ...]) -> dict[int, Value]:
    """Stacks of layers that go to their stages, or come back, by their numbers.

    As `jaxpr/pipeline/interleaving.py` and `jaxpr/pipeline/precompute.py` have it: each goes once,
    whichever loops need it; what a loop makes of parameters alone, for another one, stays where it
    is.

    Args:
        sharded: the model in its layout.
        program: its operations, fused.
    """
    if sharded.layout.rounds == 1:
        return {}
    loops = list(_loops(sharded, program))
    needed = {value.number for op in loops for value in _given(op)}
    made: set[int] = set()
    found: dict[int, Value] = {}
    for op in loops:
        given = {value.number for value in _given(op)}
        for value in op.over:
            if sharded.has_rows(value):
                continue
            if value.number not in given:
                made.add(value.number)
            if value.number in given - made or value.number not in needed:
                found[value.number] = value
    return found


def _loops(sharded: ShardedModel, program: tuple[Op, ...]) -> Iterator[Op]:
    for op in program:
        if sharded.is_staged(op):
            yield op
        else:
            yield from _loops(sharded, op.body)


def _given(op: Op) -> Iterator[Value]:
    """What it goes over."""
    numbers = {value.number for value in op.ins}
    return (value for value in op.over if value.number in numbers)
