"""Layouts by name over a mesh: `replicated`, `batch`, `model` and `full`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from jax.sharding import NamedSharding, PartitionSpec

from nbdist.errors import UsageError
from nbdist.parallel.placement.axes import batch_axes, model_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import AbstractMesh, Mesh

    from nbdist.parallel.placement.axes import Axes

LayoutName = Literal["replicated", "batch", "model", "full"]
LAYOUTS: tuple[str, ...] = get_args(LayoutName)


def named(name: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a named layout for an array of this shape.

    - `replicated`: whole on every device.
    - `batch`: the first dimension over the axes of the batch: all but those of the model, a
      sequence and a pipeline (`parallel/placement/axes.py` knows them by their names).
    - `model`: the last dimension over the model's axes, `model`, `tensor`, `tp` or `mp`, or over
      the only axis.
    - `full`: the first dimension as in `batch` and the last as in `model`. If the mesh has one
      axis, or the array one dimension, the first dimension that divides over both.

    An array without dimensions is replicated.

    Raises:
        UsageError: a dimension does not divide by the axes that shard it, or the name is unknown.
    """
    if name not in LAYOUTS:
        raise UsageError(f"where={name!r} is not a layout: use {', '.join(LAYOUTS)}")
    return NamedSharding(mesh, _spec(name, tuple(shape), mesh))


def parts_over(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """Return the number of parts of a dimension that is sharded over these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    if name == "replicated" or not shape:
        return PartitionSpec()
    if name == "batch":
        return _sharded_spec(name, shape, mesh, {0: batch_axes(mesh)})
    if name == "model":
        return _sharded_spec(name, shape, mesh, {len(shape) - 1: model_axes(mesh)})
    rows, model = batch_axes(mesh), model_axes(mesh)
    if len(shape) > 1 and rows != model:
        return _sharded_spec(name, shape, mesh, {0: rows, len(shape) - 1: model})
    every = tuple(dict.fromkeys((*rows, *model)))
    dividing = [i for i, size in enumerate(shape) if size % parts_over(mesh, every) == 0]
    return _sharded_spec(name, shape, mesh, {(dividing or [0])[0]: every})


def _sharded_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, axes: dict[int, Axes]
) -> PartitionSpec:
    wrong = [
        _undivided(name, shape, dimension, over, parts_over(mesh, over))
        for dimension, over in axes.items()
        if shape[dimension] % parts_over(mesh, over)
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
        f"{name!r} shards dimension {dimension} of {list(shape)} into {parts} parts (mesh "
        f"{' x '.join(axes)}), and {size:,} does not divide: make it {valid}, or "
        f"use another of {', '.join(LAYOUTS)}"
    )
