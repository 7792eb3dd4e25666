"""Tensors of a plan: as a placement, and as a tree with folded layers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import Layout, MeshShape, PlacedArray, PlacedDevice, Placement
from nbdist.utils.listing import listed
from nbdist.views import formatting
from nbdist.views.placement.tree import Branch, Cost, Leaf, total, tree

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.records import Plan, PlannedTensor, Spec

ROLES = {
    "parameter": "parameters",
    "state": "optimizer state",
    "read": "read only",
    "batch": "batch",
}
"""Roles in a plan, and their names in the view."""

_SEGMENT = re.compile(
    r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^]'"]*)\]|\.[^.[]+|[^.[]+|.""", re.DOTALL
)
_DIGITS = re.compile(r"\d+")
_INDEX = re.compile(r"\[\d+\]")

_ALIKE = 4
"""Number of equal arrays with a number in their names, such as `['w1']`, that count as layers."""

_NAMED = 3
"""Number of names listed for equal branches."""

_NUMBERS = 12
"""Maximum characters of layer numbers."""


def placement_of(plan: Plan) -> Placement:
    """Return the placement of a plan's tensors. Devices are numbered in the order of the mesh."""
    every = tuple(range(plan.devices))
    layouts = {spec: index for index, spec in enumerate({t.spec: 0 for t in plan.tensors})}
    return Placement(
        names=(),
        hosts={},
        devices=tuple(PlacedDevice(number, str(number)) for number in every),
        meshes=(MeshShape(tuple(plan.axes), tuple(plan.axes.values()), every),),
        layouts=tuple(_layout(spec, plan, every) for spec in layouts),
        arrays=tuple(_array(tensor, plan, layouts[tensor.spec]) for tensor in plan.tensors),
    )


def _layout(spec: Spec, plan: Plan, every: tuple[int, ...]) -> Layout:
    parts = tuple(math.prod(plan.axes[axis] for axis in axes) for axes in spec)
    return Layout(
        kind="sharded" if math.prod(parts) > 1 else "replicated",
        devices=every,
        blocks=_blocks(spec, plan.axes),
        parts=parts,
        axes=spec,
        spec=written(spec),
        mesh=0,
    )


def _blocks(spec: Spec, axes: dict[str, int]) -> tuple[int, ...]:
    """Return the block of each device. A step along an axis always adds the same number."""
    strides: dict[str, int] = {}
    stride = 1
    for axis in reversed([axis for dimension in spec for axis in dimension]):
        strides[axis] = stride
        stride *= axes[axis]
    blocks = [0]
    for axis, size in axes.items():
        blocks = [b + i * strides.get(axis, 0) for b in blocks for i in range(size)]
    return tuple(blocks)


def _array(tensor: PlannedTensor, plan: Plan, layout: int) -> PlacedArray:
    pieces = math.prod(plan.axes[axis] for axes in tensor.spec for axis in axes)
    return PlacedArray(
        path=segments(tensor.path),
        shape=tensor.shape,
        dtype=tensor.dtype,
        nbytes=tensor.device_bytes * pieces,
        layout=layout,
    )


def segments(path: str) -> tuple[str, ...]:
    """Split a path into `p`, `['layers']`, `[0]`, `.kernel`. Joined, they are the path."""
    return tuple(_SEGMENT.findall(path)) or ("",)


def written(spec: Spec) -> str:
    """Format a spec: `P('data', None, ('model', 'data'))`, without trailing None."""
    last = max((dim for dim, axes in enumerate(spec) if axes), default=-1)
    return f"P({', '.join(map(_dimension, spec[: last + 1]))})"


def _dimension(axes: tuple[str, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes or None)


def folded(plan: Plan, placement: Placement) -> Branch:
    """Return one branch per role, largest arrays first. Equal layers are one entry.

    A leaf represents `cost.arrays` arrays. `cost.stored` is the number of bytes on all devices.
    """
    by_role: dict[str, list[PlacedArray]] = {role: [] for role in ROLES}
    for tensor, array in zip(plan.tensors, placement.arrays, strict=True):
        by_role[tensor.role].append(array)
    root = Branch("")
    for role, arrays in by_role.items():
        if arrays:
            node = _folded(tree(msgspec.structs.replace(placement, arrays=tuple(arrays))))
            root.entries.append(Branch(ROLES[role], node.entries, cost=node.cost))
    root.cost = total(root.entries)
    return root


def _folded(node: Branch) -> Branch:
    """Return the node with entries folded from the inside out, and sorted by bytes."""
    layers: dict[object, list[Branch | Leaf]] = defaultdict(list)
    stems: dict[str, set[object]] = defaultdict(set)
    for entry in node.entries:
        inner = _folded(entry) if isinstance(entry, Branch) else entry
        stem, signature = _DIGITS.sub("#", entry.label), _signature(inner)
        layers[stem, signature].append(inner)
        stems[stem].add(signature)
    ambiguous = {stem for stem, signatures in stems.items() if len(signatures) > 1}
    found = [_joined(e) for group in layers.values() for e in _as_layers(group, ambiguous)]
    entries = _siblings(found)
    entries.sort(key=lambda entry: -entry.cost.stored)
    return Branch(node.label, entries, cost=total(entries))


def _as_layers(group: list[Branch | Leaf], ambiguous: Collection[str]) -> list[Branch | Leaf]:
    """Return one entry for equal layers. It lists their numbers if `#` would be ambiguous."""
    first, count = group[0], len(group)
    is_layer = isinstance(first, Branch) or _INDEX.fullmatch(first.label) or count >= _ALIKE
    if count == 1 or not is_layer:
        return group
    label = _DIGITS.sub("#", first.label)
    if label in ambiguous and label.count("#") == 1:
        numbers = formatting.ranks(int(_DIGITS.findall(entry.label)[0]) for entry in group)
        label = label.replace("#", formatting.shortened(numbers, _NUMBERS))
    label += f" x {count}" * isinstance(first, Branch)
    return [_multiplied(first, label, count)]


def _joined(entry: Branch | Leaf) -> Branch | Leaf:
    """Merge a branch with its only branch."""
    inner = entry.entries if isinstance(entry, Branch) else []
    if len(inner) == 1 and isinstance(inner[0], Branch):
        return Branch(entry.label + inner[0].label, inner[0].entries, cost=inner[0].cost)
    return entry


def _siblings(entries: list[Branch | Leaf]) -> list[Branch | Leaf]:
    """Merge equal branches of different names, such as optimizer moments, into one: `m, v`."""
    alike: dict[object, list[Branch | Leaf]] = defaultdict(list)
    for place, entry in enumerate(entries):
        alike[_signature(entry) if isinstance(entry, Branch) else place].append(entry)
    return [
        group[0]
        if len(group) == 1
        else _multiplied(group[0], listed([one.label for one in group], _NAMED), len(group))
        for group in alike.values()
    ]


def _multiplied(entry: Branch | Leaf, label: str, count: int) -> Branch | Leaf:
    """Return an entry that represents several."""
    if isinstance(entry, Leaf):
        return Leaf(label, entry.array, _times(entry.cost, count))
    entries = [_multiplied(inner, inner.label, count) for inner in entry.entries]
    return Branch(label, entries, cost=total(entries))


def _times(cost: Cost, count: int) -> Cost:
    return Cost(*(count * n for n in (cost.arrays, cost.once, cost.stored, cost.shardable)))


def _signature(entry: Branch | Leaf) -> object:
    """Return a key that is equal for branches with equal arrays."""
    if isinstance(entry, Leaf):
        array = entry.array
        return array.shape, array.dtype, array.nbytes, array.layout, entry.cost.arrays
    return tuple((inner.label, _signature(inner)) for inner in entry.entries)


def largest(plan: Plan, placement: Placement, count: int) -> list[tuple[PlacedArray, int]]:
    """Return the sharded specs with most bytes: an array, preferably a parameter, and their number.

    Args:
        plan: plan of the tensors.
        placement: placement of the plan.
        count: maximum number of specs.
    """
    alike: dict[str, list[tuple[bool, int, PlacedArray]]] = defaultdict(list)
    for tensor, array in zip(plan.tensors, placement.arrays, strict=True):
        layout = placement.layouts[array.layout]
        if layout.pieces > 1:
            alike[layout.spec].append((tensor.role == "parameter", array.nbytes, array))
    groups = sorted(alike.values(), key=lambda group: -sum(nbytes for _, nbytes, _ in group))
    return [(max(group, key=lambda g: g[:2])[2], len(group)) for group in groups[:count]]
