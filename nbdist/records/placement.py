"""Placement of arrays: data of `%dist_show`, also sent to a browser as JSON.

Many arrays share few layouts. An array refers to its layout by index, and a layout to its mesh and
its devices. A layout contains no sizes, so arrays of all shapes share it. Dimension `d` of length
`n` is divided into `parts[d]` equal parts. Blocks are numbered in C order.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from nbdist.records.base import Record, ResultRow

LayoutKind = Literal[
    "sharded",
    "replicated",
    "mirrored",
    "per replica",
    "one device",
    "host",
    "deleted",
    "abstract",
]
"""`host`: NumPy. `deleted`: donated or deleted. `abstract`: no data yet."""

OWN_RANK = -1
"""In a report of a rank: the rank itself."""


HOST_MEMORY = "host memory"
"""Name of the device of NumPy arrays."""


class PlacedDevice(Record, frozen=True, array_like=True):
    """A memory that contains arrays, such as `gpu:0` or `host memory`."""

    rank: int
    name: str


class MeshShape(Record, frozen=True):
    """A JAX mesh. `devices` are in mesh order, last axis fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]


class Layout(Record, frozen=True):
    """Layout of an array on devices.

    Attributes:
        kind: kind of layout.
        devices: devices that hold a block.
        blocks: number of the block on each device.
        parts: number of parts of each dimension; empty if no dimension is sharded.
        axes: mesh axes of each dimension.
        spec: PartitionSpec as in code, `P('data', None)`; empty if there is none.
        mesh: index of the mesh; -1 if there is none.
        owners: number of different arrays under this path, one for each rank that has its own.
    """

    kind: LayoutKind
    devices: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    spec: str = ""
    mesh: int = -1
    owners: int = 1

    @property
    def pieces(self) -> int:
        """Number of different blocks."""
        return math.prod(self.parts)

    @property
    def copies(self) -> int:
        """Number of devices that hold the same block of the same array."""
        return max(1, len(self.devices) // (self.pieces * self.owners))


class PlacedArray(Record, frozen=True, array_like=True):
    """An array or a variable.

    Attributes:
        path: access path from the name on, such as `params`, `['w']`; joined, an expression.
        nbytes: bytes of the whole array, counted once.
        ranks: ranks with this layout if ranks differ; else empty.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    layout: int
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "".join(self.path)


class Placement(Record, frozen=True):
    """Placement of the arrays behind some names.

    Attributes:
        names: names in the request.
        hosts: host of each rank; empty for a plan, whose devices are positions in the mesh.
        notes: remarks: differences between ranks, arrays reached by two paths.
    """

    names: tuple[str, ...]
    hosts: dict[int, str]
    devices: tuple[PlacedDevice, ...]
    meshes: tuple[MeshShape, ...]
    layouts: tuple[Layout, ...]
    arrays: tuple[PlacedArray, ...]
    notes: tuple[str, ...] = ()


class PlacementReport(Record, frozen=True):
    """Report of one rank. Ranks with equal placement send equal bytes.

    Attributes:
        missing: names that do not exist on the rank.
        empty: names without an array, with the type of their value.
    """

    devices: tuple[PlacedDevice, ...]
    meshes: tuple[MeshShape, ...]
    layouts: tuple[Layout, ...]
    arrays: tuple[PlacedArray, ...]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    empty: dict[str, str] = msgspec.field(default_factory=dict)


class ArrayPlace(ResultRow, frozen=True):
    """An array and the devices that hold it.

    Attributes:
        path: Expression that leads to the array, such as `params['w']`; empty for one array.
        shape: Elements along each dimension of the whole array.
        dtype: Type of the elements.
        nbytes: Bytes of the whole array, once.
        kind: Kind of layout, such as `sharded` or `replicated`.
        spec: `PartitionSpec` as Python writes it; empty if there is none.
        shard_shape: Elements along each dimension on each device.
        devices: Names of the devices; empty if no device holds the array.
        ranks: Ranks that hold the array so; empty if all do.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: LayoutKind
    spec: str
    shard_shape: tuple[int, ...]
    devices: tuple[str, ...]
    ranks: tuple[int, ...] = ()


class AxisLinks(ResultRow, frozen=True):
    """An axis of a mesh and the links that its collectives use.

    Attributes:
        axis: Name of the axis.
        size: Number of devices along the axis.
        links: Slowest links between these devices.
        sends: Use of an axis of this name.
    """

    axis: str
    size: int
    links: str
    sends: str
