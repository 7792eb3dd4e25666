"""Layouts by name over a mesh: `replicated`, `batch`, `model` and `full`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from jax.sharding import NamedSharding, PartitionSpec

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import AbstractMesh, Mesh

LayoutName = Literal["replicated", "batch", "model", "full"]
LAYOUTS: tuple[str, ...] = get_args(LayoutName)

_MODEL_AXES = frozenset({"model", "tensor", "tp", "mp"})
"""What the axis that cuts parameters is called: MaxText, Megatron-LM and JAX's own examples."""

Axes = tuple[str, ...]


def named(name: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding that a layout means for an array of this shape.

    - `replicated`: whole on every device.
    - `batch`: the first dimension over the axes of the batch: all that are not the model's.
    - `model`: the last dimension over the model's axes: those called `model`, `tensor`, `tp` or
      `mp`, else the last axis of the mesh.
    - `full`: over all axes: the first dimension as in `batch` and the last as in `model`; where the
      mesh has one axis, or the array one dimension, the first dimension that divides over all.

    An array without dimensions is replicated.

    Raises:
        UsageError: a dimension does not divide by the axes that cut it, or nobody knows the name.
    """
    if name not in LAYOUTS:
        raise UsageError(f"where={name!r} is no layout: they are {', '.join(LAYOUTS)}")
    return NamedSharding(mesh, _spec(name, tuple(shape), mesh))


def batch_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """The axes that rows are cut over; all, where the mesh has one."""
    rest = tuple(axis for axis in mesh.axis_names if axis not in model_axes(mesh))
    return rest or tuple(mesh.axis_names)


def model_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """The axes that parameters are cut over."""
    called = tuple(axis for axis in mesh.axis_names if axis in _MODEL_AXES)
    return called or tuple(mesh.axis_names[-1:])


def cuts(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """Into how many parts they cut."""
    return math.prod(mesh.shape[axis] for axis in axes)


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    if name == "replicated" or not shape:
        return PartitionSpec()
    if name == "batch":
        return _cut(name, shape, mesh, {0: batch_axes(mesh)})
    if name == "model":
        return _cut(name, shape, mesh, {len(shape) - 1: model_axes(mesh)})
    if len(shape) > 1 and len(mesh.axis_names) > 1:
        return _cut(name, shape, mesh, {0: batch_axes(mesh), len(shape) - 1: model_axes(mesh)})
    every = tuple(mesh.axis_names)
    dividing = [i for i, size in enumerate(shape) if size % cuts(mesh, every) == 0]
    return _cut(name, shape, mesh, {(dividing or [0])[0]: every})


def _cut(
    name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, axes: dict[int, Axes]
) -> PartitionSpec:
    wrong = [
        _undivided(name, shape, dimension, cut, cuts(mesh, cut))
        for dimension, cut in axes.items()
        if shape[dimension] % cuts(mesh, cut)
    ]
    if wrong:
        raise UsageError("; ".join(wrong))
    entries = [axes.get(dimension, ()) for dimension in range(max(axes) + 1)]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def _undivided(name: str, shape: tuple[int, ...], dimension: int, axes: Axes, parts: int) -> str:
    size = shape[dimension]
    below, above = size // parts * parts, (size // parts + 1) * parts
    valid = f"{below:,} or {above:,}" if below else f"{above:,}"
    return (
        f"{name!r} cuts dimension {dimension} of {list(shape)} into {parts} (mesh "
        f"{' x '.join(axes)}), and {size:,} does not divide: make it {valid}, or take another of "
        f"{', '.join(LAYOUTS)}"
    )
