"""Planning time for GPT-3 with 175 billion parameters, on increasing numbers of devices.

The step is written as if for one device and recomputes nothing: the plan selects remat. In the
first case, the peer is the 2 s allowed for a plan. In the second, it is the 60 s allowed if the
three best plans are also compiled, with NVIDIA's compiler from `nbdist[oracle]`. In the others, the
peer has ten times fewer devices, so a ratio of 10 means linear cost. The last cases apply equal
layers one by one instead of in a scan. The peer is the 5 s allowed without tracing, or half as many
layers. Imported objects are excluded from garbage collection, as in workers.
"""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.case import Case, Skipped
from benchmarks.language_models import gpt, traced_step
from nbdist.planner.hardware.compiler_targets import is_compiler_installed
from nbdist.records import Planning
from nbdist.worker.planning.plan_step import named_target, plan_of
from nbdist.worker.planning.query import PlanQuery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale
    from benchmarks.language_models import LanguageModel

ALLOWED_S, VERIFIED_S, ONE_BY_ONE_S = 2.0, 60.0, 5.0
RUNS = 5
DEVICES = (128, 1024, 10_240, 102_400)

GPT3 = gpt(51200, 12288, 96, 2048, 96)
TINY = gpt(512, 128, 2, 64, 2)
SMALL = gpt(8192, 512, 96, 512, 8)
LAYERS = (48, 96)

_BYTES = itertools.count()


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    gc.collect()
    gc.freeze()
    model, called = scale.of((GPT3, "GPT-3 175B"), (TINY, "tiny GPT"))
    runs = scale.runs(RUNS)
    rows, many = scale.of((128, 1024), (16, 16))
    took = [_seconds(model, rows, many) for _ in range(runs)]
    planned = f"plan of {called} on {many:,} A100s"
    name = f"{planned}, with tracing, against the {ALLOWED_S:.0f} s allowed"
    yield Case(name, median(took), ALLOWED_S, "s", 1.0, runs)
    name = f"{planned}, with compilation of the best three, against the {VERIFIED_S:.0f} s allowed"
    if is_compiler_installed("cuda"):
        took_s = _seconds(model, rows, many, verify=True)
        yield Case(name, took_s, VERIFIED_S, "s", 1.0, 1)
    else:
        yield Skipped(name, "no compiler for GPUs: install nbdist[oracle]")
    counts = scale.of(DEVICES, (16, 32))
    seconds = {
        devices: median(_seconds(model, max(devices // 8, 64), devices) for _ in range(runs))
        for devices in counts
    }
    for fewer, more in pairwise(counts):
        name = f"plan of {called} for {more:,} devices, against {fewer:,} devices"
        yield Case(name, seconds[more], seconds[fewer], "s", more / fewer, runs)
    yield from _one_by_one(scale, runs)


def _one_by_one(scale: Scale, runs: int) -> Iterator[Case]:
    """Yield cases of layers outside a scan; the model fits, so that the plan rewrites nothing."""
    fewer, more = scale.of(LAYERS, (2, 4))
    model = replace(scale.of(SMALL, TINY), is_scanned=False)
    seconds = {
        layers: median(_search_seconds(replace(model, layers=layers)) for _ in range(runs))
        for layers in (fewer, more)
    }
    name = f"plan of {more} layers one by one, without tracing"
    against = f"against the {ONE_BY_ONE_S:.0f} s allowed"
    yield Case(f"{name}, {against}", seconds[more], ONE_BY_ONE_S, "s", 1.0, runs)
    name = f"plan of {more} layers one by one, against {fewer} layers"
    yield Case(name, seconds[more], seconds[fewer], "s", more / fewer, runs)


def _search_seconds(model: LanguageModel) -> float:
    """Return the seconds to plan a traced step of 64 sequences for 8 devices."""
    traced, inputs = traced_step(model, 64)
    target = named_target("8xH100")
    budget = target.topology.chip.memory_bytes - next(_BYTES)
    began = time.perf_counter()
    plan_of(PlanQuery(traced, inputs, target, Planning(budget=budget)))
    return time.perf_counter() - began


def _seconds(model: LanguageModel, rows: int, devices: int, *, verify: bool = False) -> float:
    """Return the seconds to trace and plan a step of `rows` sequences."""
    began = time.perf_counter()
    traced, inputs = traced_step(model, rows)
    target = named_target(f"{devices}xA100-80GB")
    # `plan_of` keeps the plans of equal requests: each run has another budget.
    budget = target.topology.chip.memory_bytes - next(_BYTES)
    plan_of(PlanQuery(traced, inputs, target, Planning(verify=verify, budget=budget)))
    return time.perf_counter() - began
