"""A given plan, edited by its user, which is checked and used without a search."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import PlanError
from nbdist.planner.graph.layout import Layout, ShardedModel, split_by
from nbdist.planner.graph.optimizer_state import states_of
from nbdist.planner.search.explain import (
    NO_SEQUENCE,
    NO_TENSOR,
    faults_of_copies,
    faults_of_stages,
)
from nbdist.records import DATA, MODEL, REPLICATE, STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.graph.model import Tensor
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import Plan, PlannedTensor


def sharded_as(given: Plan, steps: Steps, devices: int) -> ShardedModel:
    """Return a step in the layout of a plan: its axes, microbatches, rematerialization and specs.

    Specs of the batch are ignored: it is sharded over all devices.

    Raises:
        PlanError: the plan is impossible; all faults are listed.
    """
    given = _without_axes_of_one(given)
    faults = list(_faults(given, steps, devices))
    if faults:
        raise _refused(faults)
    layout = Layout(
        given.replicas,
        given.axes[MODEL],
        zero=given.zero,
        remat=given.remat,
        micro=given.micro,
        stage=given.axes.get(STAGE, 1),
        schedule=given.schedule,
        rounds=given.rounds,
        loss_stages=given.loss_stages,
        replicate=given.axes.get(REPLICATE, 1),
    )
    model = steps.of(layout).model
    ours = {tensor.path for tensor in model.tensors if tensor.role != "batch"}
    specs = {tensor.path: tensor.spec for tensor in given.tensors if tensor.path in ours}
    split = split_by(model, [specs.get(tensor.path, ()) for tensor in model.tensors])
    layout = replace(layout, split=split, sequence=given.sequence)
    sharded = ShardedModel(model, layout, states_of(model), specs)
    if given.sequence and not sharded.sequence:
        why = NO_SEQUENCE if given.axes[MODEL] > 1 else NO_TENSOR
        raise _refused([f"sequence is true: {why}"])
    return sharded


def _refused(faults: list[str]) -> PlanError:
    return PlanError("the plan is impossible:\n" + "\n".join(f"  - {fault}" for fault in faults))


def _without_axes_of_one(given: Plan) -> Plan:
    """Return the plan without optional axes of size 1."""
    without = {axis for axis in (STAGE, REPLICATE) if given.axes.get(axis) == 1}
    if not without:
        return given
    axes = {axis: size for axis, size in given.axes.items() if axis not in without}
    tensors = tuple(
        msgspec.structs.replace(
            tensor,
            spec=tuple(tuple(axis for axis in dim if axis not in without) for dim in tensor.spec),
        )
        for tensor in given.tensors
    )
    return msgspec.structs.replace(given, axes=axes, tensors=tensors)


def _faults(given: Plan, steps: Steps, devices: int) -> Iterator[str]:
    model = steps.plain
    if set(given.axes) - {STAGE, REPLICATE} != {DATA, MODEL}:
        yield (
            f"its axes are {', '.join(given.axes) or 'none'}: use {DATA} and {MODEL}, "
            f"{STAGE} for stages, and {REPLICATE} for copies of what ZeRO shards"
        )
        return
    yield from faults_of_copies(given.axes, given.zero)
    sizes = " x ".join(f"{axis} {size}" for axis, size in given.axes.items())
    if math.prod(given.axes.values()) != devices or min(given.axes.values()) < 1:
        yield f"{sizes} is {given.devices} devices, and there are {devices}"
    if given.micro < 1:
        yield f"micro is {given.micro}: use 1 or more"
    elif given.replicas >= 1 and model.rows % (given.replicas * given.micro):
        parts = f" in {given.micro} microbatches" if given.micro > 1 else ""
        yield f"a batch of {model.rows} cannot be divided into {given.replicas}{parts}"
    yield from _faults_in_stages(given, steps)
    if model.apart and sum(size > 1 for size in given.axes.values()) > 1:
        yield f"{sizes} shards over several axes: {model.apart}"
    known = {tensor.path: tensor for tensor in model.tensors}
    for planned in given.tensors:
        if planned.path not in known:
            yield f"the step has no {planned.path}"
        elif known[planned.path].role != "batch" and min(given.axes.values()) >= 1:
            yield from _faults_of(planned, known[planned.path], given.axes)


def _faults_in_stages(given: Plan, steps: Steps) -> Iterator[str]:
    if given.axes.get(STAGE, 1) > 1:
        asked = {STAGE: given.axes[STAGE], "micro": given.micro, "zero": given.zero}
        asked |= {"rounds": given.rounds, MODEL: given.axes[MODEL]}
        yield from faults_of_stages(steps, asked, given.remat, given.schedule)
        reason = steps.why_no_1f1b(given.remat) if given.loss_stages == "last" else ""
        if reason and given.schedule == "gpipe":
            yield f"loss_stages is last: {reason}"
    elif given.schedule != "gpipe":
        yield f"schedule is {given.schedule}, and there are no stages: use gpipe"
    if given.axes.get(STAGE, 1) <= 1 and given.rounds != 1:
        yield f"rounds is {given.rounds}, and there are no stages: use 1"


def _faults_of(planned: PlannedTensor, tensor: Tensor, axes: dict[str, int]) -> Iterator[str]:
    sizes, path = tensor.value.sizes, planned.path
    if len(planned.spec) != len(sizes):
        yield f"{path} has {len(sizes)} dimensions, and its spec has {len(planned.spec)}"
        return
    used = [axis for dimension in planned.spec for axis in dimension]
    unknown = sorted(set(used) - set(axes))
    if unknown:
        yield f"{path} is sharded over {', '.join(unknown)}: the axes are {', '.join(axes)}"
        return
    if len(used) != len(set(used)):
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        yield f"{path} is sharded twice over {', '.join(twice)}"
    for dim, (size, names) in enumerate(zip(sizes, planned.spec, strict=True)):
        parts = math.prod(axes[name] for name in names)
        if size % parts:
            yield f"{path} dimension {dim} is {size}, which {parts} devices cannot share evenly"
