"""Names of cloud machine types and TPU slices, as the providers spell them.

Sources: aws.amazon.com/ec2/instance-types (p3 to p6, g4dn to g6e), cloud.google.com/compute/docs
(gpus, network bandwidth), cloud.google.com/tpu/docs (names of slices). NICs of a host that share
one device are written as one: 32 x 100 Gb/s of a p5.48xlarge are 8 x 400.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class MachineType(NamedTuple):
    """A machine type.

    Attributes:
        devices: devices of a host.
        chip: name of the chip.
        network: bandwidth of a host, one way.
    """

    devices: int
    chip: str
    network: str


class Slice(NamedTuple):
    """A slice of TPUs: the name of the chip, and the number of chips."""

    chip: str
    chips: int


MACHINE_TYPES = {
    "p3.2xlarge": MachineType(1, "V100-16GB", "10 Gbps"),
    "p3.8xlarge": MachineType(4, "V100-16GB", "10 Gbps"),
    "p3.16xlarge": MachineType(8, "V100-16GB", "25 Gbps"),
    "p3dn.24xlarge": MachineType(8, "V100-32GB", "100 Gbps"),
    "p4d.24xlarge": MachineType(8, "A100-40GB", "4x100 Gbps"),
    "p4de.24xlarge": MachineType(8, "A100-80GB", "4x100 Gbps"),
    "p5.48xlarge": MachineType(8, "H100", "8x400 Gbps"),
    "p5e.48xlarge": MachineType(8, "H200", "8x400 Gbps"),
    "p5en.48xlarge": MachineType(8, "H200", "8x400 Gbps"),
    "p6-b200.48xlarge": MachineType(8, "B200", "8x400 Gbps"),
    "p6-b300.48xlarge": MachineType(8, "B300", "8x800 Gbps"),
    "g4dn.xlarge": MachineType(1, "T4", "25 Gbps"),
    "g4dn.12xlarge": MachineType(4, "T4", "50 Gbps"),
    "g4dn.metal": MachineType(8, "T4", "100 Gbps"),
    "g5.xlarge": MachineType(1, "A10G", "10 Gbps"),
    "g5.12xlarge": MachineType(4, "A10G", "40 Gbps"),
    "g5.48xlarge": MachineType(8, "A10G", "100 Gbps"),
    "g6.xlarge": MachineType(1, "L4", "10 Gbps"),
    "g6.12xlarge": MachineType(4, "L4", "40 Gbps"),
    "g6.48xlarge": MachineType(8, "L4", "100 Gbps"),
    "g6e.xlarge": MachineType(1, "L40S", "20 Gbps"),
    "g6e.12xlarge": MachineType(4, "L40S", "100 Gbps"),
    "g6e.48xlarge": MachineType(8, "L40S", "4x100 Gbps"),
    "a2-highgpu-1g": MachineType(1, "A100-40GB", "24 Gbps"),
    "a2-highgpu-2g": MachineType(2, "A100-40GB", "32 Gbps"),
    "a2-highgpu-4g": MachineType(4, "A100-40GB", "50 Gbps"),
    "a2-highgpu-8g": MachineType(8, "A100-40GB", "100 Gbps"),
    "a2-ultragpu-1g": MachineType(1, "A100-80GB", "24 Gbps"),
    "a2-ultragpu-2g": MachineType(2, "A100-80GB", "32 Gbps"),
    "a2-ultragpu-4g": MachineType(4, "A100-80GB", "50 Gbps"),
    "a2-ultragpu-8g": MachineType(8, "A100-80GB", "100 Gbps"),
    "a3-highgpu-8g": MachineType(8, "H100", "4x200 Gbps"),
    "a3-megagpu-8g": MachineType(8, "H100", "8x200 Gbps"),
    "a3-ultragpu-8g": MachineType(8, "H200", "8x400 Gbps"),
    "a4-highgpu-8g": MachineType(8, "B200", "8x400 Gbps"),
    "g2-standard-4": MachineType(1, "L4", "10 Gbps"),
    "g2-standard-24": MachineType(2, "L4", "32 Gbps"),
    "g2-standard-48": MachineType(4, "L4", "50 Gbps"),
    "g2-standard-96": MachineType(8, "L4", "100 Gbps"),
}
"""Machine types of AWS and Google Cloud by name."""

_BY_CORES = {
    "v2": "TPU v2",
    "v3": "TPU v3",
    "v4": "TPU v4",
    "v5p": "TPU v5p",
    **dict.fromkeys(("v7", "v7x", "tpu7x"), "TPU v7"),
}
"""Generations whose slices are named by cores, two a chip.

Source for TPU v7: AI-Hypercomputer/xpk src/xpk/core/system_characteristics.py.
"""

_BY_CHIPS = {
    **dict.fromkeys(("v5e", "v5litepod"), "TPU v5e"),
    "v6e": "TPU v6e",
}
_SLICE = re.compile(r"(?:tpu\s+)?([a-z0-9]+)-(\d+)", re.IGNORECASE)


def slice_named(name: str) -> Slice | None:
    """Return the slice of a name such as `v5p-128` (64 chips) or `v5litepod-16` (16 chips)."""
    match = _SLICE.fullmatch(name)
    generation = match[1].lower() if match else ""
    number = int(match[2]) if match else 0
    if generation in _BY_CORES:
        return Slice(_BY_CORES[generation], -(-number // 2))
    return Slice(_BY_CHIPS[generation], number) if generation in _BY_CHIPS else None
