"""Layouts that cut the same and differ in how a step goes through them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.planner.search.candidates import Candidate, priced
from nbdist.planner.search.mesh_sizes import more_rounds, staged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.cost.time import Target
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import Planning


def kinds(found: Candidate, steps: Steps, target: Target, wishes: Planning) -> Iterator[Candidate]:
    """It, and the same with what products pass on cut along the sequence, where that can be."""
    asked, layout = wishes.fixed.get("sequence"), found.sharded.layout
    if asked != 1:
        yield found
    along = found.sharded.with_layout(replace(layout, sequence=True))
    if asked != 0 and along.sequence:
        yield priced(along, steps, target, found.memory.available)


def alike(found: Candidate, steps: Steps, target: Target, wishes: Planning) -> Iterator[Candidate]:
    """It, and what cuts the same: of a pipeline in more microbatches.

    Where not all of them can be kept, they go back as soon as they have come through.
    """
    layout, wanted = found.sharded.layout, wishes.schedule
    first = list(_in_turns(found, steps, target, wishes)) if wanted != "1f1b" else []
    yield from first
    too_much = wanted == "1f1b" or (wanted is None and any(c.keeps_too_much for c in first))
    if layout.stage > 1 and too_much and not steps.why_waiting(layout.remat):
        sharded = found.sharded.with_layout(replace(layout, schedule="1f1b"))
        other = priced(sharded, steps, target, found.memory.available)
        yield from _in_turns(other, steps, target, wishes)


def _in_turns(
    found: Candidate, steps: Steps, target: Target, wishes: Planning
) -> Iterator[Candidate]:
    """It, and the same in more microbatches; the best in more rounds, until that is no faster."""
    in_more = list(_in_more(found, steps, target, wishes))
    yield from in_more
    fitting = [c for c in in_more if c.fits]
    if not fitting:
        return
    best = min(fitting, key=lambda c: c.time.step)
    for rounds in more_rounds(best.sharded.layout, steps, wishes):
        sharded = best.sharded.with_layout(replace(best.sharded.layout, rounds=rounds))
        now = priced(sharded, steps, target, found.memory.available)
        yield now
        if now.fits and now.time.step >= best.time.step:
            return
        best = now if now.fits else best


def _in_more(
    found: Candidate, steps: Steps, target: Target, wishes: Planning
) -> Iterator[Candidate]:
    """It, and the same in more microbatches, until that is no faster."""
    yield found
    last = found
    for layout in staged(found.sharded.layout, steps, wishes):
        if layout.micro == last.sharded.layout.micro and last.fits:
            continue
        sharded = found.sharded.with_layout(layout)
        now = priced(sharded, steps, target, found.memory.available)
        yield now
        if last.fits and now.time.step >= last.time.step:
            return
        last = now
