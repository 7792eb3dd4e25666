"""GPUs on PCIe, and further GPUs on fast links, with their usual hosts."""

from __future__ import annotations

from nbdist.planner.hardware.machine import (
    AMPERE,
    B200,
    GB200,
    GBIT,
    NCCL,
    NETWORK_S,
    NVLINK_S,
    PCIE_S,
    Host,
    Machine,
    gpu,
    nvlink_host,
)

_PCIE = {3: 15.75, 4: 31.5, 5: 63.0}
"""GB/s one way of 16 lanes, by generation."""


def _card(generation: int, usual: str, *, network: tuple[int, float] = (1, 100)) -> Host:
    """Return a host of cards on PCIe; NICs with Gb/s each."""
    rate = _PCIE[generation]
    return Host(
        devices=8,
        link=f"PCIe {generation}",
        latency_s=PCIE_S,
        bytes_per_s=rate * 1e9,
        nics=network[0],
        nic_bytes_per_s=network[1] * GBIT,
        pcie_bytes_per_s=rate * 1e9,
        network_latency_s=NETWORK_S,
        source=f"PCI-SIG (16 lanes); {NCCL}",
        usual=usual,
    )


_TURING = {"float32": 8.1, "float16": 65.0, "int8": 130.0}
_ADA = "NVIDIA datasheet (without sparsity)"
_MI300 = {
    "float32": 163.4,
    "tensorfloat32": 653.7,
    "bfloat16": 1307.4,
    "float16": 1307.4,
    "float8": 2614.9,
    "int8": 2614.9,
}
_MI300_HOST = Host(
    devices=8,
    link="Infinity Fabric",
    latency_s=NVLINK_S,
    bytes_per_s=448e9,
    nics=8,
    nic_bytes_per_s=400 * GBIT,
    pcie_bytes_per_s=63e9,
    network_latency_s=NETWORK_S,
    source=f"AMD MI300X datasheet (7 links of 64 GB/s one way); {NCCL}",
    usual="8 x 400 Gb/s a host, as Azure ND MI300X v5",
)
CARDS = (
    Machine(
        chip=gpu("T4", 16 * 10**9, 0.32, _TURING, "NVIDIA T4 datasheet"),
        host=_card(3, "AWS g4dn.metal: 100 Gb/s a host"),
        names=r"(nvidia)?(tesla)?t4",
    ),
    Machine(
        chip=gpu(
            "L4",
            24 * 10**9,
            0.3,
            {
                "float32": 30.3,
                "tensorfloat32": 60.0,
                "bfloat16": 121.0,
                "float16": 121.0,
                "float8": 242.0,
                "int8": 242.0,
            },
            f"L4: {_ADA}",
        ),
        host=_card(4, "AWS g6.48xlarge: 100 Gb/s a host"),
        names=r"(nvidia)?l4",
    ),
    Machine(
        chip=gpu(
            "L40S",
            48 * 10**9,
            0.864,
            {
                "float32": 91.6,
                "tensorfloat32": 183.0,
                "bfloat16": 362.0,
                "float16": 362.0,
                "float8": 733.0,
                "int8": 733.0,
            },
            f"L40S: {_ADA}",
        ),
        host=_card(4, "AWS g6e.48xlarge: 4 x 100 Gb/s a host", network=(4, 100)),
        names=r"(nvidia)?l40s",
    ),
    Machine(
        chip=gpu(
            "A10G",
            24 * 10**9,
            0.6,
            {
                "float32": 31.52,
                "tensorfloat32": 35.0,
                "bfloat16": 70.0,
                "float16": 70.0,
                "int8": 140.0,
            },
            f"A10G: {_ADA}",
        ),
        host=_card(4, "AWS g5.48xlarge: 100 Gb/s a host"),
        names=r"(nvidia)?a10g",
    ),
    Machine(
        chip=gpu(
            "V100-PCIe",
            16 * 10**9,
            0.9,
            {"float32": 14.0, "float16": 112.0},
            "NVIDIA V100 datasheet (PCIe)",
        ),
        host=_card(3, "assumed: 100 Gb/s a host"),
        names=r"(tesla)?v100pcie(16gb)?",
    ),
    Machine(
        chip=gpu("A100-40GB-PCIe", 40 * 10**9, 1.555, AMPERE, "NVIDIA A100 datasheet (PCIe)"),
        host=_card(4, "assumed: 100 Gb/s a host"),
        names=r"(nvidia)?a100(pcie(40gb)?|40gbpcie)",
    ),
    Machine(
        chip=gpu("A100-80GB-PCIe", 80 * 10**9, 1.935, AMPERE, "NVIDIA A100 datasheet (PCIe)"),
        host=_card(4, "assumed: 100 Gb/s a host"),
        names=r"(nvidia)?a100(pcie80gb|80gbpcie)",
    ),
    Machine(
        chip=gpu(
            "H100-PCIe",
            80 * 10**9,
            2.0,
            {
                "float32": 51.0,
                "tensorfloat32": 378.0,
                "bfloat16": 756.0,
                "float16": 756.0,
                "float8": 1513.0,
                "int8": 1513.0,
            },
            "NVIDIA H100 datasheet (PCIe, without sparsity)",
        ),
        host=_card(5, "assumed: 400 Gb/s a host", network=(1, 400)),
        names=r"(nvidia)?h100(80gb)?pcie(80gb)?",
    ),
    Machine(
        chip=gpu(
            "H20",
            96 * 10**9,
            4.0,
            {
                "float32": 44.0,
                "tensorfloat32": 74.0,
                "bfloat16": 148.0,
                "float16": 148.0,
                "float8": 296.0,
                "int8": 296.0,
            },
            "NVIDIA H20 datasheet, as reported by SemiAnalysis (2023-11)",
        ),
        host=nvlink_host(4, 450, (8, 400), 63, "assumed: 8 x 400 Gb/s a host, as DGX H100"),
        names=r"(nvidia)?h20(96gb)?",
    ),
    Machine(
        chip=gpu(
            "B300",
            288 * 10**9,
            8.0,
            {**B200, "float32": 75.0, "int8": 150.0},
            "NVIDIA HGX B300 datasheet (without sparsity); memory nominal",
        ),
        host=nvlink_host(5, 900, (8, 800), 126, "NVIDIA HGX B300: 8 x 800 Gb/s a host"),
        names=r"(nvidia)?b300(sxm6?)?(ac)?(288gb)?",
    ),
    Machine(
        chip=gpu(
            "GB300",
            288 * 10**9,
            8.0,
            {**GB200, "float32": 80.0, "int8": 160.0},
            "NVIDIA GB300 NVL72 datasheet (without sparsity); memory nominal",
        ),
        host=nvlink_host(
            5,
            900,
            (4, 800),
            126,
            "NVIDIA GB300 NVL72: 18 hosts of 4 devices on one NVLink; 800 Gb/s a device",
            devices=4,
            rack=18,
        ),
        names=r"(nvidia)?gb300",
    ),
    Machine(
        chip=gpu("MI300X", 192 * 10**9, 5.3, _MI300, "AMD MI300X datasheet (without sparsity)"),
        host=_MI300_HOST,
        names=r"(amd)?(instinct)?mi300x",
    ),
    Machine(
        chip=gpu("MI325X", 256 * 10**9, 6.0, _MI300, "AMD MI325X datasheet (without sparsity)"),
        host=_MI300_HOST,
        names=r"(amd)?(instinct)?mi325x",
    ),
)
