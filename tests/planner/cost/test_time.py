"""Time of a step: operations on each device, and the bytes and seconds of its collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.planner.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
)
from nbdist.planner.cost.roofline import matmul_s, memory_s
from nbdist.planner.cost.time import Cost, Target, slowest, time_of
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.model import Op
from nbdist.planner.graph.one_f_one_b import as_1f1b
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL, REPLICATE, STAGE
from tests import plans
from tests.plan_models import hardware
from tests.planner.steps import (
    BACKWARD,
    FORWARD,
    FOUND,
    GRADIENT,
    IDS,
    INNER,
    INPUT,
    LINEAR,
    LOOKUP,
    OUT,
    OUTPUT,
    ROWS,
    SCALE_SLOPE,
    SCAN,
    SCATTER,
    STATES,
    TABLE,
    UP,
    UP_DOT,
    WIDE,
    WORDS_MODEL,
    WORDS_OUT,
    W,
    X,
    Y,
    devices,
    extents_of,
    stream,
    table_step,
    value,
)
from tests.plans import fixed

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Model
    from nbdist.records import PlannedTime, Schedule, Spec

CHIP, CALIBRATION = devices(1).topology.chip, devices(1).calibration


def cost(
    layout: Layout,
    target: Target | None = None,
    model: Model = LINEAR,
    given: dict[str, Spec] | None = None,
) -> Cost:
    target = target or devices(layout.data * layout.model * layout.stage)
    sharded = ShardedModel(model, layout, STATES, given)
    return Cost(sharded, target, extents_of(layout, target))


def timed(layout: Layout, model: Model = LINEAR, target: Target | None = None) -> PlannedTime:
    target = target or devices(layout.data * layout.model * layout.stage)
    program = as_1f1b(model.ops, model) if layout.is_divided else model.ops
    sharded = ShardedModel(model, layout, STATES)
    return time_of(sharded, program, target, extents_of(layout, target), model.ops)


def sent(found: PlannedTime) -> dict[str, float]:
    return {traffic.axis: traffic.bytes for traffic in found.traffic}


@pytest.mark.parametrize(
    ("op", "layout", "sizes"),
    [
        (FORWARD, Layout(1, 1), (1, 32, 128, 64)),
        (FORWARD, Layout(4, 1), (1, 8, 128, 64)),
        (FORWARD, Layout(1, 4, frozenset({OUT})), (1, 32, 32, 64)),
        (FORWARD, Layout(1, 4, frozenset({WIDE})), (1, 32, 128, 16)),
        (BACKWARD, Layout(4, 1), (1, 64, 128, 8)),
    ],
)
def test_product_has_the_sizes_of_its_parts(
    op: Op, layout: Layout, sizes: tuple[int, int, int, int]
) -> None:
    """JAX computes products of float32 in tensorfloat32."""
    expected = matmul_s(*sizes, "tensorfloat32", CHIP, CALIBRATION)
    assert cost(layout).op_s(op) == expected


def test_batched_product_has_a_batch_size() -> None:
    left, right = value(10, (600, 320, 64), (7, 0, 1)), value(11, (600, 64, 128), (7, 1, 2))
    out = value(12, (600, 320, 128), (7, 0, 2))
    op = Op("dot", "dot_general", (left, right), (out,), (1,), 0.0, 64)
    narrow = replace(op, ins=(replace(left, dtype="bfloat16", itemsize=2), right))
    expected = matmul_s(600, 320, 128, 64, "bfloat16", CHIP, CALIBRATION)
    assert cost(Layout(1, 1)).op_s(narrow) == expected


def test_convolution_is_one_product() -> None:
    """Inputs overlap, so that their size is not that of a batch of products."""
    image, kernel = value(10, (32, 8, 8, 16), (0, 3, 4, 5)), value(11, (3, 3, 16, 64), (6, 7, 5, 8))
    out = value(12, (32, 8, 8, 64), (0, 9, 10, 8))
    half = [replace(each, dtype="bfloat16", itemsize=2) for each in (image, kernel, out)]
    op = Op("conv", "conv_general_dilated", (half[0], half[1]), (half[2],), (5,), 0.0, 9 * 16)
    expected = matmul_s(1, 32 * 8 * 8, 64, 9 * 16, "bfloat16", CHIP, CALIBRATION)
    assert cost(Layout(1, 1)).op_s(op) == expected


@pytest.mark.parametrize(
    ("op", "nbytes"),
    [
        (stream("add", (X, X), value(9, (32, 64), (ROWS, WIDE))), 3 * X.nbytes),
        (LOOKUP, 2 * FOUND.nbytes),
        (SCATTER, IDS.nbytes + FOUND.nbytes + TABLE.nbytes),
    ],
    ids=["stream", "lookup", "scatter"],
)
def test_other_operations_move_their_bytes(op: Op, nbytes: int) -> None:
    """A look-up reads and writes rows alone, and a scatter updates its table in place."""
    assert cost(Layout(1, 1)).op_s(op) == memory_s(nbytes, CHIP, CALIBRATION)


@pytest.mark.parametrize(
    ("layout", "op", "expected"),
    [
        (Layout(4, 1), BACKWARD, {DATA: GRADIENT.nbytes}),
        (Layout(4, 1), FORWARD, {}),
        (Layout(1, 4, frozenset({WIDE})), FORWARD, {MODEL: Y.nbytes}),
        (Layout(2, 2, frozenset({WIDE})), FORWARD, {MODEL: Y.nbytes / 2}),
        (Layout(1, 4, frozenset({OUT})), FORWARD, {}),
        (Layout(2, 2, frozenset({OUT})), BACKWARD, {DATA: GRADIENT.nbytes / 2}),
        (Layout(1, 1), BACKWARD, {}),
        (Layout(5, 1), BACKWARD, {}),
    ],
)
def test_sharded_sums_are_reduced(layout: Layout, op: Op, expected: dict[str, float]) -> None:
    assert cost(layout).reduced(op) == expected


def test_stages_with_rows_of_their_own_reduce_sums_too() -> None:
    mean = Op("reduce", "reduce_sum", (INPUT,), (value(9, (16,), (3,)),), (ROWS,))
    whole = cost(Layout(2, 1, stage=4, micro=2), model=SCAN)
    assert whole.reduced(mean) == {DATA: 64, STAGE: 64}
    few = Cost(whole.sharded.microbatch, devices(8), {})
    assert few.reduced(mean) == {DATA: 64}


def test_results_that_are_added_are_reduced_once() -> None:
    left, right = (value(n, (32, 128), (ROWS, OUT)) for n in (10, 11))
    ops = tuple(replace(FORWARD, outs=(out,)) for out in (left, right))
    layout = Layout(1, 4, frozenset({WIDE}))
    apart, together = (
        timed(layout, replace(LINEAR, ops=ops, added=added))
        for added in ({}, {left.number: 12, right.number: 12})
    )
    assert sent(apart) == {MODEL: 2 * Y.nbytes}
    assert sent(together) == {MODEL: Y.nbytes}


def test_gradients_are_sent_together_at_the_end() -> None:
    """Two gradients are one message; a loop sends its own in each iteration."""
    target, extent = devices(4), (4,)
    second = replace(BACKWARD, outs=(value(10, (64, 128), (WIDE, OUT)),))
    found = timed(Layout(4, 1), replace(LINEAR, ops=(BACKWARD, second)))
    once = all_reduce_s(2 * GRADIENT.nbytes, extent, target.topology, target.calibration)
    assert found.exposed == pytest.approx(once)
    assert sent(found) == {DATA: 2 * GRADIENT.nbytes}
    loop = Op("loop", "scan", (X,), (GRADIENT,), times=3, body=(BACKWARD,))
    often = timed(Layout(4, 1), replace(LINEAR, ops=(loop,)))
    each = all_reduce_s(GRADIENT.nbytes, extent, target.topology, target.calibration)
    empty = all_reduce_s(0, extent, target.topology, target.calibration)
    assert often.exposed == pytest.approx(3 * each + empty)
    assert sent(often) == {DATA: 3 * GRADIENT.nbytes}


def test_zero_3_scatters_gradients_and_gathers_parameters_twice() -> None:
    target, extent = devices(4), (4,)
    for micro in (1, 2):
        found = timed(Layout(4, 1, zero=3, micro=micro))
        scatter = reduce_scatter_s(GRADIENT.nbytes, extent, target.topology, target.calibration)
        gather = all_gather_s(W.nbytes, extent, target.topology, target.calibration)
        assert found.exposed == pytest.approx(scatter + 2 * micro * gather)
        assert sent(found) == {DATA: GRADIENT.nbytes / 2 + micro * W.nbytes}
        totals = cost(Layout(4, 1, zero=3, micro=micro)).totals(LINEAR.ops)
        assert totals.collectives == {4: 2 * micro}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_copies_add_their_shares_of_gradients(platform: str) -> None:
    """Two hosts of four devices have a copy each. TPUs all-reduce within it."""
    target = devices(4, 2)
    chip = msgspec.structs.replace(target.topology.chip, platform=platform)
    target = replace(target, topology=msgspec.structs.replace(target.topology, chip=chip))
    within, own = (4, 1), (target.topology, target.calibration)
    found = timed(Layout(8, 1, zero=3, replicate=2), target=target)
    add_s, parts = (reduce_scatter_s, 2) if platform == "gpu" else (all_reduce_s, 1)
    once = add_s(GRADIENT.nbytes, within, *own) + 2 * all_gather_s(W.nbytes, within, *own)
    once += all_reduce_s(GRADIENT.nbytes / 4, (1, 2), *own)
    assert sum(traffic.seconds for traffic in found.traffic) == pytest.approx(once)
    expected = {DATA: GRADIENT.nbytes / parts + W.nbytes, REPLICATE: GRADIENT.nbytes / 4}
    assert sent(found) == expected


def test_copies_add_gradients_of_sharded_tables() -> None:
    target, layout = devices(4, 2), Layout(8, 1, zero=3, replicate=2)
    totals = cost(layout, target, table_step()).totals((SCATTER,))
    assert totals.bytes[REPLICATE] == SCATTER.outs[0].nbytes / 4


def test_loops_repeat_their_operations() -> None:
    loop = Op("loop", "scan", (X,), (Y,), times=5, body=(FORWARD,))
    once, often = (cost(Layout(1, 1)).totals(ops).device_s for ops in ((FORWARD,), (loop,)))
    assert often == pytest.approx(5 * once)
    assert cost(Layout(1, 1)).totals((loop, FORWARD)).operations == 6


@pytest.mark.parametrize(
    ("given", "op", "send"),
    [
        ({}, LOOKUP, all_to_all_s),
        ({}, SCATTER, all_to_all_s),
        ({"table": ((DATA,), ())}, LOOKUP, reduce_scatter_s),
        ({"table": ((DATA,), ())}, SCATTER, all_gather_s),
    ],
    ids=["columns", "gradient of columns", "rows", "gradient of rows"],
)
def test_rows_of_a_sharded_table_are_sent(
    given: dict[str, Spec], op: Op, send: Callable[..., float]
) -> None:
    target = devices(8)
    own = FOUND.nbytes if given else FOUND.nbytes / 8
    costs = cost(Layout(8, 1, zero=3), target, table_step(), given)
    totals = costs.totals((op,))
    scatter_s = reduce_scatter_s(0, (8,), target.topology, target.calibration)
    one_s = send(own, (8,), target.topology, target.calibration)
    assert totals.axes[DATA] == pytest.approx(one_s + scatter_s)
    assert totals.bytes[DATA] == own
    assert totals.collectives == {8: 1}
    assert costs.reduced(op) == {}


LAYERS, STAGES, MICRO = 8, 4, 4


def test_stage_runs_its_layers_in_each_tick() -> None:
    layout = Layout(1, 1, stage=STAGES, micro=MICRO)
    whole = cost(layout, model=SCAN)
    within, times = whole.inside(SCAN.ops[0])
    assert within.sharded is whole.sharded.microbatch
    assert times == (MICRO + STAGES - 1) * LAYERS // STAGES
    flat = cost(Layout(4, 1), model=SCAN)
    assert flat.inside(SCAN.ops[0]) == (flat, LAYERS)
    rounds = cost(replace(layout, rounds=2), model=SCAN)
    assert rounds.inside(SCAN.ops[0])[1] == (2 * MICRO + STAGES - 1) * LAYERS // (2 * STAGES)


def test_stages_send_microbatches_in_each_tick_and_rows_at_the_ends() -> None:
    target, extent = devices(STAGES), (STAGES,)
    found = timed(Layout(1, 1, stage=STAGES, micro=MICRO), SCAN)
    ticks, each = MICRO + STAGES - 1, OUTPUT.nbytes / MICRO
    tick_s = send_s(each, 0, target.topology, target.calibration)
    ends_s = all_reduce_s(OUTPUT.nbytes, extent, target.topology, target.calibration)
    assert found.exposed == pytest.approx(2 * (ticks * tick_s + ends_s))
    assert sent(found) == {STAGE: pytest.approx(2 * (ticks * each + OUTPUT.nbytes))}


def test_1f1b_sends_microbatches_at_the_loss_section() -> None:
    target, extent = devices(STAGES), (STAGES,)
    found = timed(Layout(1, 1, stage=STAGES, micro=MICRO, schedule="1f1b"), SCAN)
    ticks, each = MICRO + STAGES - 1, OUTPUT.nbytes / MICRO
    tick_s = send_s(each, 0, target.topology, target.calibration)
    ends_s = reduce_scatter_s(OUTPUT.nbytes, extent, target.topology, target.calibration)
    loss_s = MICRO * reduce_scatter_s(each, extent, target.topology, target.calibration)
    assert found.exposed == pytest.approx(2 * (ticks * tick_s + ends_s + loss_s))
    assert sent(found) == {STAGE: pytest.approx(2 * (ticks * each + OUTPUT.nbytes))}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_loss_on_the_last_stage_sends_sums_instead_of_rows(schedule: Schedule) -> None:
    """Each stage receives the batch, and the stages add their sums over rows."""
    layout = Layout(1, 1, stage=STAGES, micro=MICRO, schedule=schedule, loss_stages="last")
    found = timed(layout, SCAN)
    ticks, each = MICRO + STAGES - 1, OUTPUT.nbytes / MICRO
    batch = sum(t.value.nbytes for t in SCAN.tensors if t.role == "batch")
    assert sent(found) == {STAGE: pytest.approx(2 * ticks * each + batch / 2)}
    shared = timed(replace(layout, loss_stages="all"), SCAN)
    assert sent(found)[STAGE] < sent(shared)[STAGE]
    assert found.bubble > shared.bubble


def test_rows_that_do_not_divide_over_stages_stay_at_the_loss_section() -> None:
    layout = Layout(1, 1, stage=STAGES, micro=2 * MICRO, schedule="1f1b")
    assert cost(layout, model=SCAN).sharded.loss_section.shares == STAGES
    layout = replace(layout, micro=SCAN.rows)
    assert cost(layout, model=SCAN).sharded.loss_section.shares == 1
    ticks, each = SCAN.rows + STAGES - 1, OUTPUT.nbytes / SCAN.rows
    ends = OUTPUT.nbytes  # half an all-reduce each: to the first stage, and back from it
    assert sent(timed(layout, SCAN))[STAGE] == pytest.approx(2 * ticks * each + ends)


def test_1f1b_runs_the_loss_section_for_each_microbatch() -> None:
    """The layers have one operation forward and four backward, and two follow the pipeline."""
    layout = Layout(1, 1, stage=STAGES, micro=MICRO, schedule="1f1b")
    runs = (MICRO + STAGES - 1) * LAYERS // STAGES
    totals = cost(layout, model=SCAN).totals(as_1f1b(SCAN.ops, SCAN))
    assert totals.operations == (1 + 4) * runs + MICRO + 2


def test_whole_sequences_are_gathered_and_sums_scattered() -> None:
    layout = Layout(1, 4, frozenset({2}), sequence=True)
    twice = replace(UP_DOT, ins=(WORDS_OUT, UP), outs=(value(9, INNER.sizes, INNER.groups),))
    model = replace(WORDS_MODEL, ops=(*WORDS_MODEL.ops, twice, twice))
    target = devices(4)
    totals = cost(layout, target, model).totals(model.ops)
    half_s = reduce_scatter_s(WORDS_OUT.nbytes, (4,), target.topology, target.calibration)
    # The input, the sum, and the input of both further products, which share it.
    assert totals.axes[MODEL] == pytest.approx(3 * half_s)
    assert totals.bytes[MODEL] == 3 * WORDS_OUT.nbytes / 2
    assert totals.collectives == {4: 3}


def test_rounds_send_layers_and_their_gradients() -> None:
    target = devices(2)
    one, two = (cost(Layout(1, 1, stage=2, micro=4, rounds=n), target, SCAN) for n in (1, 2))
    own = SCALE_SLOPE.nbytes / 2
    exchanged = 2 * own  # parameters and gradients, in as many messages as rounds
    more = (2 * 4 + 1) - (4 + 1)
    rows = OUTPUT.nbytes / 4
    expected = exchanged + 2 * more * rows
    bytes_sent = [costs.totals(SCAN.ops).bytes[STAGE] for costs in (one, two)]
    assert bytes_sent[1] - bytes_sent[0] == pytest.approx(expected)
    messages = [costs.totals(SCAN.ops).collectives[2] for costs in (one, two)]
    # Both collectives of all rows are over the two stages as well.
    assert messages[1] - messages[0] == 2 * 2 + 2 * more


def test_stages_are_idle_before_and_after_their_microbatches() -> None:
    few, more = (cost(Layout(1, 1, stage=STAGES, micro=m), model=SCAN) for m in (4, 16))
    for costs, micro in ((few, 4), (more, 16)):
        totals = costs.totals(SCAN.ops)
        within, times = costs.inside(SCAN.ops[0])
        layers_s = sum(within.op_s(op) for loop in SCAN.ops for op in loop.body) * times
        waits = (STAGES - 1) / micro
        assert totals.idle_s == pytest.approx(layers_s * waits / (1 + waits))


def test_gradients_of_layers_are_sent_once_after_all_ticks() -> None:
    """Each device sends the sums of its own layers over the data axis."""
    found = timed(Layout(2, 1, stage=STAGES, micro=MICRO), SCAN)
    assert sent(found)[DATA] == SCALE_SLOPE.nbytes / STAGES


def test_utilization_is_that_of_useful_operations() -> None:
    found = timed(Layout(1, 1))
    rate = CHIP.flops["tensorfloat32"]
    assert found.mfu == pytest.approx(2 * FORWARD.flops / rate / found.step)
    loop = Op("loop", "scan", (X,), (Y,), times=5, body=(FORWARD,))
    often = timed(Layout(4, 1), replace(LINEAR, ops=(loop,)))
    assert often.mfu == pytest.approx(5 * FORWARD.flops / rate / 4 / often.step)


def test_empty_step_takes_no_time() -> None:
    found = timed(Layout(1, 1), replace(LINEAR, ops=()))
    assert (found.step, found.mfu, found.bubble, found.traffic) == (0, 0, 0, ())


def test_traffic_names_the_slowest_level() -> None:
    found = timed(Layout(4, 2, frozenset({WIDE})), target=devices(2, 4))
    assert {t.axis: t.level for t in found.traffic} == {DATA: "network", MODEL: "host"}


@pytest.mark.parametrize(
    ("extent", "name"),
    [((2, 4), "network"), ((2, 1), "host"), ((1, 4), "network"), ((1, 1), "host")],
)
def test_slowest_level_is_crossed(extent: tuple[int, ...], name: str) -> None:
    assert slowest(devices(2, 4).topology, extent).name == name


def test_level_with_fewer_bytes_per_second_is_slower() -> None:
    topology = devices(2, 4).topology
    host, network = topology.levels
    slow_host = msgspec.structs.replace(host, bytes_per_s=1e9)
    mixed = msgspec.structs.replace(topology, levels=(slow_host, network))
    assert slowest(mixed, (2, 4)).name == "host"


def test_more_microbatches_reduce_the_bubble() -> None:
    few, more = (plans.piped(stage=4, data=2, micro=micro) for micro in (4, 16))
    assert few.time.bubble > more.time.bubble > 0
    assert few.memory.activations > more.memory.activations
    assert any("bubble" in text for text in few.warnings)
    level = {traffic.level for traffic in few.time.traffic if traffic.axis == STAGE}
    assert level == {"network"}


def test_bubble_of_plan_matches_gpipe() -> None:
    """The layers are so wide that other costs are small."""
    model = plans.stacked(LAYERS, 4096, 4096)
    found = plan(model, hardware("4xA100"), fixed(stage=4, micro=16))
    assert found.time.bubble == pytest.approx(3 / 19, rel=0.15)


def test_zero_3_scatters_the_gradients_of_loops_except_on_cpus() -> None:
    loop = Op("loop", "scan", (X,), (GRADIENT,), times=3, body=(BACKWARD,))
    model, layout, target = replace(LINEAR, ops=(loop,)), Layout(4, 1, zero=3), devices(4)
    chip = msgspec.structs.replace(target.topology.chip, platform="cpu")
    on_cpus = replace(target, topology=msgspec.structs.replace(target.topology, chip=chip))
    found, on_cpu = (sent(timed(layout, model, each))[DATA] for each in (target, on_cpus))
    assert on_cpu - found == pytest.approx(3 * GRADIENT.nbytes / 2)
