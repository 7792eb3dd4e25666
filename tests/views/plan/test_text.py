"""Texts and figures of plans."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nbdist.records import Collective, Layout, Plan, RunnerUp, Traffic, Verified
from nbdist.views.placement.tree import Branch, Cost, Leaf, Row
from nbdist.views.plan import text
from nbdist.views.plan.tensors import placement_of
from tests.plans import by_hand, tensor

PLAN = by_hand(tensor("w", 8, 4, first="model"), tensor("x", 8, 4, role="batch", first="data"))
GIB = 2**30


def plan(**changes: Any) -> Plan:
    return replace(PLAN, **changes)


def with_memory(**changes: int) -> Plan:
    return plan(memory=replace(PLAN.memory, **changes))


def test_the_headline_names_the_first_part_of_the_hardware() -> None:
    assert text.headline(PLAN) == (
        "data 2 x tensor 2 on 4 x CPU: about 500 ms a step, MFU 25%, 188 of 356 B on each device"
    )


def on(hardware: str, **time: Any) -> str:
    return text.step_time(plan(on=hardware, time=replace(PLAN.time, **time)))


def test_step_time_is_a_range_of_published_steps_on_known_chips() -> None:
    assert on("8 x A100-80GB, 79.3 GiB each", compute=10.0) == "8 s to 11 s"
    assert on("64 x TPU v5p, 95 GiB each", compute=1.0) == "820 ms to 1.2 s"
    assert on("8 x T4, 14.9 GiB each", compute=10.0) == "about 10 s"
    assert on("8 x CPU, 4 GiB each", compute=0.25) == "about 250 ms"


def test_step_that_waits_for_the_network_has_no_range() -> None:
    traffic = (Traffic(axis="data", level="network", bytes=1.0, seconds=3.0),)
    shown = on("8 x A100-80GB, 79.3 GiB each", compute=7.0, exposed=3.0, traffic=traffic)
    assert shown == "about 10 s"


def test_memory_has_one_unit_if_possible() -> None:
    memory = {"arguments": 0, "gradients": 0, "activations": 0, "available": 2 * GIB}
    assert text.memory(with_memory(**memory, margin=GIB)) == "1.0 of 2.0 GiB"
    assert text.memory(with_memory(**memory, margin=2**20)) == "1.0 MiB of 2.0 GiB"


@pytest.mark.parametrize(
    ("changes", "is_shown"),
    [
        ({"axes": {"data": 4}}, False),
        ({"axes": {"data": 4}, "zero": 1}, True),
        ({"axes": {"data": 4}, "remat": "full"}, True),
        ({"axes": {"data": 4}, "micro": 2}, True),
        ({"axes": {"data": 2, "model": 2}}, True),
    ],
)
def test_a_planned_step_is_described_unless_all_devices_have_all_arrays(
    changes: dict[str, Any], is_shown: bool
) -> None:
    lines = list(text.plan_lines(plan(warnings=("careful",), **changes)))
    assert bool(lines) == is_shown
    assert not lines or (lines[0].startswith("layout ") and lines[1:] == ["careful"])


def test_facts_contain_tokens_and_operations_with_two_digits() -> None:
    tokens = replace(tensor("tokens", 8, 2048, role="batch"), dtype="int32")
    labels = replace(tensor("labels", 8, role="batch"), dtype="int32")
    time = replace(PLAN.time, compute=0.3, flops=5e13)
    found = plan(time=time, tensors=(*PLAN.tensors, tokens, labels))
    assert list(text.facts(found))[1] == (
        "8 samples a step: about 27 samples or 55,000 tokens a second, 170 TFLOP/s on each device"
    )


def test_facts_contain_the_pace_of_a_step() -> None:
    assert list(text.facts(PLAN)) == [PLAN.on, "8 samples a step: about 16 samples a second"]
    stopped = plan(time=replace(PLAN.time, compute=0.0), rows=1)
    assert list(text.facts(stopped))[1] == "1 sample a step"


def test_missing_memory_is_the_first_warning() -> None:
    def lines(available: int) -> list[str]:
        memory = replace(PLAN.memory, available=available)
        return list(text.warnings(plan(memory=memory, warnings=("careful",))))

    assert lines(PLAN.memory.total) == ["careful"]
    assert lines(PLAN.memory.total - 9) == [
        "it does not fit: 9 B too much on each device",
        "careful",
    ]


def test_results_of_the_compiler_are_compared() -> None:
    assert list(text.verified(PLAN)) == []
    collectives = (Collective("all-reduce", 1200, 3 * 1024), Collective("all-gather", 1, 12))
    found = Verified(arguments=100, temporaries=20, total=130, collectives=collectives, seconds=2.5)
    assert list(text.verified(plan(verified=found))) == [
        "compiled by XLA for this hardware in 2.5 s: 130 B on each device, and 158 B were expected",
        "arguments 100 B (128 B expected), temporaries 20 B",
        "collectives, each loop counted once: 1,200 all-reduce (3.0 KiB), 1 all-gather (12 B)",
    ]
    alone = plan(verified=replace(found, collectives=()))
    assert list(text.verified(alone))[-1].endswith("once: none")


def test_degrees_describe_each_sharded_axis() -> None:
    data, model = text.degrees(PLAN)
    assert data == ("data", "2", "4 of 8 samples on each group of 2 devices")
    assert model[:2] == ("model", "2")
    assert model[2] == (
        "shards 1 of 1 parameter, 100% of their bytes, and their computations (tensor parallel)"
    )
    alone = plan(axes={"data": 1, "model": 1})
    assert text.degrees(alone) == [("none", "1", "one device contains all arrays")]


def test_the_batch_is_divided_over_devices() -> None:
    ((_, _, whole),) = text.degrees(plan(axes={"data": 3}, rows=10))
    assert whole == "3.333 of 10 samples on each device"
    copies, (_, _, part) = text.degrees(plan(axes={"replicate": 2, "data": 4}, rows=16, zero=3))
    assert copies == ("replicate", "2", "2 copies of the arrays that ZeRO shards (hybrid sharding)")
    assert part.startswith("2 of 16 samples on each device; ")
    ((_, _, sharded),) = text.degrees(plan(axes={"data": 4}, zero=3))
    assert sharded.startswith("2 of 8 samples on each device; optimizer state and parameters")


def test_tensor_parallelism_counts_bytes_of_parameters() -> None:
    """Count whole parameters: half of the 128 bytes of `a` are on each device."""
    tensors = (
        tensor("a", 8, 4, first="model"),
        tensor("b", 3, 32),
        tensor("m", 100, 100, role="state", first="model"),
    )
    found = plan(tensors=tensors, axes={"data": 1, "model": 2})
    ((_, _, words),) = text.degrees(found)
    assert words.startswith("shards 1 of 2 parameters, 25% of their bytes")
    ((_, _, along),) = text.degrees(replace(found, sequence=True))
    assert along.endswith(
        "; activations between them are sharded along the sequence (sequence parallel)"
    )
    ((_, _, none),) = text.degrees(replace(found, tensors=()))
    assert none.startswith("shards 0 of 0 parameters, 0% of")


def test_stages_contain_layers() -> None:
    tensors = (
        tensor("a", 8, 4, first="stage"),
        tensor("b", 6, 4, first="stage"),
        tensor("x", 4, 4, role="batch", first="stage"),
    )
    found = plan(axes={"stage": 2, "data": 1}, tensors=tensors, time=replace(PLAN.time, bubble=0.2))
    ((_, _, words),) = text.degrees(found)
    assert words == (
        "3 or 4 layers of a scan per stage (pipeline parallel): stages wait 20% of a step for "
        "microbatches"
    )
    stored = replace(tensor("a", 9, 4), spec=((), ("stage",)))
    ((_, _, uneven),) = text.degrees(replace(found, tensors=(stored,)))
    assert uneven.startswith("4 or 5 layers of a scan per stage (pipeline parallel)")
    ((_, _, some),) = text.degrees(replace(found, tensors=(), rounds=2))
    assert some.startswith("some layers of a scan per stage, in 2 blocks (pipeline parallel)")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "parts of 2 samples are computed one after another, and their gradients summed"),
        ({"rows": 4}, "parts of 1 sample are computed one after another"),
        (
            {"axes": {"data": 2, "stage": 2}},
            "parts of 2 samples go through the stages: all forward, then all backward (GPipe)",
        ),
        (
            {"axes": {"data": 2, "stage": 2}, "schedule": "1f1b", "rounds": 3},
            "parts of 2 samples go 3 times through the stages: each backward right after its ",
        ),
    ],
)
def test_microbatches_describe_their_schedule(changes: dict[str, Any], words: str) -> None:
    name, size, found = text.degrees(plan(micro=2, tensors=(), **changes))[-1]
    assert (name, size) == ("microbatches", "2")
    assert found.startswith(words)


def test_recomputation_is_the_last_degree() -> None:
    found = text.degrees(plan(micro=2, remat="selective"))[-1]
    assert found[:2] == ("remat", "selective")
    assert "all but products" in found[2]


def test_parts_of_memory_add_up_to_that_of_the_device() -> None:
    parts = {part.name: part.amount for part in text.memory_parts(PLAN)}
    assert parts == {
        "parameters": 64,
        "batch": 64,
        "gradients": 10,
        "activations": 20,
        "margin": 30,
        "free": 168,
    }
    full = text.memory_parts(with_memory(available=100))
    assert "free" not in [part.name for part in full]


def spent(exposed: float, *traffic: Traffic) -> list[tuple[str, float, str]]:
    """Return the parts of a step that computes for one second."""
    time = replace(PLAN.time, compute=1.0, exposed=exposed, traffic=traffic)
    parts = text.time_parts(plan(time=time))
    return [(part.name, part.amount, part.detail) for part in parts]


def test_seconds_of_collectives_are_added_up_by_level() -> None:
    links = (
        Traffic("data", "host", 1000, 0.25, hidden=0.125),
        Traffic("model", "rack", 500, 0.5, hidden=0.375),
        Traffic("model", "host", 2000, 0.25),
    )
    assert spent(0.5, *links) == [
        ("compute", 1.0, ""),
        ("host links", 0.375, "2.9 KiB sent, 125 ms hidden"),
        ("rack links", 0.125, "500 B sent, 375 ms hidden"),
    ]
    seen = (replace(traffic, hidden=0.0) for traffic in links)
    assert [name for name, *_ in spent(1.0, *seen)] == ["compute", "host links", "rack links"]
    assert spent(0.0) == [("compute", 1.0, "")]


def test_alternatives_contain_compiled_bytes() -> None:
    others = (
        RunnerUp(title="data 4", step_s=0.5, device_bytes=12, why="slow"),
        RunnerUp(title="tensor 4", step_s=1.0, device_bytes=12, why="large", compiled_bytes=2048),
    )
    assert text.runners_up(plan(runners_up=others)) == [
        ["data 4", "500 ms", "12 B", "slow"],
        ["tensor 4", "1 s", "12 B, compiled 2.0 KiB", "large"],
    ]


def test_rows_of_the_tree_have_bytes_of_each_device() -> None:
    placement = placement_of(PLAN)
    leaf = Leaf("w", placement.arrays[0], Cost(1, 0, 400, 0))
    assert text.cells(Row(0, leaf), placement) == ["w", "8 x 4", "float32", "P('model')", "100 B"]
    leaf.cost = Cost(3, 0, 400, 0)
    assert text.cells(Row(0, leaf), placement)[0] == "w x 3"
    branch = Branch("p", cost=Cost(2, 0, 800, 0))
    assert text.cells(Row(0, branch), placement) == ["p", "2 arrays", "", "", "200 B"]
    rest = Row(0, None, Cost(5, 0, 8, 0))
    assert text.cells(rest, placement) == ["… and 5 more arrays", "", "", "", "2 B"]


def test_blocks_and_their_devices() -> None:
    placement = placement_of(PLAN)
    layout = placement.layouts[placement.arrays[1].layout]
    assert text.blocks(layout) == "2 blocks, each on 2 devices"
    assert text.holders(placement, layout, 8) == ["devices 0-1", "devices 2-3"]
    assert text.holders(placement, layout, 1) == ["devices 0-1"]
    alone = Layout(kind="one device", devices=(0,), blocks=(0,))
    assert text.blocks(alone) == "1 block, each on 1 device"
