"""The best layout of a step on a target, and why not the others."""

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
from nbdist.planner.search.explain import gib, none_as_asked
from nbdist.planner.search.fixed_plan import sharded_as
from nbdist.planner.search.mesh_sizes import LEVELS, bare_layouts
from nbdist.planner.search.schedule_variants import alike, kinds
from nbdist.planner.search.step_variants import LARGE, Steps
from nbdist.planner.search.tensor_split import split_for
from nbdist.planner.search.warnings import warnings_of
from nbdist.records import DATA, Plan, PlannedTensor, RunnerUp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.model import Model
    from nbdist.records import Planning, Remat, Spec

SHOWN = 5
"""Plans that were not chosen and are told of."""

_LARGE_SHOWN = 2
"""Of those, how many may be such as do not fit."""

_TRIES = 3
"""Numbers of microbatches that are tried, from what would be enough if nothing else took more."""


def plan(
    step: Steps | Model,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None = None,
) -> Plan:
    """The fastest layout that fits.

    Args:
        step: the step; where activations can be made again, with these ways.
        target: the hardware.
        wishes: what is asked of it.
        pinned: arrays that stay as their user has cut them, by path.

    Raises:
        PlanError: none fits, or none is as was asked for.
    """
    return plans(step, target, wishes, pinned, most=1)[0]


def plans(
    step: Steps | Model,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None = None,
    *,
    most: int,
) -> list[Plan]:
    """The fastest layouts that fit, the best first, each with those that come after it.

    Args:
        step: as in `plan`.
        target: as in `plan`.
        wishes: as in `plan`.
        pinned: as in `plan`.
        most: how many at most; one at least is there.

    Raises:
        PlanError: none fits, or none is as was asked for.
    """
    steps = step if isinstance(step, Steps) else Steps(step)
    if wishes.given is not None:
        return [_taken(wishes.given, steps, target, wishes)]
    if target.cautious and not wishes.only:
        bare = bare_layouts(steps, target, wishes)
        simplest = next(_laid_out(bare, steps, target, wishes, pinned), None)
        if simplest is not None and simplest.fits and simplest.copied is None:
            return [_plan(simplest, [], target)]  # as would come out, without weighing all others
    candidates = ranked(_candidates(steps, target, wishes, pinned))
    if not candidates:
        raise PlanError(none_as_asked(steps, target, wishes))
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        told = (f"({note})" for note in _notes(steps, target))
        raise PlanError("\n".join((_too_large(candidates), *told)))
    if not wishes.fixed.keys() - {"micro", "rounds", "sequence"} and target.topology.devices > 1:
        whole, fitting = fitting[0], [c for c in fitting if c.copied is None]
        if not fitting:
            raise PlanError(
                f"{whole.copied} has over {LARGE:,} entries, can be cut in no way that fits, and "
                "would be whole on every device: ask for that with --fix tensor=1"
            )
    if target.cautious:
        fitting.sort(key=lambda c: c.changes)
    best = fitting[:most]
    after = [[c for c in candidates if c not in best[: place + 1]] for place in range(len(best))]
    made = (_plan(found, others, target) for found, others in zip(best, after, strict=True))
    notes = _notes(steps, target)
    return [msgspec.structs.replace(one, notes=(*one.notes, *notes)) for one in made]


def _notes(steps: Steps, target: Target) -> tuple[str, ...]:
    """What could not be had of the step."""
    has_stages = not target.cautious and target.topology.devices > 1
    reason = steps.why_whole().partition(": ")[0] if has_stages else ""
    stages = f"no stages: {reason} (docs/planner.md, Pipelines)" if reason else ""
    return tuple(filter(None, (steps.whole, stages)))


def layouts(model: Model, target: Target, wishes: Planning) -> tuple[Layout, ...]:
    """Those among which the search chooses, whether they fit or not."""
    found = _candidates(Steps(model), target, wishes, None)
    return tuple(candidate.sharded.layout for candidate in found)


def _candidates(
    steps: Steps, target: Target, wishes: Planning, pinned: Mapping[str, Spec] | None
) -> Iterator[Candidate]:
    """A batch that cannot be cut is computed by all, where there is no other way."""
    bare = bare_layouts(steps, target, wishes)
    found = list(_laid_out(bare, steps, target, wishes, pinned))
    if not any(c.fits and not c.strained for c in found):
        bare = bare_layouts(steps, target, wishes, crossing=True)
        found += _laid_out(bare, steps, target, wishes, pinned)
    whole = (
        Layout(target.topology.devices, 1, zero=zero)
        for zero in LEVELS
        if not found and not wishes.fixed
    )
    yield from found or _laid_out(whole, steps, target, wishes, pinned)


def _laid_out(
    bares: Iterable[Layout],
    steps: Steps,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Iterator[Candidate]:
    """What keeps too much comes again, in ways that keep less."""
    for bare in bares:
        kept: list[Candidate] = []
        for remat in _remats(steps, target) if wishes.remat is None else (wishes.remat,):
            if bare.stage > 1 and steps.why_whole(remat):
                continue
            found = _sharded(replace(bare, remat=remat), steps, target, wishes, pinned)
            if found is None:
                break
            ways = list(kinds(found, steps, target, wishes))
            all_ = [one for way in ways for one in alike(way, steps, target, wishes)]
            yield from all_
            kept += ways[-1:]  # where the sequence is cut, fewer microbatches do
            if any(c.fits for c in all_) or (all_ and not any(c.keeps_too_much for c in all_)):
                break
        if bare.stage > 1 or "micro" in wishes.fixed:
            continue
        for place in dict.fromkeys((0, len(kept) - 1)) if kept else ():
            yield from _in_parts(kept[place], steps, target, wishes, pinned)


def _in_parts(
    whole: Candidate,
    steps: Steps,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Iterator[Candidate]:
    """The same in the fewest microbatches that fit, if it does not fit in one."""
    memory, layout = whole.memory, whole.sharded.layout
    if not whole.keeps_too_much or steps.whole or steps.is_fixed:
        return
    least = memory.activations / (memory.available - (memory.total - memory.activations))
    rows = steps.plain.rows // layout.data
    enough = (parts for parts in range(2, rows + 1) if not rows % parts and parts >= least)
    for micro in itertools.islice(enough, _TRIES):
        bare = replace(layout, split=frozenset(), micro=micro)
        try:
            found = _sharded(bare, steps, target, wishes, pinned)
        except PlanError as error:
            steps.whole = str(error)
            return
        if found is None:
            return
        yield found
        if found.fits:
            return


def _remats(steps: Steps, target: Target) -> tuple[Remat, ...]:
    """XLA for CPUs takes the barriers out, and finds what is made again where it was."""
    return steps.remats[:1] if target.topology.chip.platform == "cpu" else steps.remats


def _sharded(
    bare: Layout,
    steps: Steps,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Candidate | None:
    """With what the model's axis cuts; None where there is nothing to cut."""
    step, topology = steps.of(bare), target.topology
    budget = wishes.budget or topology.chip.memory_bytes
    layout = bare
    if bare.model > 1:
        lie, given = extents(bare.axes, topology), (1 - MARGIN) * budget
        split = split_for(
            step.model, step.program, bare, step.states, target, lie, given, step.large
        )
        if not split:
            return None
        layout = replace(bare, split=split)
    sharded = ShardedModel(step.model, layout, step.states, _over_all(pinned or {}, layout))
    return priced(sharded, steps, target, budget)


def _over_all(pinned: Mapping[str, Spec], layout: Layout) -> dict[str, Spec]:
    """What users have cut over the strategy's one axis, as the mesh of a layout has it."""
    every = tuple(axis for axis, size in layout.axes.items() if size > 1) or (DATA,)
    return {
        path: tuple(every if DATA in axes else axes for axes in spec)
        for path, spec in pinned.items()
    }


def _taken(given: Plan, steps: Steps, target: Target, wishes: Planning) -> Plan:
    """A plan that was given, priced anew."""
    sharded = sharded_as(given, steps, target.topology.devices)
    budget = wishes.budget or target.topology.chip.memory_bytes
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
    """The next ones; where there are stages, the best of those with and without is among them.

    Few of those that do not fit are, where enough others do.
    """
    large = [c for c in others if not c.fits][_LARGE_SHOWN:]
    fitting = [c for c in others if c not in large]
    first = (fitting if len(fitting) >= SHOWN else others)[:SHOWN]
    of_other_kind = (c for c in others if c.fits and c.is_pipeline != best.is_pipeline)
    found = next(of_other_kind, None)
    return first if found is None or found in first else [*first[:-1], found]


def _why(best: Candidate, other: Candidate) -> RunnerUp:
    if not other.fits:
        over = other.memory.total - other.memory.available
        why = f"{gib(over)} too much on each device"
    elif other.copied is not None and best.copied is None:
        why = f"every device would have all of {other.copied}, over {LARGE:,} entries"
    elif other.strained and not best.strained:
        why = f"its tensor parallelism crosses {other.strained}, where it can be had without"
    elif other.is_pipeline and other.time.step > best.time.step:
        why = f"{_slower(best, other)}: its stages wait {other.time.bubble:.0%} of a step"
    elif other.is_pipeline and not best.is_pipeline:
        stages = other.sharded.layout.stage
        why = (
            "its stages wait in any case, and what the best one sends may be hidden by "
            f"operations; --fix stage={stages} has it"
        )
    elif other.time.step > best.time.step:
        why = _slower(best, other)
    else:
        why = "it cuts more, and is not known to be faster"
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
    """By how much, and what would make it fit."""
    least = min(candidates, key=lambda c: c.memory.total)
    memory = least.memory
    budget = memory.available
    over = memory.total - budget
    room = max(1, budget - memory.margin)
    more = -(-memory.needed // room)
    head = (
        f"the step fits nowhere: at its smallest ({least.title}) it takes "
        f"{gib(memory.total)} on each device, {gib(over)} ({over:,} bytes) more than the "
        f"{gib(budget)} there are. It would fit with"
    )
    lines = [head, f"  - about {more} times as many devices"]
    layout, rows = least.sharded.layout, least.sharded.model.rows
    part = max(0.0, 1 - over / memory.activations) if memory.activations else 0.0
    parts = layout.data * layout.micro
    if rows * part >= parts:
        lines.append(f"  - a global batch of {int(rows * part) // parts * parts}")
    else:
        lines.append(f"  - devices of {gib(memory.total)} or more")
    lines.append("  - parameters and state in bfloat16, which takes half as much of them")
    return "\n".join(lines)
