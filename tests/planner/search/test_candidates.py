"""Candidates: fits, order of preference, prices, and links that sums cross."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.planner.cost.memory import memory_of
from nbdist.planner.cost.time import Target
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.model import Op
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.topology import parse
from nbdist.planner.search.candidates import Candidate, priced, ranked
from nbdist.planner.search.step_variants import LARGE, Steps
from nbdist.records import DATA, MODEL, PlannedMemory, PlannedTime, Traffic
from tests.planner.steps import (
    BACKWARD,
    FORWARD,
    LINEAR,
    OUT,
    SCAN,
    STATES,
    TABLE,
    WIDE,
    X,
    devices,
    table_step,
    value,
)

AVAILABLE = 1000


def candidate(
    layout: Layout | None = None,
    step_s: float = 1.0,
    *,
    data_s: float = 0.0,
    total: int = 500,
    activations: int = 100,
    crossed: str = "",
) -> Candidate:
    """Return a candidate with these seconds and bytes."""
    sharded = ShardedModel(SCAN, layout or Layout(4, 1), STATES)
    traffic = (Traffic(axis=DATA, level="host", bytes=1.0, seconds=data_s / 2),) * 2
    other = (Traffic(axis=MODEL, level="host", bytes=1.0, seconds=0.5),)
    return Candidate(
        sharded,
        PlannedMemory(total - activations, 0, activations, 0, AVAILABLE),
        PlannedTime(step_s - data_s, data_s, traffic + other, 0.0),
        crossed,
        None,
    )


@pytest.mark.parametrize(
    ("total", "activations", "fits", "exceeds"),
    [
        (AVAILABLE, 100, True, False),
        (AVAILABLE + 1, 100, False, True),
        (AVAILABLE + 100, 100, False, False),
        (AVAILABLE + 99, 100, False, True),
    ],
)
def test_full_memory_fits_and_activations_may_exceed_it(
    total: int, activations: int, fits: bool, exceeds: bool
) -> None:
    found = candidate(total=total, activations=activations)
    assert (found.fits, found.exceeds_by_activations) == (fits, exceeds)


def test_half_of_the_possible_overlap_is_assumed() -> None:
    """Traffic of other axes does not overlap."""
    assert candidate(step_s=10, data_s=4).half_overlapped_s == (10 + 6) / 2
    assert candidate(step_s=10, data_s=8).half_overlapped_s == (10 + 8) / 2
    assert candidate(step_s=10).half_overlapped_s == 10


def test_time_comes_before_changes_and_links_before_time() -> None:
    fast = candidate(Layout(1, 4), 1.0)
    slow = candidate(Layout(4, 1), 2.0)
    crossing = candidate(Layout(4, 1), 0.5, crossed="network")
    assert ranked([crossing, slow, fast]) == [fast, slow, crossing]


def test_equal_times_prefer_fewer_changes() -> None:
    """Times are compared to three digits."""
    plain = candidate(Layout(4, 1), 1.0004)
    assert ranked([candidate(Layout(2, 2), 1.0), plain])[0] is plain
    later = candidate(Layout(4, 1), 1.01)
    assert ranked([candidate(Layout(2, 2), 1.0), later])[1] is later


def test_changes_are_ordered_by_their_kind() -> None:
    layouts = [
        Layout(4, 1),
        Layout(4, 1, zero=1),
        Layout(4, 1, zero=3),
        Layout(4, 1, micro=2),
        Layout(4, 1, remat="selective"),
        Layout(4, 1, remat="full"),
        Layout(2, 2, sequence=False),
        Layout(2, 2, sequence=True),
        Layout(2, 1, stage=2, micro=2),
        Layout(2, 1, stage=2, micro=2, rounds=2),
        Layout(2, 1, stage=2, micro=2, schedule="1f1b"),
    ]
    changes = [candidate(layout).changes for layout in layouts]
    assert sorted(changes) == changes
    assert len(set(changes)) == len(changes)


PIPELINE = Layout(2, 1, stage=2, micro=2)


def test_pipeline_must_be_faster_than_overlapped_flat_layout() -> None:
    flat = candidate(step_s=10, data_s=4)
    slow, fast = candidate(PIPELINE, 9.0), candidate(PIPELINE, 7.9)
    assert ranked([flat, slow, fast]) == [fast, flat, slow]
    equal = candidate(PIPELINE, 8.0)
    assert ranked([flat, equal]) == [equal, flat]
    other = candidate(Layout(2, 2), 20.0)
    assert ranked([flat, slow, other]) == [flat, other, slow]


@pytest.mark.parametrize(
    "flat",
    [
        candidate(step_s=10, data_s=4, total=AVAILABLE + 1),
        candidate(step_s=10, data_s=4, crossed="network"),
    ],
)
def test_flat_layout_that_is_no_choice_does_not_matter(flat: Candidate) -> None:
    pipeline = candidate(PIPELINE, 9.0)
    last = candidate(Layout(1, 4), 30.0)
    assert ranked([last, flat, pipeline])[0] is pipeline
    assert ranked([flat, pipeline])[0] is pipeline
    assert ranked([]) == []


def on_devices(layout: Layout, target: Target, budget: int = 10**9) -> Candidate:
    return priced(ShardedModel(LINEAR, layout, STATES), Steps(LINEAR), target, budget)


def test_only_sums_of_products_over_slow_links_are_reported() -> None:
    split = frozenset({WIDE})
    layout = Layout(1, 8, split)
    assert on_devices(layout, devices(2, 4)).crossed_links == "network"
    assert on_devices(layout, devices(8)).crossed_links == ""
    assert on_devices(Layout(4, 2, split), devices(2, 4)).crossed_links == ""
    table = table_step()
    looked_up = ShardedModel(table, Layout(1, 8, frozenset({0})), frozenset())
    assert priced(looked_up, Steps(table), devices(2, 4), 10**9).crossed_links == ""


def test_budget_is_the_available_memory() -> None:
    found = on_devices(Layout(4, 1), devices(4), 12345)
    assert found.memory.available == 12345
    assert found.title == "data 4"


def test_1f1b_program_is_priced_for_1f1b() -> None:
    layout = Layout(1, 1, stage=4, micro=16)
    plain, one_f_one_b = (
        priced(ShardedModel(SCAN, one, STATES), Steps(SCAN), devices(4), 10**9)
        for one in (layout, replace(layout, schedule="1f1b"))
    )
    assert one_f_one_b.memory.activations < plain.memory.activations


def test_programs_for_tpus_have_their_fusion_and_padding() -> None:
    topology = parse("v5e:2x2")
    target = Target(topology, calibration_of(topology.chip))
    factor = value(9, X.sizes, X.groups)
    cheap = Op("stream", "max", (X,), (factor,))
    ops = cheap, *(replace(op, ins=(factor, op.ins[1])) for op in (FORWARD, BACKWARD))
    model = replace(LINEAR, ops=(*ops, *LINEAR.ops[2:]))
    steps, sharded = Steps(model), ShardedModel(model, Layout(4, 1), STATES)
    step = steps.of(Layout(4, 1))
    expected = memory_of(sharded.on_tpus, step.on_tpus, 10**9)
    assert expected != memory_of(sharded, step.program, 10**9)
    assert priced(sharded, steps, target, 10**9).memory == expected
    assert priced(sharded, steps, devices(4), 10**9).memory != expected


@pytest.mark.parametrize(
    ("entries", "zero", "path"),
    [(2**24, 0, "table"), (2**24, 3, None), (2**23, 0, None)],
)
def test_large_table_that_every_device_has_whole_is_named(
    entries: int, zero: int, path: str | None
) -> None:
    assert 2**23 * 64 < LARGE < 2**24 * 64
    large = replace(TABLE, sizes=(entries, 64))
    model = table_step()

    def grown(op: Op) -> Op:
        return replace(op, ins=tuple(large if v == TABLE else v for v in op.ins))

    table = replace(model.tensors[0], value=large)
    model = replace(model, tensors=(table, model.tensors[1]), ops=tuple(map(grown, model.ops)))
    sharded = ShardedModel(model, Layout(8, 1, zero=zero), frozenset())  # type: ignore[arg-type]
    assert priced(sharded, Steps(model), devices(8), 10**12).replicated_table == path


def test_split_is_part_of_the_layout() -> None:
    found = on_devices(Layout(1, 2, frozenset({OUT})), devices(2))
    assert (found.is_pipeline, found.title) == (False, "tensor 2")
    assert candidate(PIPELINE).is_pipeline
