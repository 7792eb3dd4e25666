"""Expected memory of a step on TPUs, against the result of the TPU compiler.

Compiles the best plan of three models for two slices. Requires `nbdist[oracle]`, yields no case
without it. Ours is the error of the expected memory. The peer is the error of the memory of the
step's inputs, which is known without an analysis of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.case import Case
from benchmarks.compiled_models import MODELS, traced
from nbdist.planner.hardware.compiler_targets import is_compiler_installed
from nbdist.records import Planning
from nbdist.worker.planning.plan_step import named_target, plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICES = ("v5e:4x4", "v5p:4x4x4")
ALLOWED = 0.05


def cases() -> Iterator[Case]:
    if not is_compiler_installed("tpu"):
        return
    for name in MODELS:
        for on in SLICES:
            yield _case(name, on)


def _case(name: str, on: str) -> Case:
    plan = plan_of(*traced(name), named_target(on), Planning(verify=True), {})
    assert plan.verified is not None
    expected, compiled = plan.memory.needed, plan.verified.total
    sizes = f"{expected >> 20:,} MiB of {compiled >> 20:,}"
    peer = 1 - plan.memory.arguments / compiled
    return Case(
        f"memory of {name} on {on}, {plan.title}: {sizes}",
        abs(expected / compiled - 1),
        peer,
        "of what is compiled",
        ALLOWED / peer,
        1,
    )
