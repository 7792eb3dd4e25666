"""Formats of layouts, slices and devices."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.records import HOST_MEMORY
from nbdist.utils.listing import listed
from nbdist.views import formatting
from nbdist.views.placement.tree import Cost, dimension_to_shard, on_devices, on_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Layout, MeshShape, PlacedArray, Placement

_NAMED = 4
"""Number of devices that are named individually."""

_NUMBERS = 44
"""Maximum characters of a list of device numbers."""

_NOTES = 12
_LONGEST = 60


def title(placement: Placement, cost: Cost) -> str:
    names = ", ".join(placement.names)
    return f"{names}: {formatting.count(cost.arrays, 'array')}, {formatting.size(cost.once)}"


def facts(placement: Placement, cost: Cost) -> Iterator[str]:
    """Yield facts about all arrays together."""
    sizes = on_devices(placement)
    names = {d: placement.devices[d].name for d in sizes}
    for noun, at_host in (("device", False), ("host memory", True)):
        of_kind = [n for d, n in sizes.items() if (names[d] == HOST_MEMORY) == at_host]
        if of_kind:
            yield _each(of_kind, noun)
    if cost.copies:
        share = f"{formatting.size(cost.shardable)} of them" if cost.shardable else "none of them"
        yield (
            f"{formatting.size(cost.stored)} with copies: {formatting.size(cost.copies)} are copies"
            f", and {share} could be sharded"
        )
    yield from (mesh_words(placement, mesh) for mesh in placement.meshes)
    yield from placement.notes[:_NOTES]
    if len(placement.notes) > _NOTES:
        yield f"and {len(placement.notes) - _NOTES:,} more notes"


def _each(sizes: Sequence[int], noun: str) -> str:
    """Format bytes per device: `2.1 GB to 2.3 GB on each of 6 devices`."""
    least, most = formatting.size(min(sizes)), formatting.size(max(sizes))
    each = most if least == most else f"{least} to {most}"
    if len(sizes) == 1:
        return f"{each} on 1 {noun}"
    return f"{each} on each of {len(sizes):,} {noun.replace('memory', 'memorie')}s"


def mesh_words(placement: Placement, mesh: MeshShape) -> str:
    """Format a mesh: `mesh data 3 x model 2: data crosses ranks, model stays on a rank`."""
    if not mesh.axes:
        return "mesh without axes"
    sizes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
    rank_of = [placement.devices[device].rank for device in mesh.devices]
    crossing = []
    for axis, (name, size) in enumerate(zip(mesh.axes, mesh.sizes, strict=True)):
        if size > 1:
            crosses = any(len(ranks) > 1 for ranks in _along(rank_of, mesh.sizes, axis))
            crossing.append(f"{name} {'crosses ranks' if crosses else 'stays on a rank'}")
    return f"mesh {sizes}" + (f": {', '.join(crossing)}" if crossing else "")


def _along(rank_of: Sequence[int], sizes: Sequence[int], axis: int) -> Iterator[set[int]]:
    """Yield the ranks of devices that differ only in this axis, for each position in the others."""
    stride = 1
    for size in sizes[axis + 1 :]:
        stride *= size
    lines: dict[tuple[int, int], set[int]] = defaultdict(set)
    for index, rank in enumerate(rank_of):
        lines[index // (stride * sizes[axis]), index % stride].add(rank)
    yield from lines.values()


def device(placement: Placement, index: int) -> str:
    """Format a device: `1@host gpu:0`."""
    place = placement.devices[index]
    return f"{place.rank}@{placement.hosts[place.rank]} {place.name}"


def devices(placement: Placement, indices: Sequence[int]) -> str:
    """Format devices, equal ones of several ranks together: `0-2@host cpu:0, cpu:1`.

    Devices of a plan have numbers only: `devices 0-3`.
    """
    if not placement.hosts:
        numbers = formatting.shortened(formatting.ranks(indices), _NUMBERS)
        return f"device{'s' * (len(indices) > 1)} {numbers}"
    names: dict[int, list[str]] = defaultdict(list)
    for index in indices:
        names[placement.devices[index].rank].append(placement.devices[index].name)
    alike = {tuple(sorted(of_rank)) for of_rank in names.values()}
    if len(indices) > 1 and len(alike) == 1 and len(next(iter(alike))) <= _NAMED:
        place = formatting.places(names, placement.hosts)[1:-1]
        return f"{place} {', '.join(next(iter(alike)))}"
    return listed([device(placement, index) for index in indices], _NAMED)


def label(text: str, ranks: Sequence[int]) -> str:
    """Format a path without the middle of a long one, and the ranks if not all have the array."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
    return f"{text} (rank {formatting.ranks(ranks)})" if ranks else text


def shape(array: PlacedArray) -> str:
    return " x ".join(map(str, array.shape)) or "scalar"


def how(layout: Layout) -> str:
    """Format the sharding: the spec or a word, and a remark if each rank has its own array."""
    if layout.kind == "sharded":
        return layout.spec or "sharded"
    own = layout.owners > 1 and layout.kind != "per replica"
    return f"{layout.kind}, own on each rank" if own else layout.kind


def partitioned(layout: Layout) -> str:
    """Format parts and copies: `3 x 2, 2 copies`."""
    parts = " x ".join(map(str, layout.parts)) if layout.pieces > 1 else ""
    copies = f"{layout.copies:,} copies" if layout.copies > 1 else ""
    return ", ".join(part for part in (parts, copies) if part)


def advice(array: PlacedArray, layout: Layout, cost: Cost) -> str:
    """Format bytes of copies that could be sharded, and the dimension: `2.1 MB, dim 0`."""
    dimension = dimension_to_shard(array, layout)
    return f"{formatting.size(cost.shardable)}, dim {dimension}" if cost.shardable else ""


def per_device(array: PlacedArray, layout: Layout) -> str:
    return formatting.size(on_each(array, layout)) if layout.devices else ""


def over_axes(layout: Layout) -> str:
    """Format sharded dimensions: `dim 0 in 3 over data, dim 2 in 2 over model`."""
    return ", ".join(
        f"dim {dimension} in {parts}" + (f" over {' x '.join(axes)}" if axes else "")
        for dimension, (parts, axes) in enumerate(
            zip(layout.parts, layout.axes or ((),) * len(layout.parts), strict=True)
        )
        if parts > 1
    )


def block(array: PlacedArray, layout: Layout, number: int) -> str:
    """Format a slice: `rows 0:512, cols all`, or `[0:2, :, 4:8]` for more dimensions."""
    spans: list[tuple[int, int]] = []
    all_parts = layout.parts or (1,) * len(array.shape)
    for length, parts in reversed(list(zip(array.shape, all_parts, strict=True))):
        number, place = divmod(number, parts)
        spans.insert(0, (length * place // parts, length * (place + 1) // parts))
    texts = [
        ":" if (start, stop) == (0, length) else f"{start}:{stop}"
        for (start, stop), length in zip(spans, array.shape, strict=True)
    ]
    if len(texts) > 2 or not texts:
        return f"[{', '.join(texts)}]" if texts else "all"
    if len(texts) == 1:
        return "all" if texts[0] == ":" else texts[0]
    rows, cols = ("all" if text == ":" else text for text in texts)
    return f"rows {rows}, cols {cols}"
