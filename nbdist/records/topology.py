"""What a plan is made for: devices, and the links between them."""

from __future__ import annotations

import math

import msgspec

from nbdist.records.base import Record

Extent = tuple[int, ...]
"""How a mesh axis lies in a topology: its factor at each level, innermost first. `(4, 2)` is an
axis of 8: four devices of each of two hosts."""


class Chip(Record, frozen=True):
    """One kind of device.

    Attributes:
        name: as people call it, `H100`.
        platform: JAX's word: `gpu`, `tpu`, `cpu`, or a plugin's own.
        memory_bytes: its own memory.
        flops: dense peak by type (`bfloat16`, `float32`, ...), in operations a second. `float32` is
            exact; what else a product of float32 may be computed in is `tensorfloat32`.
        bytes_per_s: between the device and its memory.
        source: where the figures are from.
    """

    name: str
    platform: str
    memory_bytes: int
    flops: dict[str, float]
    bytes_per_s: float
    source: str


class Level(Record, frozen=True):
    """Links of one kind, which join `size` of what the level below holds.

    Attributes:
        name: `process`, `host`, `rack`, `network`, `ICI x`, `DCN`.
        size: how many it joins; on the innermost level, devices.
        latency_s: for each message, over one link.
        bytes_per_s: that every device can send one way, when all send at once; on a ring or a line,
            to each of its neighbours.
        ring: links join neighbours only, in a ring (a torus axis of TPUs); else all join all.
        wraps: of neighbours, whether the last is the first one's: where not, a ring is a line.
        alone_bytes_per_s: that one device can send while the others of its host are silent; None
            where that is no more.
    """

    name: str
    size: int
    latency_s: float
    bytes_per_s: float
    ring: bool = False
    wraps: bool = True
    alone_bytes_per_s: float | None = None


class Topology(Record, frozen=True):
    """Devices of one kind, innermost level first.

    Attributes:
        assumed: what was neither said nor measured, in a line each.
    """

    chip: Chip
    levels: tuple[Level, ...]
    assumed: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return math.prod(level.size for level in self.levels)


class Link(Record, frozen=True):
    """What was measured of a level's links; the attributes are those of `Level`."""

    latency_s: float
    bytes_per_s: float
    alone_bytes_per_s: float | None = None


class Product(Record, frozen=True):
    """What a device reached in products of square matrices, while all others did the same.

    Attributes:
        dtype: of both matrices and of the product.
        size: rows and columns of each.
        flops: operations a second; of the slowest device.
    """

    dtype: str
    size: int
    flops: float


class Way(Record, frozen=True):
    """A square product where its matrices are, against elsewhere with the way of one of them.

    Attributes:
        size: rows and columns.
        home_s: where they are.
        there_s: elsewhere, the way to it included.
    """

    size: int
    home_s: float
    there_s: float

    @property
    def pays(self) -> bool:
        """Whether the way is worth it: what is less than a tenth is noise."""
        return self.there_s * 1.1 < self.home_s


class Crossing(Record, frozen=True):
    """From which size on the way to other devices is worth it.

    Attributes:
        ways: as they were measured, by size.
        size: of square matrices of float32, between two that were measured; None where the way is
            worth it for none of them.
        home: where the matrices are, for people.
        there: the other devices.
    """

    ways: tuple[Way, ...]
    size: float | None
    home: str
    there: str

    @property
    def nbytes(self) -> float:
        """Of one such matrix; infinite where there is no crossing."""
        return math.inf if self.size is None else 4 * self.size**2


class Bench(Record, frozen=True):
    """What was measured of a cluster's devices, all at work at once; of each the slowest.

    Attributes:
        devices: how many there were.
        products: by type and size.
        bytes_per_s: read and written in copies within a device's memory.
        links: of each level that joins some, what all-reduces over it reached.
        transfers: `to device`, `to host`, and where a process has several, `device to device`.
        dispatch_s: from a call of the smallest program to its result.
        crossing: from which size on the way to a device is worth it, on the first process; None
            where there is but one device.
    """

    devices: int
    products: tuple[Product, ...]
    bytes_per_s: float
    links: dict[str, Link]
    transfers: dict[str, Link] = msgspec.field(default_factory=dict)
    dispatch_s: float = 0.0
    crossing: Crossing | None = None


class DeviceState(Record, frozen=True):
    """A device, and what of its memory is used now.

    Attributes:
        name: `cuda:0`, its platform and number.
        platform: JAX's word, or TensorFlow's.
        kind: what its maker calls it.
        process: the rank that drives it.
        host: where that is.
        plugin: the package that brings its platform, with the version.
        memory_bytes: that a program may use of it, of a CPU its host's; None where nobody tells, as
            the runtime of some plugins, or another process.
        used_bytes: of these.
    """

    name: str
    platform: str
    kind: str
    process: int
    host: str
    plugin: str
    memory_bytes: int | None = None
    used_bytes: int | None = None


class DevicesSeen(Record, frozen=True):
    """What a process has seen of the devices that it knows.

    Attributes:
        devices: of all platforms and processes.
        topology: what steps are planned for; None where nobody knows the devices.
        fault: why there is none.
        bench: what was measured last; None where nothing was.
    """

    devices: tuple[DeviceState, ...]
    topology: Topology | None
    fault: str
    bench: Bench | None


class LocalDevices(Record, frozen=True):
    """What one process says of the devices that it drives, all of one kind.

    Attributes:
        platform: JAX's word.
        kind: JAX's `device_kind`.
        memory_bytes: that a program may use of one device; None where the runtime does not tell.
        slice_index: of TPUs in several slices, which.
        coords: of TPUs, where each is in its slice: (x, y, z).
    """

    host: str
    platform: str
    kind: str
    devices: int
    memory_bytes: int | None = None
    slice_index: int = 0
    coords: tuple[tuple[int, ...], ...] = ()
