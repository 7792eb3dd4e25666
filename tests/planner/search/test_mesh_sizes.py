"""Sizes of mesh axes, numbers of microbatches and rounds that the search tries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.planner.graph.layout import Layout
from nbdist.planner.search.mesh_sizes import (
    bare_layouts,
    more_rounds,
    slow_links,
    staged,
    wants_stages,
)
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, MODEL, STAGE, Planning
from tests.planner.steps import LINEAR, SCAN, devices

FLAT, LAYERED = Steps(LINEAR), Steps(SCAN)
"""A step without layers, with 32 rows; and one with 8 layers and 64 rows."""


def sizes(steps: Steps, inside: int, hosts: int = 1, **fixed: int) -> list[tuple[int, int, int]]:
    """Return the axes of possible layouts: stage, data and model, without repetitions."""
    found = bare_layouts(steps, devices(inside, hosts), Planning(fixed=fixed))
    return list(dict.fromkeys((one.stage, one.data, one.model) for one in found))


def test_axes_use_all_devices() -> None:
    assert sizes(FLAT, 4) == [(1, 4, 1), (1, 2, 2), (1, 1, 4)]
    assert sizes(FLAT, 6) == [(1, 2, 3), (1, 1, 6)]  # 32 rows do not divide by 6 or 3
    assert sizes(FLAT, 1) == [(1, 1, 1)]


def test_model_axis_is_at_most_the_largest_dimension() -> None:
    narrow = replace(LINEAR, groups=tuple(replace(g, divisor=2) for g in LINEAR.groups))
    assert sizes(Steps(narrow), 4) == [(1, 4, 1), (1, 2, 2)]
    assert sizes(Steps(replace(LINEAR, groups=())), 4) == [(1, 4, 1)]


def test_batch_and_model_stay_apart_if_they_must() -> None:
    assert sizes(Steps(replace(LINEAR, apart="a reason")), 4) == [(1, 4, 1), (1, 1, 4)]


def test_requests_select_layouts() -> None:
    assert sizes(FLAT, 8, model=2) == [(1, 4, 2)]
    assert sizes(FLAT, 8, data=8) == [(1, 8, 1)]
    assert sizes(FLAT, 8, data=3) == []
    assert sizes(FLAT, 8, sequence=1)[0] == (1, 8, 1)
    assert sizes(FLAT, 8, micro=16) == [(1, 2, 4), (1, 1, 8)]


@pytest.mark.parametrize(
    ("fixed", "levels"),
    [
        ({DATA: 4, MODEL: 1}, [0, 1, 3]),
        ({DATA: 1, STAGE: 1}, [0]),
        ({DATA: 4, MODEL: 1, "zero": 1}, [1]),
        ({DATA: 1, STAGE: 1, "zero": 3}, []),
        ({DATA: 2, STAGE: 2}, [0]),
    ],
)
def test_zero_needs_a_data_axis(fixed: dict[str, int], levels: list[int]) -> None:
    """The search tries the first of similar layouts of a pipeline."""
    found = bare_layouts(LAYERED, devices(4), Planning(fixed=fixed))
    assert [layout.zero for layout in found] == levels


def test_stages_divide_devices_and_have_layers() -> None:
    stages = dict.fromkeys(stage for stage, _, _ in sizes(LAYERED, 4))
    assert list(stages) == [1, 2, 4]
    assert {stage for stage, _, _ in sizes(LAYERED, 6)} == {1, 2, 3, 6}
    assert max(stage for stage, _, _ in sizes(LAYERED, 16)) == 8
    assert {stage for stage, _, _ in sizes(FLAT, 4)} == {1}
    assert sizes(LAYERED, 6, stage=4) == sizes(LAYERED, 9, stage=9) == []
    assert sizes(LAYERED, 4, stage=1)[0] == (1, 4, 1)
    assert {stage for stage, _, _ in sizes(LAYERED, 8, stage=4)} == {4}


def test_uncertain_hardware_gets_stages_on_request_only() -> None:
    cautious = replace(devices(4), cautious=True)

    def stages(**options: object) -> set[int]:
        request = Planning(**options)  # type: ignore[arg-type]
        return {layout.stage for layout in bare_layouts(LAYERED, cautious, request)}

    assert stages() == {1}
    assert stages(fixed={STAGE: 2}) == {2}
    assert stages(schedule="1f1b") == {2, 4}
    assert stages(fixed={"rounds": 2}) == {2, 4}


def test_layouts_with_stages_and_sums_over_slow_links_are_apart() -> None:
    target = devices(2, 4)
    normal, crossing = (
        {(one.stage, one.model) for one in bare_layouts(LAYERED, target, Planning(), crossing=each)}
        for each in (False, True)
    )
    assert (2, 2) in normal
    assert (1, 8) in normal  # without stages, all are in one group
    assert crossing == {(2, 4)}


def micros(data: int, stage: int, steps: Steps = LAYERED, **fixed: int) -> list[int]:
    """Return numbers of microbatches: that of the first layout, and others."""
    request = Planning(fixed={DATA: data, STAGE: stage, MODEL: 1, "zero": 0, **fixed})
    found = []
    for layout in bare_layouts(steps, devices(data * stage), request):
        found += [layout, *staged(layout, steps, request)]
    return [layout.micro for layout in found]


def test_microbatches_double_from_one_per_stage() -> None:
    assert micros(1, 2) == [2, 4, 8, 16]
    assert micros(1, 4) == [4, 8, 16, 32]
    assert micros(2, 4) == [4, 8, 16, 32]
    assert micros(4, 4) == [4, 8, 16]  # 16 rows in each group
    assert micros(4, 1) == [1]


def test_few_rows_get_fewer_microbatches_than_stages() -> None:
    assert micros(32, 4) == [2]
    assert micros(64, 4) == []


def test_microbatches_divide_the_rows() -> None:
    tensor = SCAN.tensors[2]
    rows = replace(tensor, value=replace(tensor.value, sizes=(36, 16)))
    steps = Steps(replace(SCAN, tensors=(*SCAN.tensors[:2], rows)))
    assert micros(1, 4, steps) == [4, 9, 18, 36]


def test_requested_microbatches_are_used() -> None:
    assert micros(1, 4, micro=8) == [8]
    assert micros(1, 4, micro=1) == []
    assert micros(1, 4, micro=3) == []


def test_rounds_need_multiples_of_the_stages() -> None:
    assert micros(1, 4, rounds=2) == [4, 8, 16, 32]
    assert micros(1, 4, rounds=2, micro=6) == []
    assert micros(1, 4, rounds=2, micro=8) == [8]
    assert micros(1, 4, rounds=3) == []
    assert micros(4, 1, rounds=2) == []
    assert micros(32, 4, rounds=2) == []


def test_pipelines_are_tried_with_zero_0_and_1() -> None:
    request = Planning(fixed={DATA: 2, STAGE: 2, MODEL: 1})
    (first,) = bare_layouts(LAYERED, devices(4), request)
    found = [(layout.micro, layout.zero) for layout in staged(first, LAYERED, request)]
    assert found == [(2, 1), (4, 0), (4, 1), (8, 0), (8, 1), (16, 0), (16, 1)]
    assert list(staged(Layout(4, 1), LAYERED, request)) == []


@pytest.mark.parametrize(
    ("layout", "fixed", "rounds"),
    [
        (Layout(1, 1, stage=2, micro=4), {}, (2, 4)),
        (Layout(1, 1, stage=4, micro=4), {}, (2,)),
        (Layout(1, 1, stage=8, micro=8), {}, ()),
        (Layout(1, 1, stage=4, micro=6), {}, ()),
        (Layout(4, 1), {}, ()),
        (Layout(1, 1, stage=2, micro=4), {"rounds": 1}, ()),
    ],
)
def test_more_rounds_divide_layers_and_microbatches(
    layout: Layout, fixed: dict[str, int], rounds: tuple[int, ...]
) -> None:
    assert more_rounds(layout, LAYERED, Planning(fixed=fixed)) == rounds


def test_schedules_and_rounds_want_stages() -> None:
    assert wants_stages(Planning(schedule="1f1b"))
    assert wants_stages(Planning(fixed={"rounds": 2}))
    assert not wants_stages(Planning(schedule="gpipe", fixed={"rounds": 1}))
    assert not wants_stages(Planning())


def test_links_between_hosts_are_slow() -> None:
    topology = devices(2, 4).topology
    assert slow_links(topology, (2, 4)) == ["network"]
    assert slow_links(topology, (2, 1)) == slow_links(topology, (1, 1)) == []
