"""Texts and figures of a plan. The figures add up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.records import DATA, MODEL, REPLICATE, STAGE
from nbdist.views import formatting
from nbdist.views.placement import text as words
from nbdist.views.placement.tree import Leaf
from nbdist.views.plan.tensors import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import (
        Layout,
        PlacedArray,
        Placement,
        Plan,
        PlannedTensor,
        RunnerUp,
        Traffic,
    )
    from nbdist.views.placement.tree import Row

FREE = "free"
COMPUTE = "compute"
TENSORS = ("tensor", "shape", "type", "spec", "per device")
RUNNERS_UP = ("alternative", "step", "per device", "drawback")

_ZERO = {
    1: "optimizer state is sharded too (ZeRO-1)",
    3: "optimizer state and parameters are sharded too, parameters are gathered for use (ZeRO-3)",
}
_REMAT = {
    "selective": "the backward pass recomputes all but products with parameters",
    "full": "the backward pass recomputes all but the inputs of each group of layers",
}
_WAY = {
    "": "are computed one after another, and their gradients summed",
    "gpipe": "go {}through the stages: all forward, then all backward (GPipe)",
    "1f1b": "go {}through the stages: each backward right after its forward pass (1F1B)",
}
_GPUS, _TPUS = (0.8, 1.09), (0.82, 1.16)
PUBLISHED = {
    **dict.fromkeys(("A100", "H100"), _GPUS),
    **dict.fromkeys(("TPU v4", "TPU v5e", "TPU v5p"), _TPUS),
}
"""Published over planned times of steps on these chips, by the first part of the chip's name.

From `python -m benchmarks plan_time`, tables that are held out: 10th and 90th percentile of 132
rows on GPUs, all 11 rows on TPUs."""

_FAR, _MUCH_FAR = ("network", "DCN"), 0.2
"""Names of links between hosts, and the share of a step in them from which no range is known."""

_SEQUENCES = 2
"""Dimensions of a batch of tokens."""

_ROUNDING = 1e-6
"""Fraction of a step below which differences in seconds are ignored."""


@dataclass(frozen=True)
class Part:
    """Part of a total.

    Attributes:
        amount: bytes or seconds.
        detail: additional text.
    """

    name: str
    amount: float
    detail: str = ""


def headline(plan: Plan) -> str:
    """Return one line with the main figures."""
    hardware = plan.on.partition(",")[0]
    return (
        f"{plan.title} on {hardware}: {step_time(plan)} a step, "
        f"MFU {formatting.share(plan.time.mfu)}, {memory(plan)} on each device"
    )


def step_time(plan: Plan) -> str:
    """Format the expected time of a step: `8.1 s to 11 s`, or `about 10 s` without a known range.

    The range is that of published steps on the same chips, if links between hosts take a small part
    of the step.
    """
    step = plan.time.step
    chip = plan.on.partition(" x ")[2]
    band = next((band for name, band in PUBLISHED.items() if chip.startswith(name)), None)
    far_s = sum(traffic.seconds for traffic in plan.time.traffic if traffic.level in _FAR)
    if band is None or not step or far_s > _MUCH_FAR * step:
        return f"about {formatting.duration(step)}"
    least, most = (formatting.duration(_rounded(share * step)) for share in band)
    return f"{least} to {most}"


def memory(plan: Plan) -> str:
    """Format used and available memory: `46.3 of 79.1 GiB`."""
    taken = formatting.size(plan.memory.total)
    available = formatting.size(plan.memory.available)
    number, _, unit = taken.partition(" ")
    return f"{number if available.endswith(f' {unit}') else taken} of {available}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the remarks at the start of a planned step. None if every device has all arrays."""
    if plan.zero or plan.remat or plan.micro > 1 or plan.devices > plan.axes[DATA]:
        yield f"layout {plan.title}: {memory(plan)} on each device"
        yield from plan.warnings


def facts(plan: Plan) -> Iterator[str]:
    yield plan.on
    step, tokens = plan.time.step, _tokens(plan)
    size = f"{formatting.count(plan.rows, 'sample')} a step"
    if not step:
        yield size
        return
    pace = [f"{_figure(plan.rows / step)} samples"]
    pace += [f"{_figure(tokens / step)} tokens"] * bool(tokens)
    rate = f", {_figure(plan.time.flops / step / 1e12)} TFLOP/s on each device"
    yield f"{size}: about {' or '.join(pace)} a second{rate * bool(plan.time.flops)}"


def _rounded(number: float) -> float:
    """Round a number to two digits, because estimates are not more exact."""
    return float(f"{number:.2g}")


def _figure(number: float) -> str:
    return f"{_rounded(number):,.15g}"


def _tokens(plan: Plan) -> int:
    """Return the tokens of a global batch: its whole numbers with a sequence. 0 without any."""
    sizes = [
        math.prod(tensor.shape)
        for tensor in plan.tensors
        if tensor.role == "batch" and "int" in tensor.dtype and len(tensor.shape) == _SEQUENCES
    ]
    return max(sizes, default=0)


def warnings(plan: Plan) -> Iterator[str]:
    free = plan.memory.free
    if free < 0:
        yield f"it does not fit: {formatting.size(-free)} too much on each device"
    yield from plan.warnings


def verified(plan: Plan) -> Iterator[str]:
    """Yield the results of the hardware's compiler, if it was run."""
    found = plan.verified
    if found is None:
        return
    expected = plan.memory.needed
    yield (
        f"compiled by XLA for this hardware in {formatting.duration(found.seconds)}: "
        f"{formatting.size(found.total)} on each device, and "
        f"{formatting.size(expected)} were expected"
    )
    yield (
        f"arguments {formatting.size(found.arguments)} "
        f"({formatting.size(plan.memory.arguments)} expected), "
        f"temporaries {formatting.size(found.temporaries)}"
    )
    calls = [
        f"{one.count:,} {one.kind} ({formatting.size(one.bytes)})" for one in found.collectives
    ]
    yield f"collectives, each loop counted once: {', '.join(calls) or 'none'}"


def degrees(plan: Plan) -> list[tuple[str, str, str]]:
    """Return name, size and meaning of each sharded axis, of microbatches and of remat."""
    describe = {REPLICATE: _replicate, DATA: _data, MODEL: _model, STAGE: _stages}
    found = [
        (axis, f"{size:,}", describe[axis](plan)) for axis, size in plan.axes.items() if size > 1
    ]
    found = found or [("none", "1", "one device contains all arrays")]
    if plan.micro > 1:
        rows = plan.rows / plan.replicas / plan.micro
        noun = "sample" if rows == 1 else "samples"
        way = _WAY[plan.schedule if STAGE in plan.axes else ""]
        around = f"{plan.rounds} times " * (plan.rounds > 1)
        what = f"parts of {rows:,.4g} {noun} {way.format(around)}"
        found.append(("microbatches", f"{plan.micro:,}", what))
    if plan.remat:
        found.append(("remat", plan.remat, _REMAT[plan.remat]))
    return found


def _replicate(plan: Plan) -> str:
    return f"{plan.axes[REPLICATE]:,} copies of the arrays that ZeRO shards (hybrid sharding)"


def _data(plan: Plan) -> str:
    size = plan.replicas
    whom = "device" if plan.devices == size else f"group of {plan.devices // size:,} devices"
    text = f"{plan.rows / size:,.4g} of {formatting.count(plan.rows, 'sample')} on each {whom}"
    return f"{text}; {_ZERO[plan.zero]}" if plan.zero else text


def _model(plan: Plan) -> str:
    wholes = [
        (math.prod(plan.axes[a] for axes in t.spec for a in axes) * t.device_bytes, t.spec)
        for t in plan.tensors
        if t.role == "parameter"
    ]
    sharded = [nbytes for nbytes, spec in wholes if any(MODEL in axes for axes in spec)]
    share = sum(sharded) / (sum(nbytes for nbytes, _ in wholes) or 1)
    text = (
        f"shards {len(sharded):,} of {formatting.count(len(wholes), 'parameter')}, "
        f"{formatting.share(share)} of their bytes, and their computations (tensor parallel)"
    )
    along = "activations between them are sharded along the sequence (sequence parallel)"
    return f"{text}; {along}" if plan.sequence else text


def _stages(plan: Plan) -> str:
    sizes = {n for t in plan.tensors if t.role != "batch" for n in _layers(t, plan.axes[STAGE])}
    counts = [f"{size:,}" for size in sorted(sizes)]
    blocks = f", in {plan.rounds} blocks" * (plan.rounds > 1)
    return (
        f"{' or '.join(counts) or 'some'} layers of a scan per stage{blocks} (pipeline "
        f"parallel): stages wait {formatting.share(plan.time.bubble)} of a step for microbatches"
    )


def _layers(tensor: PlannedTensor, stages: int) -> tuple[int, ...]:
    """Return the numbers of layers that stages have of a tensor.

    Stages that do not divide the first dimension, the layers, store the tensor by another one.
    """
    dim = next((dim for dim, axes in enumerate(tensor.spec) if STAGE in axes), None)
    if dim is None:
        return ()
    layers = tensor.shape[0]
    if dim > 0 and layers % stages:
        return layers // stages, layers // stages + 1
    return (tensor.shape[dim] // stages,)


def memory_parts(plan: Plan) -> list[Part]:
    """Return the bytes of each device. With the free part, they add up to its memory."""
    sizes = dict.fromkeys(ROLES.values(), 0)
    for tensor in plan.tensors:
        sizes[ROLES[tensor.role]] += tensor.device_bytes
    taken = plan.memory
    sizes["gradients"] = taken.gradients
    sizes["activations"] = taken.activations
    sizes["margin"] = taken.margin
    sizes[FREE] = max(0, taken.free)
    return [Part(name, nbytes) for name, nbytes in sizes.items() if nbytes]


def time_parts(plan: Plan) -> list[Part]:
    """Return the seconds of a step: operations, and the exposed part of collectives by level."""
    by_level: dict[str, list[Traffic]] = {}
    for traffic in plan.time.traffic:
        by_level.setdefault(traffic.level, []).append(traffic)
    links = (_links(level, traffic, plan) for level, traffic in by_level.items())
    return [Part(COMPUTE, plan.time.compute), *links]


def _links(level: str, traffic: Sequence[Traffic], plan: Plan) -> Part:
    hidden = _known(sum(one.hidden for one in traffic), plan)
    exposed = _known(sum(one.seconds - one.hidden for one in traffic), plan)
    texts = [f"{formatting.size(sum(one.bytes for one in traffic))} sent"]
    texts += [f"{formatting.duration(hidden)} hidden"] * bool(hidden)
    return Part(f"{level} links", exposed, ", ".join(texts))


def _known(seconds: float, plan: Plan) -> float:
    return seconds if seconds > _ROUNDING * plan.time.step else 0.0


def notes(plan: Plan) -> Iterator[str]:
    """Yield the texts below the bars."""
    yield EXACT
    if any(_known(one.hidden, plan) for one in plan.time.traffic):
        yield HIDDEN


def time_title(plan: Plan) -> str:
    return f"time of a step: {step_time(plan)}"


def memory_title(plan: Plan) -> str:
    return f"memory per device: {memory(plan)}"


EXACT = "parameters, state and batch are exact; gradients, activations and times are estimates"
HIDDEN = "hidden: collectives during operations, in addition to the time in the bar"


def runners_up(plan: Plan) -> list[list[str]]:
    return [
        [other.title, formatting.duration(other.step_s), _each(other), other.why]
        for other in plan.runners_up
    ]


def _each(other: RunnerUp) -> str:
    compiled = f", compiled {formatting.size(other.compiled_bytes)}" if other.compiled_bytes else ""
    return f"{formatting.size(other.device_bytes)}{compiled}"


def label(array: PlacedArray) -> str:
    return words.label(array.name, ())


def cells(row: Row, placement: Placement) -> list[str]:
    """Return the cells of a tree row, under the header `TENSORS`."""
    entry, cost = row.entry, row.entry.cost if row.entry else row.hidden
    each = formatting.size(cost.stored // len(placement.devices))
    if entry is None:
        return [f"… and {formatting.count(cost.arrays, 'more array')}", "", "", "", each]
    name = words.label(entry.label, ())
    if isinstance(entry, Leaf):
        array = entry.array
        name += f" x {cost.arrays:,}" if cost.arrays > 1 else ""
        return [name, words.shape(array), array.dtype, placement.layouts[array.layout].spec, each]
    return [name, formatting.count(cost.arrays, "array"), "", "", each]


def blocks(layout: Layout) -> str:
    """Format blocks: `16 blocks, each on 64 devices`."""
    held = f"each on {formatting.count(layout.copies, 'device')}"
    return f"{formatting.count(layout.pieces, 'block')}, {held}"


def holders(placement: Placement, layout: Layout, count: int) -> list[str]:
    """Return the devices of each of the first blocks as text, at most `count`."""
    found: list[list[int]] = [[] for _ in range(min(count, layout.pieces))]
    for device, block in zip(layout.devices, layout.blocks, strict=True):
        if block < len(found):
            found[block].append(device)
    return [words.devices(placement, held) for held in found]
