"""How much memory a step takes on each device.

What the step is given is counted exactly, as XLA counts it. The rest is what the fused program
(`planner/graph/fusion.py`) has in memory at the worst moment, if it is run in its own order; what
is left at the end takes the place of what was given.

Of a pipeline each stage has its own layers' activations, of all ticks (GPipe keeps all
microbatches) or of as many as are under way (1F1B). What goes through it is there twice more: as it
comes in, and as it leaves the stages; and what the layers leave in a tick is there before it is put
to the rest. Where a stage has several blocks of layers, their parameters are there once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.cost.interleaving import deals
from nbdist.planner.graph.one_f_one_b import ALTERNATING, kept, parts_of
from nbdist.records import PlannedMemory

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.planner.graph.layout import ShardedModel
    from nbdist.planner.graph.model import Op, Value

MARGIN = 0.04
"""Of the memory there is: what allocators lose in fragments, and runtimes keep to themselves."""


class _Scope(NamedTuple):
    """What is the same for all operations.

    Attributes:
        batch: the batch's groups.
        deals: numbers of what stages send each other: it is there twice.
    """

    batch: Collection[int]
    deals: Collection[int]


def memory_of(sharded: ShardedModel, program: tuple[Op, ...], available: int) -> PlannedMemory:
    """What a layout takes.

    Args:
        sharded: the model in its layout.
        program: its operations, fused.
        available: bytes that may be taken on each.
    """
    given = {tensor.value.number for tensor in sharded.model.tensors}
    scope = _Scope(sharded.model.batch_groups, frozenset(deals(sharded, program)))
    batch, rest = _peak(sharded, program, sharded.model.results | given, scope)
    gathered = _gathered(sharded)
    return PlannedMemory(
        arguments=sum(sharded.device_bytes(tensor) for tensor in sharded.model.tensors),
        gradients=int(rest + gathered),
        activations=int(batch),
        margin=int(MARGIN * available),
        available=available,
    )


def _gathered(sharded: ShardedModel) -> float:
    """What is put together of parts that devices have.

    Under ZeRO-3, the two largest parameters are whole at a time: one used, one on its way. Under
    ZeRO-1, a new one is, before it takes the place of the old one.
    """
    if sharded.layout.zero == 1:
        parameters = (t for t in sharded.model.tensors if sharded.role(t) == "parameter")
        return max((sharded.bytes_of(t.value) for t in parameters), default=0.0)
    wholes = [
        sharded.bytes_of(tensor.value) - sharded.device_bytes(tensor)
        for tensor in sharded.model.tensors
        if sharded.is_gathered(tensor)
    ]
    return sum(sorted(wholes)[-2:])


def _peak(
    sharded: ShardedModel, ops: tuple[Op, ...], free: Collection[int], scope: _Scope
) -> tuple[float, float]:
    """The most bytes at a time, of values with the batch's dimensions and of others.

    Args:
        sharded: the model in its layout.
        ops: in their order.
        free: numbers of values that take no memory of their own.
        scope: what else is known.
    """
    last = {value.number: place for place, op in enumerate(ops) for value in op.ins}
    ends: dict[int, list[tuple[Value, Op]]] = {}
    now = [0.0, 0.0]
    worst = (0.0, 0.0)
    for place, op in enumerate(ops):
        inner = _within(sharded, op, scope)
        for value in op.outs:
            if value.number not in free:
                now[_is_other(value, scope.batch)] += _bytes_of(value, op, sharded)
                ends.setdefault(last.get(value.number, place), []).append((value, op))
        beside = _gathered_along(sharded, op) + _of_all(sharded, op)
        here = now[0] + inner[0] + beside, now[1] + inner[1]
        worst = max(worst, here, key=sum)
        for value, maker in ends.pop(place, ()):
            now[_is_other(value, scope.batch)] -= _bytes_of(value, maker, sharded)
    return worst


def _within(sharded: ShardedModel, op: Op, scope: _Scope) -> tuple[float, float]:
    """As `_peak`, of what a loop has in memory beside what it is given and leaves."""
    if not op.body:
        return 0.0, 0.0
    if op.name == ALTERNATING:
        return _alternating(sharded, op, scope)
    if sharded.is_staged(op):
        rows, others = _staged(sharded, op, scope)
        return rows + 2 * _passed(sharded, op), others
    return _peak(sharded, op.body, {value.number for value in op.outs}, scope)


def _alternating(sharded: ShardedModel, op: Op, scope: _Scope) -> tuple[float, float]:
    """Of a loop in which microbatches go back as soon as they have come through.

    One of the ways, or what is between, has its own in memory at a time; beside it there is what is
    kept for the way back, what comes in and what has come back, and what is added to.
    """
    there, between, back = parts_of(op)
    free = {value.number for value in op.outs}
    stacks = kept(there, back)
    each = sum(sharded.microbatch.bytes_of(value) for value in stacks if sharded.has_rows(value))
    now = each / sharded.layout.rounds
    rows, others = _staged(sharded, back, scope)
    rows, others = max(
        _staged(sharded, there, scope),
        _peak(sharded.turning, between, free, scope),
        (rows + now, others),
        key=sum,
    )
    rows += sharded.layout.held * each
    others += sum(sharded.bytes_of(value) for value in stacks if not sharded.has_rows(value))
    rows += _passed(sharded, there) + _passed(sharded, back)
    return rows, others


def _passed(sharded: ShardedModel, op: Op) -> float:
    """What goes from layer to layer, of all microbatches."""
    return sum(map(sharded.entering_bytes, filter(sharded.has_rows, op.carried)))


def _staged(sharded: ShardedModel, op: Op, scope: _Scope) -> tuple[float, float]:
    """Of a tick of a loop over layers that are cut into stages."""
    rows, others = _peak(sharded.microbatch, op.body, {value.number for value in op.outs}, scope)
    given, rounds = {value.number for value in op.ins}, sharded.layout.rounds
    for value in op.over:
        if value.number in given:
            if rounds > 1 and not sharded.has_rows(value):
                is_dealt = value.number in scope.deals
                others += (is_dealt + 1 / rounds) * sharded.bytes_of(
                    value
                )  # and the block of a tick
        elif sharded.has_rows(value):
            rows += sharded.microbatch.bytes_of(value) / rounds
        else:  # to a block's gradient a tick's is added aside: both, and the sum
            aside = 3 if value.number in scope.deals else 1
            others += aside * sharded.bytes_of(value) / rounds
    return rows, others


def _gathered_along(sharded: ShardedModel, op: Op) -> float:
    """What an operation has whole in memory, that is cut along the sequence before and after."""
    around = sharded.around(op)
    if around is sharded:
        return 0.0
    cut = {v.number: v for v in (*op.ins, *op.outs) if sharded.is_cut_along(v)}.values()
    return sum(around.bytes_of(value) - sharded.bytes_of(value) for value in cut)


def _of_all(sharded: ShardedModel, op: Op) -> float:
    """What an operation has of all devices' rows, where a table lies in parts."""
    sent = sharded.exchanged(op)
    return sent.nbytes if sent is not None else 0.0


def _ticks(sharded: ShardedModel) -> float:
    """Over the batch, the rows of all ticks, those included in which a stage waits."""
    return sharded.layout.ticks / (sharded.layout.rounds * sharded.layout.micro)


def _bytes_of(value: Value, maker: Op, sharded: ShardedModel) -> float:
    """On each device. Gradients that a loop sums or stacks are cut as the state that they change.

    (Seen in what XLA makes of ZeRO-1, for GPUs; those that no loop makes are whole there.) Those of
    a pipeline's layers are whole, and wide, until all microbatches have come through.
    """
    if maker.name == ALTERNATING and not sharded.has_rows(value):
        return sharded.summed_bytes(value)
    if sharded.is_staged(maker) and value.groups[:1] and value.groups[0] in sharded.model.layers:
        if sharded.has_rows(value):
            return sharded.entering_bytes(value) * _ticks(sharded)
        return sharded.summed_bytes(value)
    nbytes = sharded.bytes_of(value)
    if sharded.lies_as_table(value):
        return nbytes / sharded.layout.data
    if maker.kind != "loop" or sharded.layout.zero != 1 or sharded.by_data(set(value.groups)) > 1:
        return nbytes
    return nbytes / sharded.layout.data


def _is_other(value: Value, batch: Collection[int]) -> bool:
    return not any(group in batch for group in value.groups)
