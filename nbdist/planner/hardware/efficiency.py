"""Constants of the cost model, measured or assumed, by family of chips."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.records.base import Record

if TYPE_CHECKING:
    from nbdist.records import Chip


class Calibration(Record, frozen=True):
    """Efficiencies of a chip and its runtime that a data sheet does not state.

    Every field is a property of the hardware or of the runtime and not of a trained model, so that
    a microbenchmark can measure it.

    Attributes:
        matmul_ceiling: share of the peak that the largest matrix products reach.
        units: processors of a chip that compute one output tile each (multiprocessors of a GPU,
            matrix units of a TPU).
        tiles: output tiles (rows, columns) of the library's kernels.
        tile_loads: excess work of a small tile, in elements: a tile of r x c loads 1/r + 1/c
            elements for each multiply-add.
        tile_start: time of a tile outside of its inner loop, in elements of the inner dimension.
        unaligned: share of the speed if rows do not begin at multiples of 16 bytes.
        memory_efficiency: share of the memory bandwidth that streaming kernels reach.
        kernel_s: shortest time of a kernel on the device.
        dispatch_s: time in which the host issues one operation.
        collective_dispatch_s: time in which the host issues one collective.
        overlap: overlap of host and device; a higher value hides more.
        collective_s: time of a collective on the device before its first message.
        straggle_s: average delay of a rank's host in issuing a collective.
        link_efficiency: share of the bandwidth of links within a host that collectives reach.
        network_efficiency: share of the bandwidth between hosts that collectives reach.
        local_passes: passes of an all-reduce through the device's own memory, beside the links.
    """

    matmul_ceiling: float
    units: int
    tiles: tuple[tuple[int, int], ...]
    tile_loads: float
    tile_start: float
    unaligned: float
    memory_efficiency: float
    kernel_s: float
    dispatch_s: float
    collective_dispatch_s: float
    overlap: float
    collective_s: float
    straggle_s: float
    link_efficiency: float
    network_efficiency: float
    local_passes: float


_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles of cuBLAS's kernels for tensor cores: NVIDIA, "Matrix Multiplication Background User's
Guide", section 3.2."""

PYTORCH_A100 = Calibration(
    matmul_ceiling=0.869,
    units=108,
    tiles=_TILES,
    tile_loads=10.9,
    tile_start=26.8,
    unaligned=0.463,
    memory_efficiency=0.571,
    kernel_s=5e-6,
    dispatch_s=56.4e-6,
    collective_dispatch_s=79.3e-6,
    overlap=5.39,
    collective_s=31.3e-6,
    straggle_s=269e-6,
    link_efficiency=1.0,
    network_efficiency=0.85,
    local_passes=4.14,
)
"""An A100 with PyTorch, which issues operations one by one.

The ceiling is the best of many products (271.2 of 312 Tflop/s, stas00/ml-engineering, "Maximum
Achievable Matmul FLOPS"); units are the multiprocessors. `kernel_s` and `network_efficiency` are
assumed. The constants of collectives are fitted to NCCL's all-reduces on 2 to 8 A100s, and the rest
to 1,440 step times of GPTs, by benchmarks/planner_fit.py.
"""

_COMPILED = msgspec.structs.replace(
    PYTORCH_A100, dispatch_s=4e-6, collective_dispatch_s=10e-6, straggle_s=10e-6
)
"""The same for a step that XLA has compiled: the host issues kernels from a list. Assumed."""

_GPUS = {
    "H100-PCIe": (114, 0.6),
    **dict.fromkeys(("H100", "H200"), (132, 0.6)),
    **dict.fromkeys(("GB200", "B200", "B300"), (148, 0.55)),
    "GB300": (152, 0.55),
    **dict.fromkeys(("MI300X", "MI325X"), (304, 0.5)),
    "V100": (80, 0.85),
    "A100": (108, 0.869),
    "T4": (40, 0.5),
    "L40S": (142, 0.6),
    "L4": (58, 0.5),
    "A10G": (72, 0.7),
    "H20": (78, 0.85),
}
"""Multiprocessors, and the share of the peak that large products sustain.

The source for A100s is that of `PYTORCH_A100`; V100s are assumed. On later chips, the power limit
reduces the share. B200s reach 0.776 for a short time, and 0.55 in steps of Llama 3, to which it is
fitted (benchmarks/planner_llama.py). H100s reach 0.803, and about 0.5 at 500 W (benchmarks of
pytorch/torchtitan); 0.6 is assumed. The figures of cards on PCIe, of H20s, of the 300 series and of
AMD are assumed.
"""

_TPU = Calibration(
    matmul_ceiling=0.95,
    units=4,
    tiles=((128, 128),),
    tile_loads=0.0,
    tile_start=128.0,
    unaligned=1.0,
    memory_efficiency=0.85,
    kernel_s=1e-6,
    dispatch_s=0.0,
    collective_dispatch_s=0.0,
    overlap=5.39,
    collective_s=1e-6,
    straggle_s=0.0,
    link_efficiency=0.9,
    network_efficiency=0.85,
    local_passes=0.0,
)
"""A program on the device: no host issues operations. Matrix units are 128 x 128, and are filled
and emptied along their diagonal ("How to Scale Your Model", jax-ml/scaling-book). Efficiencies are
assumed."""

_TPUS = {
    "TPU v2": 2,
    "TPU v3": 4,
    "TPU v4": 8,
    "TPU v5p": 8,
    "TPU v5e": 4,
    "TPU v6e": 8,
    "TPU v7": 8,
}
"""Matrix units of a chip, of 128 x 128 (v6e has two of 256 x 256, and v7 is assumed to be alike):
cloud.google.com/tpu/docs."""

_PLAIN = msgspec.structs.replace(_TPU, units=1, tiles=((16, 16),), tile_start=0.0, kernel_s=10e-6)
"""A chip that is not in the catalog, whose figures were measured. Assumed."""


def calibration_of(chip: Chip) -> Calibration:
    """Return the constants of a chip's family under XLA, before measurements."""
    for name, (units, ceiling) in _GPUS.items():
        if chip.name.startswith(name):
            return msgspec.structs.replace(_COMPILED, units=units, matmul_ceiling=ceiling)
    for name, units in _TPUS.items():
        if chip.name.startswith(name):
            return msgspec.structs.replace(_TPU, units=units)
    return _PLAIN
