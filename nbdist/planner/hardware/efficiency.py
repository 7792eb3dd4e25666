"""The measured constants of the cost model, by family of chips."""

from __future__ import annotations

from nbdist.records.base import Record


class Calibration(Record, frozen=True):
    """What a data sheet does not say about a chip and the program that drives it.

    Every field is a property of the hardware or of the runtime, none of a model that is trained,
    so that a live microbenchmark can replace it.

    Attributes:
        matmul_ceiling: of the peak, what the largest matrix products reach.
        units: processors of a chip that take one output tile each (multiprocessors of a GPU, matrix
            units of a TPU).
        tiles: output tiles (rows, columns) that the library's kernels come in.
        tile_loads: the excess work of a small tile, in elements: a tile of r x c loads 1/r + 1/c
            elements for each multiply-add.
        tile_start: what a tile takes before and after its inner loop, as that much more of the
            inner dimension.
        unaligned: of the speed, what is left where rows do not begin at multiples of 16 bytes.
        memory_efficiency: of the memory's bandwidth, what streaming kernels reach.
        kernel_s: that a kernel takes at least, on the device.
        dispatch_s: that the host takes to issue one operation.
        collective_dispatch_s: that the host takes to issue one collective.
        overlap: how well host and device hide each other's time; the higher, the better.
        collective_s: that a collective takes on the device before its first message.
        straggle_s: by which a rank's host is late in issuing a collective, on average.
        link_efficiency: of a link's bandwidth within a host, what collectives reach.
        network_efficiency: the same between hosts.
        local_passes: how often an all-reduce moves its buffer through the device's own memory
            beyond what the links carry.
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
"""What cuBLAS's kernels for tensor cores come in: NVIDIA, "Matrix Multiplication Background User's
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
"""An A100 that PyTorch drives, operation by operation.

The ceiling is the best of many products (271.2 of 312 Tflop/s, stas00/ml-engineering, "Maximum
Achievable Matmul FLOPS"); units are the multiprocessors. `kernel_s` and `network_efficiency` are
assumed. What a collective takes is fitted on NCCL's all-reduces on 2 to 8 A100s, and the rest on
1,440 step times of GPTs, by benchmarks/planner_fit.py.
"""
