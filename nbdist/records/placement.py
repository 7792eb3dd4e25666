"""Where arrays are: what `%dist_show` gathers, shows and can send to a browser as JSON.

Arrays are many and ways to lay them out few: an array names its layout, a layout its mesh and its
devices, all by their index. A layout says nothing of sizes, so that arrays of all shapes share it:
dimension `d` of length `n` is cut in `parts[d]` equal parts, and blocks count as in a C array.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from nbdist.records.base import Record

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
"""`host`: NumPy; `deleted`: donated or deleted, its data are gone; `abstract`: has no data yet."""

OWN_RANK = -1
"""In what a rank says: the rank that says it."""


HOST_MEMORY = "host memory"
"""The name of where NumPy's arrays are."""


class PlacedDevice(Record, frozen=True, array_like=True):
    """A memory that holds arrays, as in `gpu:0`, `host memory`."""

    rank: int
    name: str


class MeshShape(Record, frozen=True):
    """A mesh of JAX's; `devices` in its order, the last axis fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]


class Layout(Record, frozen=True):
    """How an array lies on devices.

    Attributes:
        kind: in a word.
        devices: those that hold a block.
        blocks: for each of them, which block.
        parts: for each dimension, in how many it is cut; empty where none is.
        axes: for each dimension, the mesh axes it is cut over.
        spec: as the user would write it, `P('data', None)`; empty where there is none.
        mesh: -1 where there is none.
        owners: how many arrays of this path there are: where each rank has its own, as many.
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
        """Different blocks."""
        return math.prod(self.parts)

    @property
    def copies(self) -> int:
        """Devices that hold the same block of the same array."""
        return max(1, len(self.devices) // (self.pieces * self.owners))


class PlacedArray(Record, frozen=True, array_like=True):
    """An array or a variable.

    Attributes:
        path: what leads to it, from the name on; joined, an expression: `params`, `['w']`.
        nbytes: of the whole array, once.
        ranks: those that have it so, where ranks differ; else empty.
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
    """Where the arrays behind some names are.

    Attributes:
        names: as asked for.
        hosts: of each rank; none of a plan, whose devices are numbers in the mesh's order.
        notes: what is worth a line: where ranks differ, what was reached twice.
    """

    names: tuple[str, ...]
    hosts: dict[int, str]
    devices: tuple[PlacedDevice, ...]
    meshes: tuple[MeshShape, ...]
    layouts: tuple[Layout, ...]
    arrays: tuple[PlacedArray, ...]
    notes: tuple[str, ...] = ()


class PlacementReport(Record, frozen=True):
    """What one rank says; ranks that have the same say the same, byte for byte.

    Attributes:
        missing: names that it lacks.
        empty: names that lead to no array, with the type of what they lead to.
    """

    devices: tuple[PlacedDevice, ...]
    meshes: tuple[MeshShape, ...]
    layouts: tuple[Layout, ...]
    arrays: tuple[PlacedArray, ...]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    empty: dict[str, str] = msgspec.field(default_factory=dict)
