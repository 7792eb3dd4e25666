"""Possible sizes of mesh axes for a step, before the model axis shards anything."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from nbdist.planner.graph.layout import Layout
from nbdist.planner.hardware.topology import extents
from nbdist.records import DATA, MODEL, REPLICATE, STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.cost.time import Target
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import Extent, Planning, Topology, Zero

LEVELS: tuple[Zero, ...] = (0, 1, 3)

STAGED: tuple[Zero, ...] = LEVELS[:2]
"""ZeRO stages in pipelines; parameters sharded over `data` would be gathered in each tick."""

_ROUNDS = (2, 3, 4)
"""Numbers of rounds that are tried beside one."""

_MICROBATCHES_PER_STAGE = (1, 2, 4, 8)
"""Microbatches per stage that are tried: the bubble halves from one to the next."""


def bare_layouts(
    steps: Steps, target: Target, request: Planning, *, crossing: bool = False
) -> Iterator[Layout]:
    """Yield possible layouts that fulfil the request; of pipelines the first of similar ones.

    Args:
        steps: the step and its variants.
        target: the hardware.
        request: requested sizes and limits.
        crossing: instead, layouts that cross slow links with both stages and tensor parallelism.
            Others come first, because stages keep sums that layers wait for within hosts.
    """
    # Sequence parallelism is decided later, when the model axis shards dimensions.
    asked = {name: size for name, size in request.fixed.items() if name != "sequence"}
    for stage in _stages(steps, target, request):
        for data, size in _sizes(steps, target, stage):
            micro = next(iter(_microbatches(steps, data, stage, request)), 0)
            if not micro or steps.plain.rows % (data * micro):
                continue
            first = stage > 1 or not any(t.role == "carried" for t in steps.plain.tensors)
            for zero in _levels(data, stage, request)[: 1 if first else None]:
                rounds = request.fixed.get("rounds", 1)
                layout = Layout(data, size, zero=zero, micro=micro, stage=stage, rounds=rounds)
                if _crosses(layout, target.topology) != crossing:
                    continue
                for copies in _copies(layout, steps, target, request):
                    one = replace(layout, replicate=copies)
                    own = {DATA: one.shards, MODEL: size, STAGE: stage, REPLICATE: copies}
                    own |= {"zero": zero, "micro": micro, "rounds": rounds}
                    if asked.items() <= own.items():
                        yield one


def _copies(layout: Layout, steps: Steps, target: Target, request: Planning) -> tuple[int, ...]:
    """Return possible sizes of the axis `replicate`.

    Without a request, ZeRO-3 may shard within faster links only, so that parameters are not
    gathered over the slower ones. ZeRO-1 sends as much with and without copies.
    """
    asked = request.fixed.get(REPLICATE)
    if asked is not None:
        divides = 1 < asked < layout.data and not layout.data % asked
        is_possible = divides and layout.zero and layout.stage == 1 and not steps.plain.apart
        return (asked,) if asked == 1 or is_possible else ()
    if layout.zero != 3 or target.cautious or steps.plain.apart:
        return (1,)
    extent = extents(layout.axes, target.topology)[DATA]
    levels = zip(extent, target.topology.levels, strict=True)
    across = prod(size for size, level in levels if level.alone_bytes_per_s is not None)
    return (1, across) if 1 < across < layout.data else (1,)


def staged(layout: Layout, steps: Steps, request: Planning) -> Iterator[Layout]:
    """Yield layouts with other numbers of microbatches, fewest first, and ZeRO stages."""
    if layout.stage == 1:
        return
    for micro in _microbatches(steps, layout.data, layout.stage, request):
        for zero in _levels(layout.data, layout.stage, request):
            if (micro, zero) != (layout.micro, layout.zero):
                yield replace(layout, micro=micro, zero=zero)


def more_rounds(layout: Layout, steps: Steps, request: Planning) -> tuple[int, ...]:
    """Return larger numbers of rounds that a layout allows."""
    if layout.stage == 1 or layout.micro % layout.stage or "rounds" in request.fixed:
        return ()
    return tuple(rounds for rounds in _ROUNDS if steps.allows(layout.stage, rounds))


def wants_stages(request: Planning) -> bool:
    """Return True if the request needs stages without their number."""
    return request.schedule == "1f1b" or request.fixed.get("rounds", 1) != 1


def _levels(data: int, stage: int, request: Planning) -> tuple[Zero, ...]:
    levels = (STAGED if stage > 1 else LEVELS) if data > 1 else LEVELS[:1]
    asked = request.fixed.get("zero")
    return tuple(zero for zero in levels if asked is None or zero == asked)


def _microbatches(steps: Steps, data: int, stage: int, request: Planning) -> tuple[int, ...]:
    """Return possible numbers of microbatches, fewest first; one without stages."""
    asked, rounds = request.fixed.get("micro"), request.fixed.get("rounds", 1)
    multiple = stage if rounds > 1 else 1
    if rounds != 1 and (stage == 1 or not steps.allows(stage, rounds)):
        return ()
    if stage == 1 or asked is not None:
        micro = asked or 1
        return (micro,) if stage == 1 or (micro > 1 and not micro % multiple) else ()
    rows = steps.plain.rows // data
    most = min(rows, 2 * _MICROBATCHES_PER_STAGE[-1] * stage)
    parts = [n for n in range(2, most + 1) if not rows % n and not n % multiple]
    starts = (count * stage for count in _MICROBATCHES_PER_STAGE)
    found = [next((n for n in parts if start <= n < 2 * start), 0) for start in starts]
    return tuple(dict.fromkeys(filter(None, found))) or tuple(parts[-1:])


def _stages(steps: Steps, target: Target, request: Planning) -> tuple[int, ...]:
    """Return possible numbers of stages; on uncertain hardware only requested ones."""
    asked = request.fixed.get(STAGE, 1)
    is_staged = wants_stages(request)
    if STAGE in request.fixed or (target.cautious and not is_staged):
        fitting = asked == 1 or (asked in steps.stages and not target.topology.devices % asked)
        return (asked,) if fitting else ()
    found = tuple(n for n in steps.stages if not target.topology.devices % n)
    return found if is_staged else (1, *found)


def _sizes(steps: Steps, target: Target, stage: int) -> Iterator[tuple[int, int]]:
    """Yield possible sizes of the data axis and the model axis."""
    model, devices = steps.plain, target.topology.devices // stage
    largest = max((group.divisor for group in model.groups), default=1)
    if stage > 1 and steps.stacks_layers:
        largest = 1
    for size in range(1, min(devices, largest) + 1):
        if not devices % size and not (model.apart and 1 < size < devices):
            yield devices // size, size


def _crosses(layout: Layout, topology: Topology) -> bool:
    return layout.stage > 1 and bool(slow_links(topology, extents(layout.axes, topology)[MODEL]))


def slow_links(topology: Topology, extent: Extent) -> list[str]:
    """Return the names of the links between hosts that an axis crosses."""
    return [
        level.name
        for level, size in zip(topology.levels, extent, strict=True)
        if size > 1 and level.alone_bytes_per_s is not None
    ]
