"""Location of the arrays of a tree, and links of the axes of a mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from nbdist.parallel.placement.axes import role_of
from nbdist.parallel.placement.capacity import part_bytes
from nbdist.parallel.placement.leaves import leaves_of
from nbdist.parallel.placement.meshes import names_of, slice_of
from nbdist.parallel.placement.target_tree import PLACES, StructureError, targets_of
from nbdist.records import ArrayPlace, AxisLinks
from nbdist.views import formatting, html
from nbdist.views.result_table import ResultTable
from nbdist.worker.jax.runtime import platforms, processes

if TYPE_CHECKING:
    from nbdist.parallel.placement.leaves import Leaf
    from nbdist.records import LayoutKind

_COLUMNS = ("array", "shape", "bytes", "sharding", "devices")
_HOST_MEMORY = "this process's memory (NumPy)"


@dataclass(frozen=True, eq=False, repr=False)
class Where(ResultTable[ArrayPlace]):
    """Places of the arrays of a tree, one row each; equal to any place that holds all of them.

    The key of an array is its path in the tree, such as `['w'][0]`; empty if the tree is an array.

    Attributes:
        leaves: Arrays of the tree with their paths.
        bytes_on: Bytes on each device of all processes, by the name of the device.
        tree: The tree.
    """

    leaves: tuple[Leaf, ...]
    bytes_on: dict[str, int]
    tree: Any

    def __eq__(self, where: object) -> bool:
        """Return True if every array is there: `where(tree) == "batch"`, or a device, or a spec.

        Layouts and specs are taken over the mesh that an array is on. Another `Where` is equal if
        its arrays have the same paths, shapes, types and places.

        Raises:
            UsageError: A name is no place, or an axis does not exist.
        """
        if isinstance(where, Where):
            return self.rows == where.rows
        if where is None or (jax.tree_util.all_leaves([where]) and not isinstance(where, PLACES)):
            return NotImplemented
        try:
            targets = targets_of(self.tree, len(self.leaves), where, None)
        except StructureError:
            return False
        return all(target.holds(leaf) for target, leaf in zip(targets, self.leaves, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to places of several kinds

    @cached_property
    def rows(self) -> tuple[ArrayPlace, ...]:
        return tuple(map(_row, self.leaves))

    def _key(self, index: int, row: ArrayPlace) -> str:
        return row.path

    def _columns(self) -> list[str]:
        return [name for name in ArrayPlace.__struct_fields__ if name != "ranks"]

    def html(self) -> str:
        return html.box(
            self._title(), html.table(_COLUMNS, self._cells(), (2,)), html.faint(self._held())
        )

    def lines(self) -> list[str]:
        return [self._title(), *html.text_table(_COLUMNS, self._cells(), (2,)), self._held()]

    def _title(self) -> str:
        total = sum(leaf.nbytes for leaf in self.leaves)
        return f"{formatting.count(len(self.leaves), 'array')}, {formatting.size(total)}"

    def _cells(self) -> list[list[str]]:
        return [
            [leaf.path or "-", _shape(leaf), formatting.size(leaf.nbytes), *_place(leaf)]
            for leaf in self.leaves
        ]

    def _held(self) -> str:
        sizes = sorted(set(self.bytes_on.values()))
        if not sizes:
            return "no device holds any of it"
        spread = " to ".join(dict.fromkeys(formatting.size(size) for size in (sizes[0], sizes[-1])))
        first, *others = self.bytes_on
        return f"{spread} on {f'each of {len(self.bytes_on)} devices' if others else first}"


@dataclass(frozen=True, repr=False)
class MeshOrder(ResultTable[AxisLinks]):
    """Axes of a mesh, one row each, with the links between the devices of an axis.

    The key of a row is the name of the axis.

    Attributes:
        links: The axes in the order of the mesh.
        grid: Names of the devices in the order of the mesh, one line for each row of devices.
    """

    links: tuple[AxisLinks, ...]
    grid: str

    @property
    def rows(self) -> tuple[AxisLinks, ...]:
        return self.links

    @property
    def axes(self) -> dict[str, str]:
        """Size, links and use of each axis, in words."""
        return {row.axis: f"({row.size}): {row.links}; {row.sends}" for row in self.rows}

    def _key(self, index: int, row: AxisLinks) -> str:
        return row.axis

    def _columns(self) -> list[str]:
        return list(AxisLinks.__struct_fields__)

    def html(self) -> str:
        rows = [[row.axis, str(row.size), f"{row.links}; {row.sends}"] for row in self.rows]
        table = html.table(("axis", "size", "goes over"), rows, (1,))
        return html.box("mesh", table, html.faint(self.grid, "pre"))

    def lines(self) -> list[str]:
        return [*(f"{axis} {words}" for axis, words in self.axes.items()), *self.grid.splitlines()]


def where(tree: Any) -> Where | MeshOrder:
    """Return the places of the arrays of a tree, or the links of the axes of a mesh.

    The result is a sequence with one row for each array (`ArrayPlace`) or axis (`AxisLinks`).
    Places of arrays are equal to each place that holds all of them:
    `nbdist.where(x) == "batch"`, `== jax.devices()[3]`, `== ("data", None)`.

    Args:
        tree: Arrays of any shape, or a `jax.sharding.Mesh`.

    Returns:
        For arrays a `Where`, with the key `"['w'][0]"` for `tree["w"][0]`. For a mesh a
        `MeshOrder`, with the name of each axis as the key. Sizes are in bytes.

    Raises:
        UsageError: A leaf is no array, or was donated; each is named.

    Examples:
        >>> mesh = nbdist.meshes({"data": 4, "model": 2})
        >>> params = nbdist.place({"w": np.ones((8, 6), np.float32)}, "full", mesh=mesh)
        >>> found = nbdist.where(params)
        >>> found == "full", found == "replicated"
        (True, False)
        >>> row = found["['w']"]
        >>> row.nbytes, row.shard_shape, row.devices[0]
        (192, (2, 3), 'cpu:0')
        >>> found.to_dataframe()[["path", "kind", "spec"]]
            path     kind                 spec
        0  ['w']  sharded  P('data', 'model')
        >>> [(axis.axis, axis.size) for axis in nbdist.where(mesh)]
        [('data', 4), ('model', 2)]
    """
    if isinstance(tree, Mesh):
        return _order(tree)
    leaves, _ = leaves_of(tree, "where")
    held: Counter[str] = Counter()
    for leaf in leaves:
        held.update(_held_by(leaf))
    return Where(leaves=tuple(leaves), bytes_on=dict(held), tree=tree)


def _row(leaf: Leaf) -> ArrayPlace:
    array = leaf.value
    own: dict[str, Any] = {"path": leaf.path, "shape": leaf.shape, "nbytes": leaf.nbytes}
    if not isinstance(array, jax.Array):
        return ArrayPlace(
            **own,
            dtype=str(np.asarray(array).dtype),
            kind="host",
            spec="",
            shard_shape=leaf.shape,
            devices=(),
        )
    sharding = array.sharding
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    return ArrayPlace(
        **own,
        dtype=str(array.dtype),
        kind=_kind(sharding),
        spec=str(sharding.spec) if isinstance(sharding, NamedSharding) else "",
        shard_shape=sharding.shard_shape(leaf.shape),
        devices=tuple(map(platforms.name_of, devices)),
    )


def _kind(sharding: Sharding) -> LayoutKind:
    if len(sharding.device_set) == 1:
        return "one device"
    return "replicated" if sharding.is_fully_replicated else "sharded"


def _held_by(leaf: Leaf) -> dict[str, int]:
    if not isinstance(leaf.value, jax.Array):
        return {}
    sharding = leaf.value.sharding
    part = part_bytes(leaf.shape, leaf.nbytes, sharding)
    return {platforms.name_of(device): part for device in sharding.device_set}


def _shape(leaf: Leaf) -> str:
    kind = getattr(leaf.value, "dtype", type(leaf.value).__name__)
    return f"{kind}{list(leaf.shape)}"


def _place(leaf: Leaf) -> tuple[str, str]:
    """Return the sharding of a leaf and its devices."""
    if not isinstance(leaf.value, jax.Array):
        return "-", _HOST_MEMORY
    sharding = leaf.value.sharding
    names = names_of(sorted(sharding.device_set, key=lambda d: d.id))
    return _sharding(sharding, leaf), f"{names}{_kind_of_memory(sharding)}"


def _sharding(sharding: Sharding, leaf: Leaf) -> str:
    if sharding.is_fully_replicated:
        return "whole on each" if len(sharding.device_set) > 1 else "whole"
    spec = f"{sharding.spec}: " if isinstance(sharding, NamedSharding) else ""
    return f"{spec}parts of {list(sharding.shard_shape(leaf.shape))}"


def _kind_of_memory(sharding: Sharding) -> str:
    """Return the kind of memory if it is not the device's own."""
    kind = sharding.memory_kind
    usual = next(iter(sharding.device_set)).default_memory().kind
    return "" if kind in {None, usual} else f" ({kind})"


def _order(mesh: Mesh) -> MeshOrder:
    if mesh.empty:
        return MeshOrder((), "no devices")
    rows = tuple(
        AxisLinks(axis=axis, size=size, links=_links(mesh, index), sends=role_of(axis).sends)
        for index, (axis, size) in enumerate(mesh.shape.items())
    )
    names = [platforms.name_of(device) for device in mesh.devices.flat]
    width = mesh.devices.shape[-1] if mesh.devices.ndim else 1
    lines = (" ".join(names[i : i + width]) for i in range(0, len(names), width))
    return MeshOrder(rows, "\n".join(lines))


def _links(mesh: Mesh, axis: int) -> str:
    """Return the links between devices that differ only along this axis."""
    size = mesh.devices.shape[axis]
    groups = mesh.devices.swapaxes(axis, -1).reshape(-1, size)
    hosts = processes.hosts()
    if size == 1:
        return "one device: nothing is sent"
    if all(len({d.process_index for d in group}) == 1 for group in groups):
        return "inside each process: memory, or the host's own links between devices"
    if all(len({hosts[d.process_index] for d in group}) == 1 for group in groups):
        return "between processes of one host"
    if all(len({slice_of(d) for d in group}) == 1 for group in groups):
        return "between hosts: the network, or the interconnect within a slice"
    return "between slices: the data centre's network"
