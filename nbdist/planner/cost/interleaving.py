"""Layers that stages exchange once in a step, if they have several blocks or are uneven."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.graph.layout import ShardedModel
    from nbdist.planner.graph.model import Op, Value


def exchanged_stacks(sharded: ShardedModel, program: tuple[Op, ...]) -> dict[int, Value]:
    """Return the stacks of layers that stages exchange, by the number of the value.

    This follows `interleaving`, `uneven_stages` and `precompute` of `jaxpr/pipeline`: each stack is
    sent once for all loops that need it. Values that one loop computes from parameters alone for
    another loop are not sent.

    Args:
        sharded: the model in its layout.
        program: its operations, fused.
    """
    loops = list(_loops(sharded, program))
    needed = {value.number for op in loops for value in _given(op)}
    made: set[int] = set()
    found: dict[int, Value] = {}
    for op in loops:
        given = {value.number for value in _given(op)}
        for value in op.over:
            is_sent = sharded.layout.rounds > 1 or sharded.is_uneven(value)
            if sharded.has_rows(value) or not is_sent:
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
    """Return the stacked inputs of a loop."""
    numbers = {value.number for value in op.ins}
    return (value for value in op.over if value.number in numbers)
