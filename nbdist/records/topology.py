"""Hardware of a plan: devices and the links between them."""

from __future__ import annotations

import math

import msgspec

from nbdist.records.base import Record

Extent = tuple[int, ...]
"""Factors of a mesh axis at each level of a topology, innermost first.

`(4, 2)` is an axis of size 8: four devices on each of two hosts."""


class Chip(Record, frozen=True):
    """One kind of device.

    Attributes:
        name: common name, such as `H100`.
        platform: JAX's platform: `gpu`, `tpu`, `cpu`, or that of a plugin.
        memory_bytes: memory of the device.
        flops: dense peak by type (`bfloat16`, `float32`, ...), in operations a second. `float32` is
            exact. `tensorfloat32` is the reduced precision of float32 products.
        bytes_per_s: memory bandwidth.
        source: source of the figures.
    """

    name: str
    platform: str
    memory_bytes: int
    flops: dict[str, float]
    bytes_per_s: float
    source: str


class Level(Record, frozen=True):
    """Links of one kind that join `size` units of the level below.

    Attributes:
        name: `process`, `host`, `rack`, `network`, `ICI x` or `DCN`.
        size: number of joined units; devices on the innermost level.
        latency_s: latency of a message over one link.
        bytes_per_s: bandwidth of one direction for each device while all send; on a ring or a line,
            to each neighbour.
        ring: links join neighbours only (a torus axis of TPUs). If False, all units are joined.
        wraps: the last unit is a neighbour of the first. If False, the ring is a line.
        alone_bytes_per_s: bandwidth of one device while the others of its host do not send; None if
            equal.
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
        assumed: assumptions, one line each.
    """

    chip: Chip
    levels: tuple[Level, ...]
    assumed: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return math.prod(level.size for level in self.levels)


class Link(Record, frozen=True):
    """Measurement of a level's links. The attributes are those of `Level`."""

    latency_s: float
    bytes_per_s: float
    alone_bytes_per_s: float | None = None


class Product(Record, frozen=True):
    """Measured rate of products of square matrices while all devices compute.

    Attributes:
        dtype: type of both matrices and of the product.
        size: rows and columns of each matrix.
        flops: operations a second of the slowest device.
    """

    dtype: str
    size: int
    flops: float


class Way(Record, frozen=True):
    """Duration of a square product on the device of its matrices and on another device.

    Attributes:
        size: rows and columns.
        home_s: seconds on the device of the matrices.
        there_s: seconds on the other device, including the transfer of one matrix.
    """

    size: int
    home_s: float
    there_s: float

    @property
    def pays(self) -> bool:
        """True if the other device is faster by more than 10 %; less is noise."""
        return self.there_s * 1.1 < self.home_s


class Crossing(Record, frozen=True):
    """Matrix size from which a transfer to other devices pays.

    Attributes:
        ways: measurements by size.
        size: rows of a square float32 matrix, interpolated; None if no measured size pays.
        home: description of the device of the matrices.
        there: description of the other devices.
    """

    ways: tuple[Way, ...]
    size: float | None
    home: str
    there: str

    @property
    def nbytes(self) -> float:
        """Bytes of one such matrix; infinite if no size pays."""
        return math.inf if self.size is None else 4 * self.size**2


class Bench(Record, frozen=True):
    """Measurements of a cluster's devices while all work. Each figure is that of the slowest.

    Attributes:
        devices: number of devices.
        products: matrix products by type and size.
        bytes_per_s: bytes read and written by copies in a device's memory.
        links: all-reduces over each level.
        transfers: `to device`, `to host` and, with several devices a process, `device to device`.
        dispatch_s: seconds from the call of the smallest program to its result.
        crossing: size from which a transfer pays, on the first process; None with one device.
    """

    devices: int
    products: tuple[Product, ...]
    bytes_per_s: float
    links: dict[str, Link]
    transfers: dict[str, Link] = msgspec.field(default_factory=dict)
    dispatch_s: float = 0.0
    crossing: Crossing | None = None


class DeviceState(Record, frozen=True):
    """A device and its memory use.

    Attributes:
        name: platform and number, such as `cuda:0`.
        platform: platform in JAX or TensorFlow.
        kind: product name.
        process: rank of the device.
        host: host of the rank.
        plugin: package and version of the platform's plugin.
        memory_bytes: memory available to a program, for a CPU that of its host; None if the runtime
            does not report it.
        used_bytes: used part of `memory_bytes`; None if unknown.
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
    """Devices that a process knows.

    Attributes:
        devices: devices of all platforms and processes.
        topology: topology for plans; None if the devices are unknown.
        fault: reason for a missing topology.
        bench: last measurements; None if not measured.
    """

    devices: tuple[DeviceState, ...]
    topology: Topology | None
    fault: str
    bench: Bench | None


class LocalDevices(Record, frozen=True):
    """Devices of one process, all of one kind.

    Attributes:
        host: name of the host.
        platform: JAX's platform.
        kind: JAX's `device_kind`.
        devices: number of devices.
        memory_bytes: memory of one device for programs; None if the runtime does not report it.
        slice_index: index of the slice, for TPUs in several slices.
        coords: position (x, y, z) of each TPU in its slice.
    """

    host: str
    platform: str
    kind: str
    devices: int
    memory_bytes: int | None = None
    slice_index: int = 0
    coords: tuple[tuple[int, ...], ...] = ()
