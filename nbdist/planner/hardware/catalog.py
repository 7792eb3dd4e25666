"""Catalog of known hardware: chips, their usual hosts, and the links between them.

Figures are nominal and dense. Memory is the size that the runtime reports if that is published,
else nominal; the chip's source names it. For CUDA it is that of the whole device, as in XLA's
target descriptions. `float32` is exact: outside of tensor cores on GPUs, and on TPUs six passes in
bfloat16 (`jax.lax.Precision.HIGHEST`).
"""

from __future__ import annotations

from nbdist.planner.hardware.gpu_cards import CARDS
from nbdist.planner.hardware.machine import (
    ACCELERATORS,
    AMPERE,
    B200,
    GB200,
    GBIT,
    GIB,
    HOPPER,
    NCCL,
    NETWORK_S,
    PCIE_S,
    VOLTA,
    XLA,
    Host,
    Machine,
    Torus,
    gpu,
    nvlink_host,
)
from nbdist.records import Chip

# NVLink joins eight V100s in a cube, not all pairs: the rate is that of rings over all links.
_V100_SHEET = "NVIDIA V100 datasheet (SXM2)"
_A100_SHEET = f"NVIDIA A100 datasheet (SXM4), in {ACCELERATORS}"
_H100_SHEET = f"NVIDIA H100 datasheet (SXM5, without sparsity), in {ACCELERATORS}"
_BLACKWELL_SHEET = (
    f"NVIDIA Blackwell architecture brief (without sparsity), in {ACCELERATORS}; float32: "
    "glennklockwood.com/garden/processors/B200"
)

_GPUS = (
    Machine(
        chip=gpu("V100-16GB", 16935682048, 0.898048, VOLTA, f"{_V100_SHEET}; {XLA}/v100.txtpb"),
        host=nvlink_host(2, 150, (1, 25), 15.75, "AWS p3.16xlarge: 25 Gb/s a host"),
        names=r"(tesla)?v100(sxm[23]?)?(16(gb)?)?",
    ),
    Machine(
        chip=gpu(
            "V100-32GB",
            32 * GIB,
            0.898048,
            VOLTA,
            f"{_V100_SHEET}; memory nominal; its bandwidth: openxla/xla target_config/specs/v100",
        ),
        host=nvlink_host(2, 150, (1, 100), 15.75, "AWS p3dn.24xlarge: 100 Gb/s a host"),
        names=r"(tesla)?v100(sxm[23]?)?32(gb)?",
    ),
    Machine(
        chip=gpu(
            "A100-40GB", 42331013120, 1.5552, AMPERE, f"{_A100_SHEET}; {XLA}/a100_sxm_40.txtpb"
        ),
        host=nvlink_host(3, 300, (4, 100), 31, "AWS p4d.24xlarge: 4 x 100 Gb/s a host"),
        names=r"(nvidia)?a100(sxm4?)?(40(gb)?)?",
    ),
    Machine(
        chip=gpu(
            "A100-80GB", 85100068864, 2.03904, AMPERE, f"{_A100_SHEET}; {XLA}/a100_sxm_80.txtpb"
        ),
        host=nvlink_host(
            3, 300, (8, 200), 31, "NVIDIA Selene: 8 x 200 Gb/s a host (arXiv:2104.04473)"
        ),
        names=r"(nvidia)?a100(sxm4?)?80(gb)?",
    ),
    Machine(
        chip=gpu("H100", 84942979072, 3.35232, HOPPER, f"{_H100_SHEET}; {XLA}/h100_sxm.txtpb"),
        host=nvlink_host(4, 450, (8, 400), 63, "NVIDIA DGX H100: 8 x 400 Gb/s a host"),
        names=r"(nvidia)?h100(sxm5?)?(80(gb)?)?(hbm3)?",
    ),
    Machine(
        chip=gpu("H200", 151397597184, 4.8, HOPPER, f"{_H100_SHEET}; {XLA}/h200.txtpb"),
        host=nvlink_host(4, 450, (8, 400), 63, "400 GB/s a host, as AWS P5en (16 x 200 Gb/s)"),
        names=r"(nvidia)?h200(sxm5?)?(141(gb)?)?(hbm3e)?",
    ),
    Machine(
        chip=gpu("B200", 191514411008, 7.67232, B200, f"{_BLACKWELL_SHEET}; {XLA}/b200.txtpb"),
        host=nvlink_host(5, 900, (8, 400), 63, "AWS P6-B200: 8 x 400 Gb/s a host"),
        names=r"(nvidia)?b200(sxm6?)?((180|192)(gb)?)?(hbm3e)?",
    ),
    Machine(
        chip=gpu("GB200", 197897748480, 7.928064, GB200, f"{_BLACKWELL_SHEET}; {XLA}/gb200.txtpb"),
        host=nvlink_host(
            5,
            900,
            (4, 400),
            63,
            "NVIDIA GB200 NVL72: 18 hosts of 4 devices on one NVLink; a NIC of 400 Gb/s for each "
            "device is assumed",
            devices=4,
            rack=18,
        ),
        names=r"(nvidia)?gb200",
    ),
)

_BOOK = "jax-ml/scaling-book tpus.md"
_CLOUD = "docs.cloud.google.com/tpu/docs"
# No latency between slices is published: this is that of a TCP stack.
_DCN_S = 100e-6


def _ici(devices: int, gigabytes_per_s: float, nics: tuple[int, float], pcie: float) -> Host:
    """Return a TPU host: `gigabytes_per_s` of a link one way, NICs with Gb/s each."""
    return Host(
        devices=devices,
        link="ICI",
        latency_s=1e-6,
        bytes_per_s=gigabytes_per_s * 1e9,
        nics=nics[0],
        nic_bytes_per_s=nics[1] * GBIT,
        pcie_bytes_per_s=pcie * 1e9,
        network_latency_s=_DCN_S,
        source=f"{_BOOK}, sharding.md (1 us a hop)",
        usual=f"{_CLOUD}, {_BOOK}; 100 us between slices is assumed",
    )


def _tpu(
    name: str,
    memory_bytes: int,
    gigabytes_per_s: float,
    teraflops: dict[str, float],
    source: str,
) -> Chip:
    passes = {"float32": teraflops["bfloat16"] / 6, **teraflops}
    return Chip(
        name=name,
        platform="tpu",
        memory_bytes=memory_bytes,
        flops={dtype: rate * 1e12 for dtype, rate in passes.items()},
        bytes_per_s=gigabytes_per_s * 1e9,
        source=source,
    )


_FLAT = Torus(
    shapes=((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    longest=(16, 16),
    cube=0,
    source=f"{_CLOUD}/v5e, v6e (shapes); {_BOOK} (only an axis of 16 wraps)",
)
_CORNERS = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_SUPERCOMPUTER = "Jouppi et al., A Domain-Specific Supercomputer, CACM 2020"
_IRONWOOD_SHEET = f"{_CLOUD}/tpu7x"


def _square(side: int) -> Torus:
    """Return the slices of a pod of `side` x `side` chips."""
    shapes = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
    return Torus(
        shapes=tuple(shape for shape in shapes if shape[1] <= side),
        longest=(side, side),
        cube=0,
        source=f"{_CLOUD} (v2, v3 slices); {_SUPERCOMPUTER}",
    )


_TPUS = (
    Machine(
        chip=_tpu(
            "TPU v2", 16 * GIB, 700, {"bfloat16": 46.0}, f"{_SUPERCOMPUTER}; figures of a chip"
        ),
        host=_ici(4, 62, (1, 100), 16),
        names=r"(tpu)?v2",
        torus=_square(16),
    ),
    Machine(
        chip=_tpu(
            "TPU v3", 32 * GIB, 900, {"bfloat16": 123.0}, f"{_SUPERCOMPUTER}; figures of a chip"
        ),
        host=_ici(4, 82, (1, 100), 16),
        names=r"(tpu)?v3",
        torus=_square(32),
    ),
    Machine(
        chip=_tpu(
            "TPU v7",
            192 * 10**9,
            7380,
            {"bfloat16": 2307.0, "float8": 4614.0},
            f"{_IRONWOOD_SHEET}; memory nominal",
        ),
        host=_ici(4, 100, (4, 100), 63),
        names=r"(tpu)?(v7x?|7x|ironwood)",
        torus=Torus(
            shapes=_CORNERS,
            longest=(16, 24, 24),
            cube=4,
            source=f"{_IRONWOOD_SHEET} (3D tori of cubes of 64 chips)",
        ),
    ),
    Machine(
        chip=_tpu(
            "TPU v4",
            int(30.75 * GIB),
            1200,
            {"bfloat16": 275.0, "int8": 275.0},
            f"{_CLOUD}/v4; memory as the compiler reports it: erfanzar/EasyDeL issue 166",
        ),
        host=_ici(4, 45, (1, 200), 16),
        names=r"(tpu)?v4",
        torus=Torus(
            shapes=_CORNERS,
            longest=(16, 16, 16),
            cube=4,
            source=f"{_CLOUD}/v4; {_BOOK} (wraps where all axes are multiples of 4)",
        ),
    ),
    Machine(
        chip=_tpu(
            "TPU v5e",
            int(15.75 * GIB),
            819,
            {"bfloat16": 197.0, "int8": 394.0},
            f"{_CLOUD}/v5e; memory as libtpu's compiler reports it",
        ),
        host=_ici(8, 45, (2, 100), 15),
        names=r"(tpu)?v5(e|lite|litepod)",
        torus=_FLAT,
    ),
    Machine(
        chip=_tpu(
            "TPU v5p",
            95 * GIB,
            2765,
            {"bfloat16": 459.0, "float8": 459.0, "int8": 918.0},
            f"{_CLOUD}/v5p (memory that a program may use); int8: {_BOOK}",
        ),
        host=_ici(4, 90, (1, 200), 15),
        names=r"(tpu)?v5p?",
        torus=Torus(
            shapes=_CORNERS,
            longest=(16, 16, 24),
            cube=4,
            source=f"{_CLOUD}/v5p (slices of 4x4x4 and greater are full 3D tori)",
        ),
    ),
    Machine(
        chip=_tpu(
            "TPU v6e",
            33550237696,
            1638,
            {"bfloat16": 918.0, "float8": 918.0, "int8": 1836.0},
            f"{_CLOUD}/v6e; float8: jax pallas/mosaic/tpu_info.py; memory as the runtime reports "
            "it: vllm-project/vllm pull request 16211",
        ),
        host=_ici(8, 90, (1, 200), 32),
        names=r"(tpu)?(v6e|v6lite|trillium)",
        torus=_FLAT,
    ),
)

_CPU = Machine(
    chip=Chip(
        name="CPU",
        platform="cpu",
        memory_bytes=4 * GIB,
        flops={"float32": 96e9, "bfloat16": 96e9, "float16": 96e9, "int8": 96e9},
        bytes_per_s=10e9,
        source="assumed: one core of 3 GHz with two units of eight float32 each, 4 GiB",
    ),
    host=Host(
        devices=8,
        link="memory",
        latency_s=10e-6,
        bytes_per_s=5e9,
        nics=1,
        nic_bytes_per_s=10 * GBIT,
        pcie_bytes_per_s=5e9,
        network_latency_s=100e-6,
        source="assumed: copies in memory at half its bandwidth",
        usual="assumed: 10 Gb/s a host",
    ),
    names=r"cpu",
)

MACHINES: tuple[Machine, ...] = (*_GPUS, *CARDS, *_TPUS, _CPU)

PLAIN_HOST = Host(
    devices=8,
    link="PCIe",
    latency_s=PCIE_S,
    bytes_per_s=15e9,
    nics=1,
    nic_bytes_per_s=25 * GBIT,
    pcie_bytes_per_s=15e9,
    network_latency_s=NETWORK_S,
    source=f"assumed: PCIe 3 in a host; {NCCL}",
    usual="assumed: 25 Gb/s a host",
)
"""Host of a chip that is not in the catalog."""
