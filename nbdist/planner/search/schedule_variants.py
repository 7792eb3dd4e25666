"""Variants of a layout with the same shardings and another schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.planner.search.candidates import Candidate, priced
from nbdist.planner.search.mesh_sizes import more_rounds, staged
from nbdist.records import STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.cost.time import Target
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import Planning

_LEAST_SHARE = 0.02
"""Share of a step in transfers between stages from which on other places of the loss are tried."""


def sequence_variants(
    found: Candidate, steps: Steps, target: Target, request: Planning
) -> Iterator[Candidate]:
    """Yield the candidate, and the same with sequence parallelism if that is possible."""
    asked, layout = request.fixed.get("sequence"), found.sharded.layout
    if asked != 1:
        yield found
    along = found.sharded.with_layout(replace(layout, sequence=True))
    if asked != 0 and along.sequence:
        yield priced(along, steps, target, found.memory.available)


def schedule_variants(
    found: Candidate, steps: Steps, target: Target, request: Planning
) -> Iterator[Candidate]:
    """Yield the candidate, and for a pipeline the same with more microbatches.

    If GPipe holds too many microbatches, variants with 1F1B follow.
    """
    layout, wanted = found.sharded.layout, request.schedule
    first = []
    if wanted != "1f1b":
        own = _with_loss_stages(found, steps, target)
        first = list(_with_rounds(own, steps, target, request))
    yield from first
    too_much = wanted == "1f1b" or (wanted is None and any(c.exceeds_by_activations for c in first))
    if layout.stage > 1 and too_much and not steps.why_no_1f1b(layout.remat):
        sharded = found.sharded.with_layout(replace(layout, schedule="1f1b"))
        other = priced(sharded, steps, target, found.memory.available)
        other = _with_loss_stages(other, steps, target)
        yield from _with_rounds(other, steps, target, request)


def _with_loss_stages(found: Candidate, steps: Steps, target: Target) -> Candidate:
    """Return the candidate, or the same with the loss on the last stage if that is faster."""
    layout, time = found.sharded.layout, found.time
    sent_s = sum(traffic.seconds for traffic in time.traffic if traffic.axis == STAGE)
    if sent_s < _LEAST_SHARE * time.step or steps.why_no_1f1b(layout.remat):
        return found
    alone = found.sharded.with_layout(replace(layout, loss_stages="last"))
    other = priced(alone, steps, target, found.memory.available)
    return other if (other.fits, -other.time.step) > (found.fits, -time.step) else found


def _with_rounds(
    found: Candidate, steps: Steps, target: Target, request: Planning
) -> Iterator[Candidate]:
    """Yield variants with more microbatches, and the best of them in more rounds until slower."""
    in_more = list(_with_microbatches(found, steps, target, request))
    yield from in_more
    fitting = [c for c in in_more if c.fits]
    if not fitting:
        return
    best = min(fitting, key=lambda c: c.time.step)
    for rounds in more_rounds(best.sharded.layout, steps, request):
        sharded = best.sharded.with_layout(replace(best.sharded.layout, rounds=rounds))
        now = priced(sharded, steps, target, found.memory.available)
        yield now
        if now.fits and now.time.step >= best.time.step:
            return
        best = now if now.fits else best


def _with_microbatches(
    found: Candidate, steps: Steps, target: Target, request: Planning
) -> Iterator[Candidate]:
    """Yield variants with more microbatches, until they are no longer faster."""
    yield found
    last = found
    for layout in staged(found.sharded.layout, steps, request):
        if layout.micro == last.sharded.layout.micro and last.fits:
            continue
        sharded = found.sharded.with_layout(layout)
        now = priced(sharded, steps, target, found.memory.available)
        yield now
        if last.fits and now.time.step >= last.time.step:
            return
        last = now
