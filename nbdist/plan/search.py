"""The best layout of a step on a target, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.plan.assign import split_for
from nbdist.plan.cost import time_of
from nbdist.plan.fusion import fused
from nbdist.plan.given import laid_as
from nbdist.plan.layout import Laid, Layout, states_of
from nbdist.plan.memory import MARGIN, memory_of
from nbdist.plan.topology import describe, extents
from nbdist.plan.warn import warnings_of
from nbdist.records import MODEL, Plan, PlannedTensor, RunnerUp, title_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from nbdist.plan.cost import Target
    from nbdist.plan.model import Model, Op, Tensor
    from nbdist.records import (
        Extent,
        PlannedMemory,
        PlannedTime,
        Planning,
        Spec,
        Topology,
        Zero,
    )

SHOWN = 5
"""Plans that were not chosen and are told of."""

LEVELS: tuple[Zero, ...] = (0, 1, 3)

LARGE = 10**9
"""Entries of a table from which on not every device has all of it, unless that is asked for: few of
its rows are read in a step, and it mostly grows."""


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
        return title_of(self.laid.layout.axes, self.laid.layout.zero)

    @property
    def rank(self) -> tuple[bool, float, int, int]:
        """Products are cut within hosts if at all; faster is better, then what cuts less."""
        layout = self.laid.layout
        return bool(self.strained), float(f"{self.time.step:.3g}"), layout.model, layout.zero


def plan(
    model: Model,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None = None,
    refused: Collection[str] = (),
) -> Plan:
    """The fastest layout that fits.

    Args:
        model: the step.
        target: the hardware.
        wishes: what is asked of it.
        pinned: arrays that stay as their user has cut them, by path.
        refused: titles of those that are not wanted.

    Raises:
        PlanError: none fits, or none is as was asked for.
    """
    if wishes.given is not None:
        return _taken(wishes.given, model, target, wishes)
    if target.cautious and not wishes.only:
        simplest = next(
            _laid_out(_bare(model, target, wishes), model, target, wishes, pinned), None
        )
        if simplest is not None and simplest.fits and simplest.copied is None:
            return _plan(simplest, [], target)  # as would come out, without weighing all others
    candidates = sorted(_candidates(model, target, wishes, pinned), key=lambda c: c.rank)
    if not candidates:
        raise PlanError(_none(model, target, wishes))
    fitting = [c for c in candidates if c.fits and c.title not in refused]
    if not fitting:
        raise PlanError(_too_large(candidates))
    if not wishes.fixed and target.topology.devices > 1:
        whole, fitting = fitting[0], [c for c in fitting if c.copied is None]
        if not fitting:
            raise PlanError(
                f"{whole.copied} has over {LARGE:,} entries, can be cut in no way that fits, and "
                "would be whole on every device: ask for that with --fix tensor=1"
            )
    if target.cautious:
        fitting.sort(key=lambda c: (c.laid.layout.model, c.laid.layout.zero))
    best = fitting[0]
    others = [c for c in candidates if c is not best and c.title not in refused]
    return _plan(best, others, target)


def layouts(model: Model, target: Target, wishes: Planning) -> tuple[Layout, ...]:
    """Those among which the search chooses, whether they fit or not."""
    return tuple(candidate.laid.layout for candidate in _candidates(model, target, wishes, None))


def _candidates(
    model: Model, target: Target, wishes: Planning, pinned: Mapping[str, Spec] | None
) -> Iterator[_Candidate]:
    """A batch that cannot be cut is computed by all, where there is no other way."""
    found = list(_laid_out(_bare(model, target, wishes), model, target, wishes, pinned))
    whole = (
        Layout(target.topology.devices, 1, zero=zero)
        for zero in LEVELS
        if not found and not wishes.fixed
    )
    yield from found or _laid_out(whole, model, target, wishes, pinned)


def _laid_out(
    bares: Iterable[Layout],
    model: Model,
    target: Target,
    wishes: Planning,
    pinned: Mapping[str, Spec] | None,
) -> Iterator[_Candidate]:
    program, states = fused(model.ops, model.results), states_of(model)
    large = _large_tables(model, program)
    topology = target.topology
    budget = wishes.budget or topology.chip.memory_bytes
    given = (1 - MARGIN) * budget
    for bare in bares:
        lie = extents(bare.axes, topology)
        split: frozenset[int] | None = frozenset()
        if bare.model > 1:
            split = split_for(model, program, bare, states, target, lie, given, large)
        if not split and bare.model > 1:
            continue
        layout = Layout(bare.data, bare.model, split or frozenset(), bare.zero)
        laid = Laid(model, layout, states, pinned)
        yield _priced(laid, program, target, budget, large)


def _taken(given: Plan, model: Model, target: Target, wishes: Planning) -> Plan:
    """A plan that was given, priced anew."""
    laid = laid_as(given, model, target.topology.devices)
    budget = wishes.budget or target.topology.chip.memory_bytes
    program = fused(model.ops, model.results)
    found = _priced(laid, program, target, budget, _large_tables(model, program))
    if not found.fits:
        raise PlanError(_too_large([found]))
    return _plan(found, [], target)


def _priced(
    laid: Laid, program: tuple[Op, ...], target: Target, budget: int, large: list[Tensor]
) -> _Candidate:
    lie = extents(laid.layout.axes, target.topology)
    return _Candidate(
        laid,
        memory_of(laid, program, budget),
        time_of(laid, program, target, lie),
        _strained(laid, program, target.topology, lie[MODEL]),
        _copied(laid, large),
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


def _large_tables(model: Model, program: tuple[Op, ...]) -> list[Tensor]:
    """Of what rows are looked up in."""
    tables = {op.ins[0].number for op in program if op.kind == "lookup"}
    return [t for t in model.tensors if t.value.number in tables and t.value.size > LARGE]


def _copied(laid: Laid, large: list[Tensor]) -> str | None:
    """The first large table that every device has all of."""
    whole = (t.path for t in large if laid.device_bytes(t) == t.value.nbytes)
    return next(whole, None)


def _bare(model: Model, target: Target, wishes: Planning) -> Iterator[Layout]:
    """Sizes of axes that are possible, with nothing cut over the model's yet."""
    devices = target.topology.devices
    largest = max((group.divisor for group in model.groups), default=1)
    for size in range(1, min(devices, largest) + 1):
        data = devices // size
        if devices % size or model.rows % data or (model.apart and 1 < size < devices):
            continue
        for zero in LEVELS if data > 1 else LEVELS[:1]:
            asked = {"data": data, "model": size, "zero": zero} | wishes.fixed
            if asked == {"data": data, "model": size, "zero": zero}:
                yield Layout(data, size, zero=zero)


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


def _none(model: Model, target: Target, wishes: Planning) -> str:
    asked = ", ".join(f"{name}={size}" for name, size in wishes.fixed.items())
    devices = target.topology.devices
    apart = f"; the batch and the model cannot both be cut: {model.apart}" if model.apart else ""
    return (
        f"no layout over {devices} devices is as asked for ({asked}): the axes' sizes multiply to "
        f"{devices}, data divides the batch of {model.rows}, and the model has dimensions that can "
        f"be cut so often{apart}"
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
        lines.append(
            f"  - a global batch of {rows}"
            if rows
            else "  - activations that are made again: jax.checkpoint around each layer"
        )
    lines.append("  - parameters and state in bfloat16, which takes half as much of them")
    return "\n".join(lines)


def gib(nbytes: float) -> str:
    """`46.3 GiB`; of less than one, `12.5 MiB`."""
    unit, scale = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{nbytes / scale:,.3g} {unit}"
