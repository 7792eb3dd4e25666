"""Why there is no plan, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nbdist.planner.search.mesh_sizes import STAGED, wants_stages
from nbdist.records import DATA, MODEL, STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.cost.time import Target
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import Planning, Remat, Schedule


NO_SEQUENCE = (
    "no product whose sum the axis of the model cuts has a dimension, beside its rows and those of "
    "parameters, that this axis could cut as well"
)
NO_TENSOR = (
    "what tensor parallelism passes on is cut along the sequence, and the axis of the model is 1"
)


def none_as_asked(steps: Steps, target: Target, wishes: Planning) -> str:
    """Of no layout that is as it was asked for."""
    model = steps.plain
    order = {} if wishes.schedule is None else {"schedule": wishes.schedule}
    asked = ", ".join(f"{name}={value}" for name, value in (wishes.fixed | order).items())
    devices = target.topology.devices
    head = f"no layout over {devices} devices is as asked for ({asked}): "
    faults = list(_faults_as_asked(steps, devices, wishes))
    others = math.prod(wishes.fixed.get(axis, 1) for axis in (DATA, STAGE))
    is_whole = wishes.fixed.get(MODEL) == 1 or others == devices
    if wishes.fixed.get("sequence") and is_whole:
        faults.append(f"sequence is 1: {NO_TENSOR}")
    if faults:
        return head + "; ".join(faults)
    rows = "data times micro" if "micro" in wishes.fixed else "data"
    sequence = f"; nothing is cut along a sequence: {NO_SEQUENCE}" * wishes.fixed.get("sequence", 0)
    apart = f"; the batch and the model cannot both be cut: {model.apart}" if model.apart else ""
    return (
        f"{head}the axes' sizes multiply to {devices}, {rows} divides the batch of {model.rows}, "
        f"and the model has dimensions that can be cut so often{apart}{sequence}"
    )


def faults_of_stages(
    steps: Steps,
    asked: Mapping[str, int],
    remat: Remat | None = None,
    schedule: Schedule | None = None,
) -> Iterator[str]:
    """What is wrong with the stages that are asked for.

    Args:
        steps: what is to be cut into them.
        asked: how many, and what else is.
        remat: which activations are made again, if that is asked for.
        schedule: in which order microbatches go through them, likewise.
    """
    reason, rounds = steps.why_whole(remat or ""), asked.get("rounds", 1)
    fitting = [n for n in steps.stages if n * max(rounds, 1) in steps.stages]
    if reason:
        yield f"no stages: {reason}"
    else:
        yield from _faults_of_cuts(steps, asked, fitting)
        if rounds > 1 and fitting:
            yield from _faults_of_turns(steps, asked, fitting)
    if asked.get("micro", 2) < 2:
        yield f"micro is {asked['micro']}: a batch goes through stages in 2 microbatches or more"
    if schedule == "1f1b" and not reason and steps.why_waiting(remat or ""):
        yield steps.why_waiting(remat or "")
    if asked.get("zero", 0) not in STAGED:
        yield f"zero is {asked['zero']}: with stages, ZeRO is 0 or 1"


def _faults_of_cuts(
    steps: Steps, asked: Mapping[str, int], fitting: Sequence[int]
) -> Iterator[str]:
    """Of how layers are cut."""
    stages, rounds = asked.get(STAGE), asked.get("rounds", 1)
    counts = ", ".join(map(str, fitting))
    if rounds < 1:
        yield f"rounds is {rounds}: microbatches go through stages once or more"
    elif not fitting:
        most = max(steps.stages)
        yield f"{rounds} rounds: {most} layers cannot be cut into stages of {rounds} blocks each"
    elif stages is None or stages == 1:
        yield f"rounds and schedules are of stages: {counts} would do, of devices that are left"
    elif stages not in steps.stages:
        yield f"the layers cannot be cut into {stages} stages: {counts} would do"
    elif stages not in fitting:
        yield f"{stages} stages of {rounds} blocks of layers do not divide them: {counts} would do"


def _faults_of_turns(
    steps: Steps, asked: Mapping[str, int], fitting: Sequence[int]
) -> Iterator[str]:
    """Of several rounds: microbatches that are no multiple of the stages."""
    each = asked.get("micro", steps.plain.rows // max(1, asked.get(DATA, 1)))
    turns = [n for n in fitting if not each % n]
    if each % max(1, asked.get(STAGE, 1)) or not turns:
        what = f"micro is {each}" if "micro" in asked else f"{each} rows are on each group"
        would = f": {' or '.join(map(str, turns))} would do" if turns else ""
        yield (
            f"{what}, and in several rounds microbatches go in turns of as many as there are "
            f"stages{would}"
        )


def _faults_as_asked(steps: Steps, devices: int, wishes: Planning) -> Iterator[str]:
    """Of stages; what else may be wrong is told in general."""
    asked = wishes.fixed
    if asked.get(STAGE, 1) == 1 and not wants_stages(wishes):
        return
    yield from faults_of_stages(steps, asked, wishes.remat, wishes.schedule)
    sizes = {axis: asked[axis] for axis in (STAGE, DATA, MODEL) if axis in asked}
    if min(sizes.values(), default=1) < 1:
        return
    if devices % math.prod(sizes.values()):
        words = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        yield f"{words} does not divide {devices} devices"
    parts = asked.get(DATA, 1) * asked.get("micro", 1)
    if steps.plain.rows % parts:
        words = " x ".join(f"{name} {asked[name]}" for name in (DATA, "micro") if name in asked)
        yield f"{words} does not divide the batch of {steps.plain.rows}"


def gib(nbytes: float) -> str:
    """`46.3 GiB`; of less than one, `12.5 MiB`."""
    unit, scale = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{nbytes / scale:,.3g} {unit}"
