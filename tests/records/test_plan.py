"""Sums and short forms of plans."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nbdist.records import Plan, PlannedMemory, PlannedTime

PLAN = Plan(
    axes={"data": 4, "model": 2},
    zero=0,
    rows=8,
    on="8xCPU",
    tensors=(),
    memory=PlannedMemory(arguments=1, gradients=20, activations=300, margin=4000, available=9),
    time=PlannedTime(compute=0.5, exposed=0.25, traffic=(), mfu=0.5),
)
FULL = (
    "data 4 x tensor 2 x 2 stages, sequence parallel, ZeRO-3, 1F1B, 2 rounds, 16 microbatches, "
    "selective remat"
)


def test_memory_and_time_are_added_up() -> None:
    assert (PLAN.memory.needed, PLAN.memory.total) == (321, 4321)
    assert PLAN.time.step == 0.75
    assert PLAN.devices == 8


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, "data 4 x tensor 2"),
        ({"axes": {"data": 1, "model": 2}}, "tensor 2"),
        ({"axes": {"data": 1}}, "one device"),
        ({"axes": {"data": 1}, "remat": "full"}, "one device, full remat"),
        ({"axes": {"stage": 4, "data": 2, "model": 1}}, "data 2 x 4 stages"),
        ({"axes": {"stage": 4, "data": 1}}, "4 stages"),
        ({"axes": {"stage": 1, "data": 2}, "schedule": "1f1b"}, "data 2"),
        ({"axes": {"stage": 2, "data": 1}, "schedule": "1f1b"}, "2 stages, 1F1B"),
        (
            {"axes": {"stage": 2, "data": 1}, "micro": 4, "loss_stages": "last"},
            "2 stages, 4 microbatches, loss on the last stage",
        ),
        (
            {
                "axes": {"stage": 2, "data": 4, "model": 2},
                "sequence": True,
                "zero": 3,
                "schedule": "1f1b",
                "rounds": 2,
                "micro": 16,
                "remat": "selective",
            },
            FULL,
        ),
    ],
)
def test_a_title_contains_the_degrees_that_count(changes: dict[str, Any], title: str) -> None:
    assert replace(PLAN, **changes).title == title


def test_the_schedule_of_a_plan_is_its_staging() -> None:
    staging = replace(PLAN, schedule="1f1b", rounds=3).staging
    assert staging == ("1f1b", 3, "all")
    assert (staging.schedule, staging.rounds) == ("1f1b", 3)
    assert replace(PLAN, loss_stages="last").staging.loss_stages == "last"
