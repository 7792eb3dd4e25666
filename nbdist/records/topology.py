"""What a plan is made for: devices, and the links between them."""

from __future__ import annotations

import math

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
        flops: dense peak by type (`bfloat16`, `float32`, ...), in operations a second.
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
        name: `host`, `network`, `ICI x`.
        size: how many it joins; on the innermost level, devices.
        latency_s: for each message, over one link.
        bytes_per_s: that every device can send one way, when all send at once.
        ring: links join neighbours only, in a ring (a torus axis of TPUs); else all join all.
    """

    name: str
    size: int
    latency_s: float
    bytes_per_s: float
    ring: bool = False


class Topology(Record, frozen=True):
    """Devices of one kind, innermost level first."""

    chip: Chip
    levels: tuple[Level, ...]

    @property
    def devices(self) -> int:
        return math.prod(level.size for level in self.levels)
