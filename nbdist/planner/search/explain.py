"""Explanations of a search: why there is no plan, and warnings about the plan that was found."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.planner.graph.pipeline_schedule import SEPARATE_ROUNDS
from nbdist.planner.hardware.lookup import host_of
from nbdist.planner.search.mesh_sizes import STAGED, wants_stages
from nbdist.records import BATCH_AXES, DATA, MODEL, REPLICATE, STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.layout import ShardedModel
    from nbdist.planner.graph.model import Model
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import PlannedTime, Planning, Remat, Schedule, Topology

FEW_ROWS = 4
"""Samples on a device below which its units are mostly idle."""

MUCH_TRAFFIC = 0.20
"""Share of a step in collectives from which on a warning is given."""

MUCH_BUBBLE = 0.15
"""Share of a step in the pipeline's bubble from which on a warning is given."""

MUCH_INPUT = 1e9
"""Bytes per second of batches on a host from which on input may limit a step. It is the best rate
at which one process reads and copies. Assumed."""

NO_SEQUENCE = (
    "no product whose sum the model axis shards has another dimension that "
    "this axis could shard, beside rows and dimensions of parameters"
)
NO_TENSOR = "sequence parallelism needs tensor parallelism, and the model axis is 1"


def no_layout_message(steps: Steps, target: Target, request: Planning) -> str:
    """Return the message for a request that no layout fulfils."""
    model = steps.plain
    order = {} if request.schedule is None else {"schedule": request.schedule}
    asked = ", ".join(f"{name}={value}" for name, value in (request.fixed | order).items())
    devices = target.topology.devices
    head = f"no layout over {devices} devices fulfils the request ({asked}): "
    faults = list(_faults_of_request(steps, devices, request))
    others = math.prod(request.fixed.get(axis, 1) for axis in (REPLICATE, DATA, STAGE))
    is_whole = request.fixed.get(MODEL) == 1 or others == devices
    if request.fixed.get("sequence") and is_whole:
        faults.append(f"sequence is 1: {NO_TENSOR}")
    if faults:
        return head + "; ".join(faults)
    own = request.fixed | _data_of_copies(request.fixed, devices)
    names = [name for name in (REPLICATE, DATA, "micro") if name in own]
    parts = math.prod(own[name] for name in names)
    copies = math.prod(own.get(axis, 1) for axis in BATCH_AXES)
    if parts > 0 and devices % max(1, copies) == 0 and model.rows % parts:
        words = " x ".join(f"{name} {own[name]}" for name in names)
        near = _next_to(model.rows, parts)
        return f"{head}a batch of {model.rows} does not divide into {words}: use {near} rows"
    rows = " times ".join(n for n in (REPLICATE, DATA, "micro") if n == DATA or n in request.fixed)
    sequence = f"; no sequence parallelism: {NO_SEQUENCE}" * request.fixed.get("sequence", 0)
    apart = (
        f"; the batch and the model cannot both be sharded: {model.apart}" if model.apart else ""
    )
    return (
        f"{head}the product of the axes must be {devices}, {rows} must divide the "
        f"batch of {model.rows}, and the model needs dimensions that divide so "
        f"often{apart}{sequence}"
    )


def faults_of_stages(
    steps: Steps,
    asked: Mapping[str, int],
    remat: Remat | None = None,
    schedule: Schedule | None = None,
) -> Iterator[str]:
    """Yield the faults of requested stages.

    Args:
        steps: the step and its variants.
        asked: requested sizes by name.
        remat: requested rematerialization, if any.
        schedule: requested schedule, if any.
    """
    reason, rounds = steps.why_no_stages(remat or ""), asked.get("rounds", 1)
    fitting = [n for n in steps.stages if steps.allows(n, max(rounds, 1))]
    if reason:
        yield f"no stages: {reason}"
    else:
        more = _faults_of_separate_layers(asked) if steps.stacks_layers else []
        yield from more or _faults_of_splits(steps, asked, fitting)
        if rounds > 1 and fitting:
            yield from _faults_of_rounds(steps, asked, fitting)
    if asked.get("micro", 2) < 2:
        yield f"micro is {asked['micro']}: stages need 2 microbatches or more"
    if schedule == "1f1b" and not reason and steps.why_no_1f1b(remat or ""):
        yield steps.why_no_1f1b(remat or "")
    if asked.get("zero", 0) not in STAGED:
        yield f"zero is {asked['zero']}: with stages, ZeRO is 0 or 1"


def _faults_of_separate_layers(asked: Mapping[str, int]) -> list[str]:
    """Return the faults of requested sizes if the layers are applied one by one."""
    faults = [SEPARATE_ROUNDS] if asked.get("rounds", 1) > 1 else []
    if asked.get(MODEL, 1) > 1:
        faults.append(
            f"{MODEL} is {asked[MODEL]}: layers that are applied one by one have stages without "
            f"tensor parallelism: use {MODEL}=1, or put the layers into a scan over stacked "
            "parameters"
        )
    return faults


def faults_of_copies(axes: Mapping[str, int], zero: int | None) -> Iterator[str]:
    """Yield the faults of a requested axis `replicate`.

    Args:
        axes: requested sizes of axes.
        zero: requested ZeRO stage, if any.
    """
    copies = axes.get(REPLICATE, 1)
    if copies == 1:
        return
    if axes.get(STAGE, 1) > 1:
        yield f"{REPLICATE} is {copies}: it is not possible with stages"
    if zero == 0 or axes.get(DATA, 2) == 1:
        yield (
            f"{REPLICATE} is {copies}, and ZeRO shards nothing over {DATA}: use {DATA} in its "
            f"place, or zero=1 or 3 with {DATA}=2 or more"
        )


def _faults_of_splits(
    steps: Steps, asked: Mapping[str, int], fitting: Sequence[int]
) -> Iterator[str]:
    """Yield the faults of splits into stages and blocks."""
    stages, rounds = asked.get(STAGE), asked.get("rounds", 1)
    counts = ", ".join(map(str, fitting)) if rounds > 1 else f"2 to {max(steps.stages)}"
    if rounds < 1:
        yield f"rounds is {rounds}: use 1 or more"
    elif not fitting:
        most = max(steps.stages)
        yield (
            f"{rounds} rounds: {most} layers cannot be divided into stages of {rounds} blocks each"
        )
    elif stages is None or stages == 1:
        yield f"rounds and schedules need stages: use {counts}, with the remaining devices"
    elif stages not in steps.stages:
        yield f"the layers cannot be divided into {stages} stages: use {counts}"
    elif stages not in fitting:
        yield f"{stages} stages of {rounds} blocks do not divide the layers: use {counts}"


def _faults_of_rounds(
    steps: Steps, asked: Mapping[str, int], fitting: Sequence[int]
) -> Iterator[str]:
    """Yield the faults of several rounds whose microbatches are no multiple of the stages."""
    each = asked.get("micro", steps.plain.rows // max(1, asked.get(DATA, 1)))
    stage_counts = [n for n in fitting if not each % n]
    if each % max(1, asked.get(STAGE, 1)) or not stage_counts:
        what = f"micro is {each}" if "micro" in asked else f"{each} rows are in each group"
        would = f": use {' or '.join(map(str, stage_counts))} stages" if stage_counts else ""
        yield f"{what}, and with several rounds it must be a multiple of the stages{would}"


def _faults_of_request(steps: Steps, devices: int, request: Planning) -> Iterator[str]:
    """Yield the faults of requested stages and copies; others are described in general."""
    asked, copies = request.fixed, request.fixed.get(REPLICATE, 1)
    sizes = {axis: asked[axis] for axis in (REPLICATE, STAGE, DATA, MODEL) if axis in asked}
    product, is_staged = math.prod(sizes.values()), asked.get(STAGE, 1) > 1 or wants_stages(request)
    is_whole = copies > 1 and product == devices
    yield from faults_of_copies({DATA: 1} | asked if is_whole else asked, asked.get("zero"))
    if copies > 1 and steps.plain.apart:
        yield f"{REPLICATE} is {copies}: {steps.plain.apart}"
    if is_staged:
        yield from faults_of_stages(steps, asked, request.remat, request.schedule)
    if min(sizes.values(), default=1) < 1:
        return
    if (copies > 1 or is_staged) and devices % product:
        words = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        yield f"{words} does not divide {devices} devices"
    if not is_staged:
        return
    parts = asked.get(DATA, 1) * asked.get("micro", 1)
    if steps.plain.rows % parts:
        words = " x ".join(f"{name} {asked[name]}" for name in (DATA, "micro") if name in asked)
        yield f"{words} does not divide the batch of {steps.plain.rows}"


def gib(nbytes: float) -> str:
    """Return bytes as text: `46.3 GiB`; below one GiB `12.5 MiB`."""
    unit, scale = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    size = nbytes / scale
    return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"


def _slowest(time: PlannedTime) -> str:
    """Return the level of links with the most exposed seconds."""
    exposed: dict[str, float] = defaultdict(float)
    for traffic in time.traffic:
        exposed[traffic.level] += traffic.seconds - traffic.hidden
    return max(exposed, key=exposed.__getitem__)


def warnings_of(sharded: ShardedModel, time: PlannedTime, topology: Topology) -> tuple[str, ...]:
    """Return warnings about a plan, to be shown before it runs."""
    found = [*_gaps(sharded.model, sharded.layout.data, topology)]
    each = sharded.model.rows / sharded.layout.data
    if each <= FEW_ROWS and sharded.layout.data > 1:
        samples = "sample" if round(each) == 1 else "samples"
        found.append(f"each device has {each:.0f} {samples} of a batch of {sharded.model.rows}")
    share = time.exposed / time.step if time.step else 0.0
    if share > MUCH_TRAFFIC:
        found.append(
            f"{share:.0%} of a step is spent in collectives, mostly over {_slowest(time)} links"
        )
    if time.bubble > MUCH_BUBBLE:
        found.append(
            f"stages are idle for {time.bubble:.0%} of a step (the pipeline's "
            "bubble): use a larger batch in more microbatches"
        )
    fed = _fed(sharded, time, topology)
    if fed > MUCH_INPUT:
        found.append(
            f"each host needs {fed / 1e9:.1f} GB/s of batches, more than a process "
            "usually reads: use --prefetch auto"
        )
    return tuple(found)


def _gaps(model: Model, data: int, topology: Topology) -> Iterator[str]:
    """Yield warnings about a step that the plan cannot describe or shard."""
    if model.unpriced:
        yield (
            f"the time contains only the memory traffic of {', '.join(model.unpriced)}, whose "
            "computing time is unknown"
        )
    if not any(tensor.role == "carried" for tensor in model.tensors):
        yield "the step carries no arrays: nothing is trained, and only the batch can be sharded"
    has_batch = any(tensor.role == "batch" for tensor in model.tensors)
    is_odd = topology.devices > 1 and math.gcd(model.rows, topology.devices) == 1
    if data == 1 and has_batch and is_odd:
        yield (
            f"a batch of {model.rows} does not divide over {topology.devices} devices, so "
            f"all devices receive each row: use {_next_to(model.rows, topology.devices)} rows to "
            "shard the batch"
        )


def _data_of_copies(asked: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return a number that divides each possible size of `data` beside requested copies, if any."""
    copies, model = asked.get(REPLICATE, 1), asked.get(MODEL, 1)
    if copies <= 1 or model < 1 or DATA in asked:
        return {}
    rest = devices // (copies * model)
    sizes = [n for n in range(2, rest + 1) if not rest % n]
    size = rest if MODEL in asked else math.gcd(*sizes)
    return {DATA: size} if size > 1 else {}


def _next_to(rows: int, parts: int) -> str:
    """Return the multiples of `parts` next to a number of rows."""
    below = rows // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


def _fed(sharded: ShardedModel, time: PlannedTime, topology: Topology) -> float:
    """Return bytes per second of batches that each host reads for its devices."""
    batch = sum(t.value.nbytes for t in sharded.model.tensors if t.role == "batch")
    on_host = min(topology.devices, host_of(topology.chip).devices)
    return batch * on_host / topology.devices / time.step if time.step else 0.0
