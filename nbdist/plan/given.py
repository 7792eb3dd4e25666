"""A plan that somebody has edited, taken as it is if it can be had."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.plan.layout import Laid, Layout, states_of
from nbdist.records import DATA, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.plan.model import Model, Tensor
    from nbdist.records import Plan, PlannedTensor


def laid_as(given: Plan, model: Model, devices: int) -> Laid:
    """The model as a plan lays it out; only its axes, `zero` and specs are looked at.

    Raises:
        PlanError: it cannot be had; every fault is named.
    """
    faults = list(_faults(given, model, devices))
    if faults:
        raise PlanError("the plan cannot be had:\n" + "\n".join(f"  - {fault}" for fault in faults))
    specs = {tensor.path: tensor.spec for tensor in given.tensors}
    split = {
        group
        for tensor in model.tensors
        for group, axes in zip(tensor.value.groups, specs.get(tensor.path, ()), strict=False)
        if MODEL in axes
    }
    data, tensor = given.axes[DATA], given.axes[MODEL]
    layout = Layout(data, tensor, frozenset(split), given.zero, given.remat, given.micro)
    return Laid(model, layout, states_of(model), specs)


def _faults(given: Plan, model: Model, devices: int) -> Iterator[str]:
    if set(given.axes) != {DATA, MODEL}:
        yield f"its axes are {', '.join(given.axes) or 'none'}: they are to be {DATA} and {MODEL}"
        return
    sizes = " x ".join(f"{axis} {size}" for axis, size in given.axes.items())
    if math.prod(given.axes.values()) != devices or min(given.axes.values()) < 1:
        yield f"{sizes} is {given.devices} devices, and there are {devices}"
    elif given.micro < 1:
        yield f"micro is {given.micro}: a batch is gone through in 1 part or more"
    elif model.rows % (given.axes[DATA] * given.micro):
        parts = f" and gone through in {given.micro}" if given.micro > 1 else ""
        yield f"a batch of {model.rows} cannot be cut in {given.axes[DATA]}{parts}"
    if model.apart and min(given.axes.values()) > 1:
        yield f"{sizes} cuts both the batch and the model: {model.apart}"
    known = {tensor.path: tensor for tensor in model.tensors}
    for planned in given.tensors:
        if planned.path not in known:
            yield f"the step has no {planned.path}"
        else:
            yield from _faults_of(planned, known[planned.path], given.axes)


def _faults_of(planned: PlannedTensor, tensor: Tensor, axes: dict[str, int]) -> Iterator[str]:
    sizes, path = tensor.value.sizes, planned.path
    if len(planned.spec) != len(sizes):
        yield f"{path} has {len(sizes)} dimensions, and its spec is of {len(planned.spec)}"
        return
    used = [axis for dimension in planned.spec for axis in dimension]
    unknown = sorted(set(used) - set(axes))
    if unknown:
        yield f"{path} is cut over {', '.join(unknown)}: the axes are {', '.join(axes)}"
        return
    if len(used) != len(set(used)):
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        yield f"{path} is cut twice over {', '.join(twice)}"
    for dim, (size, names) in enumerate(zip(sizes, planned.spec, strict=True)):
        parts = math.prod(axes[name] for name in names)
        if size % parts:
            yield f"{path} dimension {dim} is {size}, which {parts} devices cannot share evenly"
