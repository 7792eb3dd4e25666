"""Search for the best layout of a step on a target, with the next best ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import PlanError
from nbdist.planner.cost.memory import MARGIN
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.hardware.topology import describe, extents
from nbdist.planner.search.candidates import Candidate, priced, ranked
from nbdist.planner.search.explain import gib, no_layout_message, warnings_of
from nbdist.planner.search.fixed_plan import sharded_as
from nbdist.planner.search.mesh_sizes import LEVELS, bare_layouts
from nbdist.planner.search.schedule_variants import schedule_variants, sequence_variants
from nbdist.planner.search.step_variants import LARGE, Steps
from nbdist.planner.search.tensor_split import split_for
from nbdist.records import DATA, Plan, PlannedTensor, RunnerUp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.model import Model
    from nbdist.records import Planning, Remat, Spec

SHOWN = 5
"""Number of other plans that are shown."""

_LARGE_SHOWN = 2
"""Most plans among those that do not fit."""

_ROOM_BYTES = 5 * 2**30
"""Free memory of a device at which estimates of memory may be wrong without a failure."""

_AS_FAST = 1.01
"""Ratio of step times below which free memory decides. Estimates of time are less exact."""

_TRIES = 3
"""Numbers of microbatches that are tried, from the least that could suffice."""


def plan(
    step: Steps | Model,
    target: Target,
    request: Planning,
    pinned: Mapping[str, Spec] | None = None,
) -> Plan:
    """Return the fastest layout that fits.

    Args:
        step: the step, or its variants with rematerialization and microbatches.
        target: the hardware.
        request: requested sizes and limits.
        pinned: specs of arrays that the user has sharded, by path.

    Raises:
        PlanError: no layout fits, or none fulfils the request.
    """
    return plans(step, target, request, pinned, most=1)[0]


def plans(
    step: Steps | Model,
    target: Target,
    request: Planning,
    pinned: Mapping[str, Spec] | None = None,
    *,
    most: int,
) -> list[Plan]:
    """Return the fastest layouts that fit, best first, each with the next ones.

    Args:
        step: as in `plan`.
        target: as in `plan`.
        request: as in `plan`.
        pinned: as in `plan`.
        most: largest number of plans; at least one is returned.

    Raises:
        PlanError: no layout fits, or none fulfils the request.
    """
    steps = step if isinstance(step, Steps) else Steps(step)
    if not steps.plain.rows:
        raise PlanError("the batch is empty: use data with at least one row")
    if request.given is not None:
        return [_taken(request.given, steps, target, request)]
    if target.cautious and not request.only:
        bare = bare_layouts(steps, target, request)
        simplest = next(_candidates_of(bare, steps, target, request, pinned), None)
        if simplest is not None and simplest.fits and simplest.replicated_table is None:
            return [_plan(simplest, [], target)]  # the result of a full search
    candidates = ranked(_candidates(steps, target, request, pinned))
    if not candidates:
        raise PlanError(no_layout_message(steps, target, request))
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        limits = (f"({note})" for note in _notes(steps, target))
        raise PlanError("\n".join((_too_large(candidates), *limits)))
    if not request.fixed.keys() - {"micro", "rounds", "sequence"} and target.topology.devices > 1:
        whole, fitting = fitting[0], [c for c in fitting if c.replicated_table is None]
        if not fitting:
            raise PlanError(
                f"{whole.replicated_table} has over {LARGE:,} entries, cannot be sharded so that "
                "it fits, and would be replicated: use --fix tensor=1 to allow that"
            )
    if target.cautious:
        fitting.sort(key=lambda c: c.changes)
    else:
        fitting = _with_room_first(fitting)
    best = fitting[:most]
    after = [[c for c in candidates if c not in best[: place + 1]] for place in range(len(best))]
    made = (_plan(found, others, target) for found, others in zip(best, after, strict=True))
    notes = _notes(steps, target)
    return [msgspec.structs.replace(one, notes=(*one.notes, *notes)) for one in made]


def _with_room_first(fitting: list[Candidate]) -> list[Candidate]:
    """Put a layout with free memory first, if it is as fast as the first one within `_AS_FAST`."""
    best = fitting[0]
    roomy = (
        c
        for c in fitting
        if c.memory.free >= _ROOM_BYTES
        and c.time.step <= _AS_FAST * best.time.step
        and (best.crossed_links or not c.crossed_links)
        and (best.replicated_table or not c.replicated_table)
    )
    first = best if best.memory.free >= _ROOM_BYTES else next(roomy, best)
    return [first, *(c for c in fitting if c is not first)]


def _notes(steps: Steps, target: Target) -> tuple[str, ...]:
    """Return notes about variants of the step that are impossible."""
    has_stages = not target.cautious and target.topology.devices > 1
    reason = steps.why_no_stages().partition(": ")[0] if has_stages else ""
    stages = f"no stages: {reason} (docs/planner.md, Pipelines)" if reason else ""
    return tuple(filter(None, (steps.why_no_microbatches, stages)))


def layouts(model: Model, target: Target, request: Planning) -> tuple[Layout, ...]:
    """Return the layouts that the search compares, including those that do not fit."""
    found = _candidates(Steps(model), target, request, None)
    return tuple(candidate.sharded.layout for candidate in found)


def _candidates(
    steps: Steps, target: Target, request: Planning, pinned: Mapping[str, Spec] | None
) -> Iterator[Candidate]:
    """Yield candidates; if the batch cannot be sharded, every device computes all of it."""
    bare = bare_layouts(steps, target, request)
    found = list(_candidates_of(bare, steps, target, request, pinned))
    if not any(c.fits and not c.crossed_links for c in found):
        bare = bare_layouts(steps, target, request, crossing=True)
        found += _candidates_of(bare, steps, target, request, pinned)
    whole = (
        Layout(target.topology.devices, 1, zero=zero)
        for zero in LEVELS
        if not found and not request.fixed
    )
    yield from found or _candidates_of(whole, steps, target, request, pinned)


def _candidates_of(
    bares: Iterable[Layout],
    steps: Steps,
    target: Target,
    request: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Iterator[Candidate]:
    """Yield candidates of each layout, with more rematerialization if memory is exceeded."""
    for bare in bares:
        kept: list[Candidate] = []
        for remat in _remats(steps, target) if request.remat is None else (request.remat,):
            if bare.stage > 1 and steps.why_no_stages(remat):
                continue
            found = _sharded(replace(bare, remat=remat), steps, target, request, pinned)
            if found is None:
                break
            ways = list(sequence_variants(found, steps, target, request))
            all_ = [one for way in ways for one in schedule_variants(way, steps, target, request)]
            yield from all_
            kept += ways[-1:]  # a sharded sequence needs fewer microbatches
            if any(c.fits for c in all_) or (
                all_ and not any(c.exceeds_by_activations for c in all_)
            ):
                break
        if bare.stage > 1 or "micro" in request.fixed:
            continue
        for place in dict.fromkeys((0, len(kept) - 1)) if kept else ():
            yield from _in_parts(kept[place], steps, target, request, pinned)


def _in_parts(
    whole: Candidate,
    steps: Steps,
    target: Target,
    request: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Iterator[Candidate]:
    """Yield the same with the fewest microbatches that fit, if it does not fit in one."""
    memory, layout = whole.memory, whole.sharded.layout
    if not whole.exceeds_by_activations or steps.why_no_microbatches or steps.is_fixed:
        return
    least = memory.activations / (memory.available - (memory.total - memory.activations))
    rows = steps.plain.rows // layout.data
    enough = (parts for parts in range(2, rows + 1) if not rows % parts and parts >= least)
    for micro in itertools.islice(enough, _TRIES):
        bare = replace(layout, split=frozenset(), micro=micro)
        try:
            found = _sharded(bare, steps, target, request, pinned)
        except PlanError as error:
            steps.why_no_microbatches = str(error)
            return
        if found is None:
            return
        yield found
        if found.fits:
            return


def _remats(steps: Steps, target: Target) -> tuple[Remat, ...]:
    """Return the rematerializations to try: up to JAX 0.10, XLA for CPUs undoes them."""
    return steps.remats[:1] if target.topology.chip.platform == "cpu" else steps.remats


def _sharded(
    bare: Layout,
    steps: Steps,
    target: Target,
    request: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Candidate | None:
    """Return a candidate that is sharded over the model axis; None if nothing can be."""
    step, topology = steps.of(bare), target.topology
    budget = request.budget or topology.chip.memory_bytes
    layout = bare
    if bare.model > 1:
        extent, given = extents(bare.axes, topology), (1 - MARGIN) * budget
        split = split_for(
            step.model, step.program, bare, step.states, target, extent, given, step.large
        )
        if not split:
            return None
        layout = replace(bare, split=split)
    sharded = ShardedModel(step.model, layout, step.states, _over_all(pinned or {}, layout))
    return priced(sharded, steps, target, budget)


def _over_all(pinned: Mapping[str, Spec], layout: Layout) -> dict[str, Spec]:
    """Return the user's specs over the strategy's one axis, for the mesh of a layout."""
    every = tuple(axis for axis, size in layout.axes.items() if size > 1) or (DATA,)
    return {
        path: tuple(every if DATA in axes else axes for axes in spec)
        for path, spec in pinned.items()
    }


def _taken(given: Plan, steps: Steps, target: Target, request: Planning) -> Plan:
    """Return a given plan with new prices."""
    sharded = sharded_as(given, steps, target.topology.devices)
    budget = request.budget or target.topology.chip.memory_bytes
    found = priced(sharded, steps, target, budget)
    if not found.fits:
        raise PlanError(_too_large([found]))
    return _plan(found, [], target)


def _plan(best: Candidate, others: list[Candidate], target: Target) -> Plan:
    sharded, model = best.sharded, best.sharded.model
    tensors = tuple(
        PlannedTensor(
            path=tensor.path,
            role=sharded.role(tensor),
            shape=tensor.value.sizes,
            dtype=tensor.value.dtype,
            spec=sharded.spec(tensor),
            device_bytes=sharded.device_bytes(tensor),
        )
        for tensor in model.tensors
    )
    return Plan(
        axes=sharded.layout.axes,
        zero=sharded.layout.zero,
        remat=sharded.layout.remat,
        micro=sharded.layout.micro,
        sequence=sharded.layout.sequence,
        schedule=sharded.layout.schedule,
        rounds=sharded.layout.rounds,
        loss_stages=sharded.layout.loss_stages,
        kernels="pallas_call" in model.primitives,
        rows=model.rows,
        on=describe(target.topology),
        tensors=tensors,
        memory=best.memory,
        time=best.time,
        warnings=warnings_of(sharded, best.time, target.topology),
        runners_up=tuple(_why(best, other) for other in _shown(best, others)),
        notes=(*model.notes, *target.topology.assumed),
    )


def _shown(best: Candidate, others: list[Candidate]) -> list[Candidate]:
    """Return the next best ones; with stages, the best with and without stages is included.

    Few candidates that do not fit are shown if enough others do.
    """
    large = [c for c in others if not c.fits][_LARGE_SHOWN:]
    fitting = [c for c in others if c not in large]
    first = (fitting if len(fitting) >= SHOWN else others)[:SHOWN]
    of_other_kind = (c for c in others if c.fits and c.is_pipeline != best.is_pipeline)
    found = next(of_other_kind, None)
    return first if found is None or found in first else [*first[:-1], found]


def _why(best: Candidate, other: Candidate) -> RunnerUp:
    if not other.fits:
        why = f"exceeds the memory of each device by {gib(-other.memory.free)}"
    elif other.replicated_table is not None and best.replicated_table is None:
        why = f"{other.replicated_table}, with over {LARGE:,} entries, would be replicated"
    elif other.crossed_links and not best.crossed_links:
        why = f"its tensor parallelism crosses {other.crossed_links}, which other layouts avoid"
    elif other.time.step < best.time.step and other.memory.free < _ROOM_BYTES <= best.memory.free:
        faster = 1 - other.time.step / best.time.step
        why = f"{faster:.1%} faster, but leaves only {gib(other.memory.free)} of each device free"
    elif other.is_pipeline and other.time.step > best.time.step:
        why = f"{_slower(best, other)}: its stages are idle for {other.time.bubble:.0%} of a step"
    elif other.is_pipeline and not best.is_pipeline:
        stages = other.sharded.layout.stage
        why = (
            "its stages are always idle for some time, but operations may hide the "
            f"transfers of the best one; use --fix stage={stages} to choose it"
        )
    elif other.time.step > best.time.step:
        why = _slower(best, other)
    elif other.rank[1] < best.rank[1]:  # `Target.cautious`
        why = "it shards more, and estimates for CPUs are too uncertain to choose by time"
    else:
        why = "it shards more, and is as fast"
    return RunnerUp(
        title=other.title,
        step_s=other.time.step,
        device_bytes=other.memory.total,
        why=why,
    )


def _slower(best: Candidate, other: Candidate) -> str:
    ratio = other.time.step / best.time.step
    return f"{ratio:.2g} times as long" if ratio > 2 else f"{ratio - 1:.0%} slower"


def _too_large(candidates: list[Candidate]) -> str:
    """Return a message with the missing memory and with changes that would make the step fit."""
    least = min(candidates, key=lambda c: c.memory.total)
    memory = least.memory
    budget = memory.available
    over = memory.total - budget
    room = max(1, budget - memory.margin)
    more = -(-memory.needed // room)
    head = (
        f"the step does not fit: the smallest layout ({least.title}) takes "
        f"{gib(memory.total)} on each device, {gib(over)} ({over:,} bytes) more "
        f"than the {gib(budget)} available. It would fit with"
    )
    lines = [head, f"  - about {more} times as many devices"]
    layout, rows = least.sharded.layout, least.sharded.model.rows
    part = max(0.0, 1 - over / memory.activations) if memory.activations else 0.0
    parts = layout.data * layout.micro
    if rows * part >= parts:
        lines.append(f"  - a global batch of {int(rows * part) // parts * parts}")
    else:
        lines.append(f"  - devices of {gib(memory.total)} or more")
    lines.append("  - parameters and state in bfloat16, which halves their memory")
    return "\n".join(lines)
