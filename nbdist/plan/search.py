"""The best layout of a step on a target, and why not the others."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import PlanError
from nbdist.plan.assign import split_for
from nbdist.plan.cost import time_of
from nbdist.plan.given import laid_as
from nbdist.plan.layout import Laid, Layout
from nbdist.plan.memory import MARGIN, memory_of
from nbdist.plan.refusal import gib, none_as_asked
from nbdist.plan.steps import LARGE, REMATS, Steps
from nbdist.plan.topology import describe, extents
from nbdist.plan.warn import warnings_of
from nbdist.records import DATA, MODEL, Plan, PlannedTensor, RunnerUp, title_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from nbdist.plan.cost import Target
    from nbdist.plan.model import Model, Op, Tensor
    from nbdist.records import (
        Extent,
        PlannedMemory,
        PlannedTime,
        Planning,
        Remat,
        Spec,
        Topology,
        Zero,
    )

SHOWN = 5
"""Plans that were not chosen and are told of."""

_TRIES = 3
"""Numbers of microbatches that are tried, from what would be enough if nothing else took more."""

LEVELS: tuple[Zero, ...] = (0, 1, 3)


@dataclass(frozen=True)
class _Candidate:
    """A layout and what it comes to.

    Attributes:
        strained: links between hosts that its tensor parallelism crosses; empty if it crosses none.
        copied: the path of a large table that every device has all of, if there is one.
    """

    laid: Laid
    memory: PlannedMemory
    time: PlannedTime
    strained: str
    copied: str | None

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory.available

    @property
    def title(self) -> str:
        layout = self.laid.layout
        return title_of(layout.axes, layout.zero, layout.micro, layout.remat)

    @property
    def keeps_too_much(self) -> bool:
        """Whether it would fit with fewer activations."""
        return not self.fits and self.memory.total - self.memory.activations < self.memory.available

    @property
    def rank(self) -> tuple[bool, float, int, int, int, int]:
        """Products are cut within hosts if at all; faster is better, then what changes less."""
        step = float(f"{self.time.step:.3g}")
        return bool(self.strained), step, *self.changes

    @property
    def changes(self) -> tuple[int, int, int, int]:
        """What it makes of a step on one device."""
        layout = self.laid.layout
        return layout.model, REMATS.index(layout.remat), layout.micro, layout.zero


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
    model = steps.plain
    if wishes.given is not None:
        return [_taken(wishes.given, steps, target, wishes)]
    if target.cautious and not wishes.only:
        bare = _bare(model, target, wishes)
        simplest = next(_laid_out(bare, steps, target, wishes, pinned), None)
        if simplest is not None and simplest.fits and simplest.copied is None:
            return [_plan(simplest, [], target)]  # as would come out, without weighing all others
    candidates = sorted(_candidates(steps, target, wishes, pinned), key=lambda c: c.rank)
    if not candidates:
        raise PlanError(none_as_asked(model, target, wishes))
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        raise PlanError("\n".join((_too_large(candidates), *steps.notes)))
    if not wishes.fixed.keys() - {"micro"} and target.topology.devices > 1:
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
    return [msgspec.structs.replace(p, notes=(*p.notes, *steps.notes)) for p in made]


def layouts(model: Model, target: Target, wishes: Planning) -> tuple[Layout, ...]:
    """Those among which the search chooses, whether they fit or not."""
    found = _candidates(Steps(model), target, wishes, None)
    return tuple(candidate.laid.layout for candidate in found)


def _candidates(
    steps: Steps, target: Target, wishes: Planning, pinned: Mapping[str, Spec] | None
) -> Iterator[_Candidate]:
    """A batch that cannot be cut is computed by all, where there is no other way."""
    bare = _bare(steps.plain, target, wishes)
    found = list(_laid_out(bare, steps, target, wishes, pinned))
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
) -> Iterator[_Candidate]:
    """What keeps too much comes again, in ways that keep less."""
    for bare in bares:
        kept: list[_Candidate] = []
        for remat in _remats(steps, target) if wishes.remat is None else (wishes.remat,):
            found = _laid(replace(bare, remat=remat), steps, target, wishes, pinned)
            if found is not None:
                yield found
                kept.append(found)
            if found is None or not found.keeps_too_much:
                break
        if kept and kept[0].keeps_too_much and "micro" not in wishes.fixed:
            for whole in dict.fromkeys((0, len(kept) - 1)):
                yield from _in_parts(kept[whole], steps, target, wishes, pinned)


def _in_parts(
    whole: _Candidate,
    steps: Steps,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Iterator[_Candidate]:
    """The same in the fewest microbatches that fit, if it does not fit in one."""
    memory, layout = whole.memory, whole.laid.layout
    if not whole.keeps_too_much or steps.whole or steps.is_fixed:
        return
    least = memory.activations / (memory.available - (memory.total - memory.activations))
    rows = steps.plain.rows // layout.data
    enough = (parts for parts in range(2, rows + 1) if not rows % parts and parts >= least)
    for micro in itertools.islice(enough, _TRIES):
        bare = replace(layout, split=frozenset(), micro=micro)
        try:
            found = _laid(bare, steps, target, wishes, pinned)
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


def _laid(
    bare: Layout,
    steps: Steps,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None,
) -> _Candidate | None:
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
    laid = Laid(step.model, layout, step.states, pinned)
    return _priced(laid, steps, target, budget)


def _taken(given: Plan, steps: Steps, target: Target, wishes: Planning) -> Plan:
    """A plan that was given, priced anew."""
    bare = Layout(1, 1, remat=given.remat, micro=max(1, given.micro))
    laid = laid_as(given, steps.of(bare).model, target.topology.devices)
    budget = wishes.budget or target.topology.chip.memory_bytes
    found = _priced(laid, steps, target, budget)
    if not found.fits:
        raise PlanError(_too_large([found]))
    return _plan(found, [], target)


def _priced(laid: Laid, steps: Steps, target: Target, budget: int) -> _Candidate:
    step = steps.of(laid.layout)
    lie = extents(laid.layout.axes, target.topology)
    return _Candidate(
        laid,
        memory_of(laid, step.program, budget),
        time_of(laid, step.program, target, lie, steps.plain.ops),
        _strained(laid, step.program, target.topology, lie[MODEL]),
        _copied(laid, step.large),
    )


def _strained(laid: Laid, program: tuple[Op, ...], topology: Topology, lie: Extent) -> str:
    """Links between hosts over which parts of products are summed; tables are no products.

    What each layer has to wait for belongs on the links within hosts (arXiv:2104.04473, section 3).
    """
    crossed = [
        level.name
        for level, size in zip(topology.levels, lie, strict=True)
        if size > 1 and level.alone_bytes_per_s is not None
    ]
    return crossed[-1] if crossed and laid.cuts_products(program) else ""


def _copied(laid: Laid, large: list[Tensor]) -> str | None:
    """The first large table that every device has all of."""
    whole = (t.path for t in large if laid.device_bytes(t) == t.value.nbytes)
    return next(whole, None)


def _bare(model: Model, target: Target, wishes: Planning) -> Iterator[Layout]:
    """Sizes of axes that are possible, with nothing cut over the model's yet."""
    devices, micro = target.topology.devices, wishes.fixed.get("micro", 1)
    largest = max((group.divisor for group in model.groups), default=1)
    for size in range(1, min(devices, largest) + 1):
        data = devices // size
        if devices % size or model.rows % (data * micro) or (model.apart and 1 < size < devices):
            continue
        for zero in LEVELS if data > 1 else LEVELS[:1]:
            own = {DATA: data, MODEL: size, "zero": zero, "micro": micro}
            if own | wishes.fixed == own:
                yield Layout(data, size, zero=zero, micro=micro)


def _plan(best: _Candidate, others: list[_Candidate], target: Target) -> Plan:
    laid, model = best.laid, best.laid.model
    tensors = tuple(
        PlannedTensor(
            path=tensor.path,
            role=laid.role(tensor),
            shape=tensor.value.sizes,
            dtype=tensor.value.dtype,
            spec=laid.spec(tensor),
            device_bytes=laid.device_bytes(tensor),
        )
        for tensor in model.tensors
    )
    return Plan(
        axes=laid.layout.axes,
        zero=laid.layout.zero,
        remat=laid.layout.remat,
        micro=laid.layout.micro,
        rows=model.rows,
        on=describe(target.topology),
        tensors=tensors,
        memory=best.memory,
        time=best.time,
        warnings=warnings_of(laid, best.time, target.topology),
        runners_up=tuple(_why(best, other) for other in others[:SHOWN]),
        notes=(*model.notes, *target.topology.assumed),
    )


def _why(best: _Candidate, other: _Candidate) -> RunnerUp:
    if not other.fits:
        over = other.memory.total - other.memory.available
        why = f"{gib(over)} too much on each device"
    elif other.copied is not None and best.copied is None:
        why = f"every device would have all of {other.copied}, over {LARGE:,} entries"
    elif other.strained and not best.strained:
        why = f"its tensor parallelism crosses {other.strained}, where it can be had without"
    elif other.time.step > 2 * best.time.step:
        why = f"{other.time.step / best.time.step:.2g} times as long"
    elif other.time.step > best.time.step:
        why = f"{other.time.step / best.time.step - 1:.0%} slower"
    else:
        why = "it cuts more, and is not known to be faster"
    return RunnerUp(
        title=other.title,
        step_s=other.time.step,
        device_bytes=other.memory.total,
        why=why,
    )


def _too_large(candidates: list[_Candidate]) -> str:
    """By how much, and what would make it fit."""
    least = min(candidates, key=lambda c: c.memory.total)
    memory = least.memory
    budget = memory.available
    over = memory.total - budget
    room = max(1, budget - memory.margin)
    more = -(-(memory.total - memory.margin) // room)
    head = (
        f"the step fits nowhere: at its smallest ({least.title}) it takes "
        f"{gib(memory.total)} on each device, {gib(over)} ({over:,} bytes) more than the "
        f"{gib(budget)} there are. It would fit with"
    )
    lines = [head, f"  - about {more} times as many devices"]
    if memory.activations:
        part = max(0.0, 1 - over / memory.activations)
        rows = int(least.laid.model.rows * part)
        if rows:
            lines.append(f"  - a global batch of {rows}")
    lines.append("  - parameters and state in bfloat16, which takes half as much of them")
    return "\n".join(lines)
