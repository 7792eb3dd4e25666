"""Expected memory of a step on TPUs, against the result of the TPU compiler.

Compiles the best plan of three models for two slices. Requires `nbdist[oracle]`. Ours is the error
of the expected memory. The peer is the error of the memory of the step's inputs, which is known
without an analysis of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.case import Case, Skipped
from benchmarks.compiled_models import MODELS, traced
from nbdist.planner.hardware.compiler_targets import is_compiler_installed
from nbdist.records import Planning
from nbdist.worker.planning.plan_step import named_target, plan_of
from nbdist.worker.planning.query import PlanQuery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale

SLICES = ("v5e:4x4", "v5p:4x4x4")
ALLOWED = 0.05


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    installed = is_compiler_installed("tpu")
    for name in MODELS:
        for on in SLICES:
            title = f"expected memory of {name} on {on}, against the compiled program"
            if installed:
                yield _case(scale, title, name, on)
            else:
                yield Skipped(title, "no compiler for TPUs: install nbdist[oracle]")


def _case(scale: Scale, title: str, name: str, on: str) -> Case:
    plan = plan_of(
        PlanQuery(*traced(name, tiny=scale.smoke), named_target(on), Planning(verify=True))
    )
    assert plan.verified is not None
    expected, compiled = plan.memory.needed, plan.verified.total
    sizes = f"{expected >> 20:,} MiB of {compiled >> 20:,}"
    peer = 1 - plan.memory.arguments / compiled
    error = abs(expected / compiled - 1)
    detail = f"{plan.title}: {sizes}"
    return Case(title, error, peer, "of what is compiled", ALLOWED / peer, 1, detail)
