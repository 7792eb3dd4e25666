"""Memory of a step on each device.

Inputs of the step are counted exactly, as XLA counts them. The rest is the peak of the fused
program (`planner/graph/fusion.py`), run in its own order; results take the memory of the inputs.

Each stage of a pipeline holds the activations of its own layers. Under GPipe these are the
activations of all ticks, and under 1F1B those of the microbatches in flight. Rows that pass through
the layers are counted twice more, at entry and at exit. The results of a tick are counted once more
before they are stored. If a stage has several blocks of layers, or if stages differ in size, their
parameters are counted once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.cost.interleaving import exchanged_stacks
from nbdist.planner.graph.one_f_one_b import PIPELINE_1F1B, parts_of, stored_results
from nbdist.planner.graph.program import Program
from nbdist.records import PlannedMemory

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.planner.graph.layout import ShardedModel
    from nbdist.planner.graph.model import Op, Value

MARGIN = 0.04
"""Share of the memory that fragmentation and the runtime take."""


class _Scope(NamedTuple):
    """Values that are the same for all operations.

    Attributes:
        batch: groups of the batch.
        exchanged_stacks: numbers of the stacks that stages exchange, which are held twice.
    """

    batch: Collection[int]
    exchanged_stacks: Collection[int]


def memory_of(sharded: ShardedModel, program: tuple[Op, ...], available: int) -> PlannedMemory:
    """Return the memory that a layout takes.

    Args:
        sharded: the model in its layout.
        program: its operations, fused.
        available: bytes available on each device.
    """
    given = {tensor.value.number for tensor in sharded.model.tensors}
    scope = _Scope(sharded.model.batch_groups, frozenset(exchanged_stacks(sharded, program)))
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
    """Return the bytes of values that are gathered from all devices.

    Under ZeRO-3, the parameters of one layer of a scan are whole while it runs, and those of the
    next one are in transfer. Of other parameters, the largest is in use and the next one in
    transfer. Under ZeRO-1, a new parameter is whole before it replaces the old one.
    """
    if sharded.layout.zero == 1:
        parameters = (t for t in sharded.model.tensors if sharded.role(t) == "parameter")
        return max((sharded.bytes_of(t.value) for t in parameters), default=0.0)
    layers = {value.number: op.times for op in sharded.model.loops for value in op.over}
    wholes = {
        tensor.value.number: sharded.bytes_of(tensor.value) - sharded.device_bytes(tensor)
        for tensor in sharded.model.tensors
        if sharded.is_gathered(tensor)
    }
    in_layers = sum(2 * size / layers[n] for n, size in wholes.items() if n in layers)
    return in_layers + sum(sorted(size for n, size in wholes.items() if n not in layers)[-2:])


def _peak(
    sharded: ShardedModel, ops: tuple[Op, ...], free: Collection[int], scope: _Scope
) -> tuple[float, float]:
    """Return the peak bytes of values with rows of the batch, and of others.

    Args:
        sharded: the model in its layout.
        ops: operations in order.
        free: numbers of values that take no memory of their own.
        scope: other values that are needed.
    """
    import numpy as np

    program = ops if isinstance(ops, Program) else Program(ops)
    numbers, firsts = sharded.classes(program)
    lives = program.lifetimes(free)
    if not len(lives.counts):
        return 0.0, 0.0
    outs = [
        (_bytes_of(v, op, sharded), _is_other(v, scope.batch)) for op in firsts for v in op.outs
    ]
    first_out = np.cumsum([0, *(len(op.outs) for op in firsts)])
    of = np.array(numbers)
    values = first_out[of[lives.makers]] + lives.places
    nbytes, is_other = np.array(outs or [(0.0, False)]).T
    sizes, other = lives.signs * nbytes[values], is_other[values] > 0
    inner = np.array([_within(sharded, op, scope) for op in firsts])[of]
    beside = np.array([_gathered_along(sharded, op) + _of_all(sharded, op) for op in firsts])[of]
    rows, others = (
        np.concatenate(([0.0], np.cumsum(np.where(kind, sizes, 0.0))))[lives.counts]
        for kind in (~other, other)
    )
    here = rows + inner[:, 0] + beside, others + inner[:, 1]
    most = int(np.argmax(here[0] + here[1]))
    return max((0.0, 0.0), (float(here[0][most]), float(here[1][most])), key=sum)


def _within(sharded: ShardedModel, op: Op, scope: _Scope) -> tuple[float, float]:
    """Return the peak of a loop beside its inputs and results."""
    if not op.body:
        return 0.0, 0.0
    if op.name == PIPELINE_1F1B:
        return _one_f_one_b(sharded, op, scope)
    if sharded.is_staged(op):
        rows, others = _staged(sharded, op, scope)
        return rows + 2 * _passed(sharded, op), others
    return _peak(sharded, op.body, {value.number for value in op.outs}, scope)


def _one_f_one_b(sharded: ShardedModel, op: Op, scope: _Scope) -> tuple[float, float]:
    """Return the peak of a 1F1B pipeline.

    One of the forward pass, the loss section and the backward pass holds its own values at a time.
    Stored results for the backward pass, rows at entry and exit, and sums are held all the time.
    """
    forward, loss_ops, backward = parts_of(op)
    free = {value.number for value in op.outs}
    stacks = stored_results(forward, backward)
    each = sum(sharded.microbatch.bytes_of(value) for value in stacks if sharded.has_rows(value))
    now = each / sharded.layout.rounds
    rows, others = _staged(sharded, backward, scope)
    rows, others = max(
        _staged(sharded, forward, scope),
        _peak(sharded.loss_section, loss_ops, free, scope),
        (rows + now, others),
        key=sum,
    )
    rows += sharded.layout.held * each
    others += sum(sharded.bytes_of(value) for value in stacks if not sharded.has_rows(value))
    rows += _passed(sharded, forward) + _passed(sharded, backward)
    return rows, others


def _passed(sharded: ShardedModel, op: Op) -> float:
    """Return the bytes of carried rows of all microbatches."""
    return sum(map(sharded.entering_bytes, filter(sharded.has_rows, op.carried)))


def _staged(sharded: ShardedModel, op: Op, scope: _Scope) -> tuple[float, float]:
    """Return the peak of a tick of a loop over layers in stages."""
    rows, others = _peak(sharded.microbatch, op.body, {value.number for value in op.outs}, scope)
    given, rounds = {value.number for value in op.ins}, sharded.layout.rounds
    for value in {value.number: value for value in op.over}.values():
        is_exchanged = value.number in scope.exchanged_stacks
        if value.number in given:
            if not sharded.has_rows(value):
                block = 1 / rounds if rounds > 1 else 0  # of the tick
                others += (is_exchanged + block) * sharded.bytes_of(value)
        elif sharded.has_rows(value):
            rows += sharded.microbatch.bytes_of(value) / rounds
        else:  # a block's gradient, that of a tick, and their sum
            aside = 3 if is_exchanged and rounds > 1 else 1
            others += aside * sharded.bytes_of(value) / rounds
    return rows, others


def _gathered_along(sharded: ShardedModel, op: Op) -> float:
    """Return the extra bytes of values that an operation gathers along the sequence."""
    around = sharded.around(op)
    if around is sharded:
        return 0.0
    narrow = {v.number: v for v in (*op.ins, *op.outs) if sharded.is_sequence_sharded(v)}.values()
    return sum(around.bytes_of(value) - sharded.bytes_of(value) for value in narrow)


def _of_all(sharded: ShardedModel, op: Op) -> float:
    """Return the bytes of rows of all devices that an operation on a sharded table holds."""
    sent = sharded.exchanged(op)
    return sent.nbytes if sent is not None else 0.0


def _ticks(sharded: ShardedModel) -> float:
    """Return the rows of all ticks, idle ones included, over the rows of the batch."""
    return sharded.layout.ticks / (sharded.layout.rounds * sharded.layout.micro)


def _bytes_of(value: Value, maker: Op, sharded: ShardedModel) -> float:
    """Return the bytes of a value on each device, given the operation that makes it.

    Gradients that a loop sums or stacks are sharded like the state that they update. This was seen
    in programs of XLA for GPUs with ZeRO-1 and for TPUs with ZeRO-3, in which other gradients are
    whole. Gradients of a pipeline's layers, and sums over microbatches that stay on their device,
    are whole, and at least float32, until all microbatches have ended.
    """
    if maker.name == PIPELINE_1F1B and not sharded.has_rows(value):
        return sharded.summed_bytes(value)
    if sharded.is_staged(maker) and value.groups[:1] and value.groups[0] in sharded.model.layers:
        if sharded.has_rows(value):
            return sharded.entering_bytes(value) * _ticks(sharded)
        return sharded.summed_bytes(value)
    nbytes = sharded.bytes_of(value)
    if sharded.is_table_gradient(value):
        return nbytes / sharded.layout.shards
    if maker.kind != "loop" or sharded.layout.zero == 0 or sharded.sums_once:
        return nbytes
    if sharded.by_data(set(value.groups)) > 1:
        return nbytes
    return nbytes / sharded.layout.shards


def _is_other(value: Value, batch: Collection[int]) -> bool:
    return not any(group in batch for group in value.groups)
