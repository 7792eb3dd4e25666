"""Records of machines and builders of their hosts and chips."""

from __future__ import annotations

from nbdist.records import Chip
from nbdist.records.base import Record

GIB = 2**30
GBIT = 1e9 / 8  # bytes


class Host(Record, frozen=True):
    """Usual host of a chip.

    Attributes:
        devices: devices in a host.
        link: name of the links between its devices.
        latency_s: latency of a message over a link.
        bytes_per_s: bandwidth of a device over the link, one way.
        nics: number of network interfaces.
        nic_bytes_per_s: bandwidth of each network interface, one way.
        pcie_bytes_per_s: bandwidth between a device and its host, or its NIC, one way.
        network_latency_s: latency of a message between hosts.
        source: source of the figures of links.
        usual: product that has this number of devices and NICs.
        rack: hosts that the same link also joins.
    """

    devices: int
    link: str
    latency_s: float
    bytes_per_s: float
    nics: int
    nic_bytes_per_s: float
    pcie_bytes_per_s: float
    network_latency_s: float
    source: str
    usual: str
    rack: int = 1


class Torus(Record, frozen=True):
    """Shapes of slices of a TPU generation; links are those of its `Host`.

    Attributes:
        shapes: shapes smaller than a cube; all shapes if there are no cubes.
        longest: shape of the largest slice.
        cube: side of the cubes that optical switches join, which close every ring. If 0, only an
            axis as long as the pod's is a ring.
        source: source of these figures.
    """

    shapes: tuple[tuple[int, ...], ...]
    longest: tuple[int, ...]
    cube: int
    source: str


class Machine(Record, frozen=True):
    """A chip and the host that it is built into.

    Attributes:
        names: regular expression of the names that JAX and people use, in lower-case letters and
            digits. It must match in full: a slice of a GPU (MIG) and a PCIe card, which NVLink does
            not join, are other devices.
    """

    chip: Chip
    host: Host
    names: str
    torus: Torus | None = None


# Latency of a step of a ring in NCCL's cost model, with the protocol Simple for large messages.
NVLINK_S = 3.4e-6
PCIE_S = 5.7e-6
NETWORK_S = 14e-6
NCCL = "latencies: NCCL src/graph/tuning.cc (ring, Simple)"
NETWORKS = "stas00/ml-engineering network/README.md"
ACCELERATORS = "stas00/ml-engineering compute/accelerator/README.md"
XLA = "memory as CUDA reports it and its bandwidth: openxla/xla target_config/specs"


def nvlink_host(
    generation: int,
    each: float,
    nics: tuple[int, float],
    pcie: float,
    usual: str,
    *,
    devices: int = 8,
    rack: int = 1,
) -> Host:
    """Return a host with NVLink: `each` and `pcie` in GB/s one way, NICs with Gb/s each."""
    return Host(
        devices=devices,
        link=f"NVLink {generation}",
        latency_s=NVLINK_S,
        bytes_per_s=each * 1e9,
        nics=nics[0],
        nic_bytes_per_s=nics[1] * GBIT,
        pcie_bytes_per_s=pcie * 1e9,
        network_latency_s=NETWORK_S,
        source=f"{NETWORKS}; {NCCL}",
        usual=usual,
        rack=rack,
    )


def gpu(
    name: str, memory_bytes: int, terabytes_per_s: float, teraflops: dict[str, float], source: str
) -> Chip:
    return Chip(
        name=name,
        platform="gpu",
        memory_bytes=memory_bytes,
        flops={dtype: rate * 1e12 for dtype, rate in teraflops.items()},
        bytes_per_s=terabytes_per_s * 1e12,
        source=source,
    )


# A V100 has no bfloat16 units: XLA widens it to float32.
VOLTA = {"float32": 15.7, "float16": 125.0}
AMPERE = {
    "float32": 19.5,
    "tensorfloat32": 156.0,
    "bfloat16": 312.0,
    "float16": 312.0,
    "int8": 624.0,
}
HOPPER = {
    "float32": 67.0,
    "tensorfloat32": 494.5,
    "bfloat16": 989.0,
    "float16": 989.0,
    "float8": 1979.0,
    "int8": 1979.0,
}
B200 = {
    "float32": 80.0,
    "tensorfloat32": 1125.0,
    "bfloat16": 2250.0,
    "float16": 2250.0,
    "float8": 4500.0,
    "int8": 4500.0,
}
GB200 = {
    "float32": 90.0,
    "tensorfloat32": 1250.0,
    "bfloat16": 2500.0,
    "float16": 2500.0,
    "float8": 5000.0,
    "int8": 5000.0,
}
