"""Memory of a step on each device: arguments, gradients and activations in bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nbdist.planner.cost.memory import memory_of
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.model import Op, Tensor
from nbdist.planner.graph.one_f_one_b import as_1f1b
from tests.planner.steps import (
    BACKWARD,
    FORWARD,
    FOUND,
    GRADIENT,
    INNER,
    INPUT,
    LINEAR,
    NEW_W,
    OUT,
    OUTPUT,
    SAVED,
    SCALE,
    SCALE_SLOPE,
    SCAN,
    STATES,
    TABLE,
    WORDS_MODEL,
    WORDS_OUT,
    W,
    X,
    Y,
    stream,
    table_step,
    value,
)

if TYPE_CHECKING:
    from nbdist.records import PlannedMemory

AVAILABLE = 10**6


def linear(layout: Layout, *ops: Op) -> PlannedMemory:
    model = replace(LINEAR, ops=ops) if ops else LINEAR
    return memory_of(ShardedModel(model, layout, STATES), model.ops, AVAILABLE)


def scan(layout: Layout) -> PlannedMemory:
    program = as_1f1b(SCAN.ops, SCAN) if layout.is_divided else SCAN.ops
    return memory_of(ShardedModel(SCAN, layout, STATES), program, AVAILABLE)


def peaks(memory: PlannedMemory) -> tuple[int, int]:
    return memory.activations, memory.gradients


def test_memory_of_one_device() -> None:
    """The gradient is made while the activations are needed; results replace inputs."""
    found = linear(Layout(1, 1))
    assert found.arguments == 2 * W.nbytes + X.nbytes
    assert peaks(found) == (Y.nbytes, GRADIENT.nbytes)
    assert (found.margin, found.available) == (40_000, AVAILABLE)
    assert found.total == found.arguments + Y.nbytes + GRADIENT.nbytes + found.margin


def test_axes_divide_activations_and_gradients() -> None:
    by_data, by_model = linear(Layout(4, 1)), linear(Layout(1, 2, frozenset({OUT})))
    assert by_data.arguments == 2 * W.nbytes + X.nbytes // 4
    assert peaks(by_data) == (Y.nbytes // 4, GRADIENT.nbytes)
    assert by_model.arguments == W.nbytes + X.nbytes // 2
    assert peaks(by_model) == (Y.nbytes // 2, GRADIENT.nbytes // 2)


def test_zero_1_holds_a_whole_new_parameter() -> None:
    found = linear(Layout(4, 1, zero=1))
    assert found.arguments == W.nbytes + W.nbytes // 4 + X.nbytes // 4
    assert found.gradients == GRADIENT.nbytes + W.nbytes
    without = replace(LINEAR, tensors=LINEAR.tensors[1:])
    states = memory_of(ShardedModel(without, Layout(4, 1, zero=1), STATES), (), AVAILABLE)
    assert states.gradients == 0


def test_zero_3_holds_the_two_largest_parameters_whole() -> None:
    found = linear(Layout(4, 1, zero=3))
    assert found.arguments == W.nbytes // 2 + X.nbytes // 4
    assert found.gradients == GRADIENT.nbytes + W.nbytes * 3 // 4
    sizes = (128, 32, 64)
    more = tuple(Tensor("w", "carried", value(n, (64, n), (1, 4))) for n in sizes)
    model = replace(LINEAR, tensors=(*more, LINEAR.tensors[2]))
    held = memory_of(ShardedModel(model, Layout(4, 1, zero=3), STATES), (), AVAILABLE)
    assert held.gradients == 4 * 64 * (128 + 64) * 3 // 4


def test_zero_3_gathers_two_layers_of_a_scan() -> None:
    stack, x = value(20, (16, 64, 128), (5, 1, 4)), LINEAR.tensors[2]
    loop = Op("loop", "scan", (X, stack), (Y,), times=16, body=(FORWARD,), over=(stack,))
    model = replace(LINEAR, tensors=(Tensor("w", "carried", stack), x), ops=(loop,))
    held = memory_of(ShardedModel(model, Layout(4, 1, zero=3), frozenset()), (), AVAILABLE)
    assert held.gradients == 2 * (stack.nbytes // 16) * 3 // 4


def test_values_are_freed_after_their_last_use() -> None:
    first, second, third = (value(n, (32, 128), (0, OUT)) for n in (10, 11, 12))
    chain = stream("a", (X,), first), stream("b", (first,), second), stream("c", (second,), third)
    assert peaks(linear(Layout(1, 1), *chain)) == (2 * first.nbytes, 0)
    kept = (*chain, stream("d", (first, third), NEW_W))
    assert peaks(linear(Layout(1, 1), *kept)) == (3 * first.nbytes, 0)


def test_unused_value_is_counted_where_it_is_made() -> None:
    unused, other = value(10, (32, 128), (0, OUT)), value(11, (32, 64), (0, 1))
    ops = stream("a", (X,), unused), stream("b", (X,), other)
    assert peaks(linear(Layout(1, 1), *ops)) == (unused.nbytes, 0)


def test_largest_total_counts() -> None:
    """Activations and gradients are those of one moment, not the largest of each."""
    wide, more = value(10, (32, 1000), (0, 7)), value(11, (64, 128), (1, OUT))
    ops = stream("a", (X,), wide), stream("b", (W,), more)
    assert peaks(linear(Layout(1, 1), *ops)) == (wide.nbytes, 0)


def test_loop_holds_the_peak_of_its_body() -> None:
    """Inner results take the memory of those of the loop."""
    inner, out = value(10, (32, 128), (0, OUT)), value(11, (32, 64), (0, 1))
    body = stream("a", (X,), inner), stream("b", (inner,), out)
    loop = Op("loop", "scan", (X,), (out,), times=3, body=body)
    assert peaks(linear(Layout(1, 1), loop)) == (inner.nbytes + out.nbytes, 0)


def test_zero_shards_gradients_of_loops() -> None:
    loop = Op("loop", "scan", (X,), (GRADIENT,), body=(BACKWARD,))
    update = stream("sub", (W, GRADIENT), NEW_W)
    whole, sharded, all_ = (linear(Layout(4, 1, zero=zero), loop, update) for zero in (0, 1, 3))
    assert whole.gradients == GRADIENT.nbytes
    assert sharded.gradients == GRADIENT.nbytes // 4 + W.nbytes
    assert all_.gradients == GRADIENT.nbytes // 4 + W.nbytes * 3 // 4
    rows = Op("loop", "scan", (X,), (Y,), body=(FORWARD,))
    assert linear(Layout(4, 1, zero=1), rows).activations == Y.nbytes // 4


def test_operation_on_a_table_by_rows_holds_rows_of_all_devices() -> None:
    model = table_step()

    def peak(given: dict) -> tuple[int, int]:
        sharded = ShardedModel(model, Layout(8, 1, zero=3), frozenset(), given)
        return peaks(memory_of(sharded, model.ops, AVAILABLE))

    sharded_gradient = TABLE.nbytes // 8
    own = FOUND.nbytes // 8
    assert peak({}) == (own + own, sharded_gradient)  # rows, and those of their exchange
    assert peak({"table": (("data",), ())}) == (own + FOUND.nbytes, sharded_gradient)


STAGE, MICRO = 4, 4
TICKS = MICRO + STAGE - 1


def test_stages_hold_activations_of_all_ticks() -> None:
    found = scan(Layout(1, 1, stage=STAGE, micro=MICRO))
    assert found.arguments == 2 * SCALE.nbytes // STAGE + INPUT.nbytes // STAGE
    rows = INPUT.nbytes // STAGE  # outside of layers, each stage has its own rows
    saved = SAVED.nbytes // STAGE * TICKS // MICRO
    passed = 2 * INPUT.nbytes  # all rows at entry and exit
    inside = 2 * OUTPUT.nbytes // MICRO  # of one layer
    assert found.activations == saved + 2 * rows + passed + inside
    # The gradient of the layers, that of a tick, and that of one layer.
    assert found.gradients == 2 * SCALE_SLOPE.nbytes // STAGE + SCALE_SLOPE.nbytes // 8


def test_more_microbatches_hold_fewer_idle_ticks() -> None:
    few, more = (scan(Layout(1, 1, stage=STAGE, micro=micro)) for micro in (4, 16))
    saved = SAVED.nbytes // STAGE
    inside = 2 * OUTPUT.nbytes
    expected = saved * (7 / 4 - 19 / 16) + inside * (1 / 4 - 1 / 16)
    assert few.activations - more.activations == expected


def test_1f1b_holds_microbatches_in_flight() -> None:
    found = scan(Layout(1, 1, stage=STAGE, micro=16, schedule="1f1b"))
    each = SAVED.nbytes // STAGE // 16
    passed = 2 * INPUT.nbytes
    inside = 2 * OUTPUT.nbytes // 16
    assert found.activations == (2 * STAGE - 1 + 1) * each + passed + inside
    gradients = 2 * SCALE_SLOPE.nbytes // STAGE + SCALE_SLOPE.nbytes // 8
    assert found.gradients == gradients


def test_gpipe_with_the_loss_on_the_last_stage_holds_all_ticks() -> None:
    layout = Layout(1, 1, stage=STAGE, micro=MICRO, loss_stages="last")
    found = scan(layout)
    each = SAVED.nbytes // STAGE // MICRO
    passed = 2 * INPUT.nbytes
    inside = 2 * OUTPUT.nbytes // MICRO
    assert found.activations == (TICKS + 1) * each + passed + inside
    assert found.gradients == scan(replace(layout, loss_stages="all")).gradients


def test_forward_pass_of_few_stages_is_the_peak() -> None:
    """It holds the saved rows of a tick beside those of all ticks."""
    found = scan(Layout(1, 1, stage=2, micro=4))
    saved = SAVED.nbytes // 2 * 5 // 4
    own = SAVED.nbytes // 2 // 4
    inside = OUTPUT.nbytes // 4
    rows = OUTPUT.nbytes // 2
    assert peaks(found) == (saved + rows + 2 * INPUT.nbytes + own + inside, 0)


def test_1f1b_stores_values_of_layers_without_rows() -> None:
    """The forward pass derives them from parameters for the backward pass."""
    derived = value(40, SCALE.sizes, SCALE.groups)
    forward, loss, backward, *after = SCAN.ops
    ops = (
        replace(forward, outs=(*forward.outs, derived), over=(*forward.over, derived)),
        loss,
        replace(backward, ins=(*backward.ins, derived), over=(*backward.over, derived)),
        *after,
    )
    model = replace(SCAN, ops=ops)
    layout = Layout(1, 1, stage=STAGE, micro=16, schedule="1f1b")
    plain = scan(layout)
    more = memory_of(ShardedModel(model, layout, STATES), as_1f1b(ops, model), AVAILABLE)
    assert more.gradients - plain.gradients == derived.nbytes // STAGE
    assert more.activations == plain.activations


def test_products_hold_whole_sequences() -> None:
    """The input of a product is gathered beside its share."""
    layout = Layout(1, 4, frozenset({2}), sequence=True)
    whole, sharded = (
        memory_of(ShardedModel(WORDS_MODEL, one, frozenset()), WORDS_MODEL.ops, AVAILABLE)
        for one in (replace(layout, sequence=False), layout)
    )
    inner = INNER.nbytes // 4
    assert whole.activations == max(inner + WORDS_OUT.nbytes, 2 * WORDS_OUT.nbytes)
    assert sharded.activations == inner + WORDS_OUT.nbytes


def test_several_rounds_hold_exchanged_layers_twice() -> None:
    found = scan(Layout(1, 1, stage=2, micro=4, rounds=2))
    own = SCALE.nbytes // 2
    gradient = own + SCALE_SLOPE.nbytes // 8  # of all layers, and of one layer
    layers = own + own // 2  # all layers again, and the block of a tick
    slopes = 3 * own // 2  # a block's gradient, that of a tick, and their sum
    assert found.gradients == gradient + layers + slopes


def test_layers_that_a_loop_reads_twice_are_held_once() -> None:
    """The loop of a backward pass with full rematerialization reads the layers for both passes."""
    backward = SCAN.ops[2]
    twice = replace(backward, ins=(*backward.ins, SCALE), over=(SCALE, *backward.over))
    model = replace(SCAN, ops=(*SCAN.ops[:2], twice, *SCAN.ops[3:]))
    layout = Layout(1, 1, stage=2, micro=4, rounds=2)
    assert memory_of(ShardedModel(model, layout, STATES), model.ops, AVAILABLE) == scan(layout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_pipelines_are_summed_in_float32(dtype: str) -> None:
    narrow = replace(SCALE_SLOPE, dtype=dtype, itemsize=4 if dtype == "float32" else 2)
    backward = SCAN.ops[2]
    narrowed = replace(backward, outs=(backward.outs[0], narrow), over=(*backward.over[:2], narrow))
    ops = (*SCAN.ops[:2], narrowed, *SCAN.ops[3:])
    model = replace(SCAN, ops=ops)
    layout = Layout(1, 1, stage=STAGE, micro=MICRO)
    found = memory_of(ShardedModel(model, layout, STATES), ops, AVAILABLE)
    inside = SCALE_SLOPE.nbytes // 8
    assert found.gradients == SCALE_SLOPE.nbytes // STAGE + narrow.nbytes // STAGE + inside
