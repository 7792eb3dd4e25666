"""How long one operation takes on one device."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.plan.calibration import Calibration
    from nbdist.records.topology import Chip

ITEM_BYTES = {
    "float64": 8, "float32": 4, "tensorfloat32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
}  # fmt: skip
"""Bytes of one element, by type."""

_ROW_BYTES = 16
"""Tensor cores are fed 16 bytes at a time: NVIDIA, "Matrix Multiplication Background User's Guide",
section 4.1 (Tensor Core requirements)."""

_SPLITS = (1, 2, 4, 8)
"""Into how many parts libraries cut the inner dimension where there are too few tiles."""


def matmul_s(
    batch: int, m: int, n: int, k: int, dtype: str, chip: Chip, calibration: Calibration
) -> float:
    """Seconds of `batch` products of (m, k) by (k, n).

    A roofline (Williams, Waterman and Patterson, CACM 2009) whose compute side is quantised: the
    result is cut in tiles, of which every unit of the chip works on one at a time, so that a last
    wave which is not full takes as long as a full one (NVIDIA, "Matrix Multiplication Background
    User's Guide", section 3.3). The kernel is the best of those that the library has.
    """
    size = ITEM_BYTES[dtype]
    aligned = n * size % _ROW_BYTES == 0 and k * size % _ROW_BYTES == 0
    rate = (
        chip.flops[dtype] * calibration.matmul_ceiling * (1 if aligned else calibration.unaligned)
    )
    operands = batch * size * (m * k + k * n + m * n)
    return calibration.kernel_s + min(
        max(
            _waves_s(batch * parts, m, n, k / parts, rate, tile, calibration),
            _stream_s(operands + _partial_bytes(batch * m * n, parts), chip, calibration),
        )
        for tile in calibration.tiles
        for parts in _SPLITS
    )


def memory_s(nbytes: float, chip: Chip, calibration: Calibration) -> float:
    """Seconds of an operation that does little but read and write `nbytes` in all."""
    return calibration.kernel_s + _stream_s(nbytes, chip, calibration)


def issued_s(device_s: float, operations: int, collectives: int, calibration: Calibration) -> float:
    """Seconds of a stretch of work that the host issues while the device does it.

    Neither waits for the other before the end, so the slower one counts (asynchronous execution:
    PyTorch's "CUDA semantics", JAX's "Asynchronous dispatch").
    """
    host_s = operations * calibration.dispatch_s + collectives * calibration.collective_dispatch_s
    return max(device_s, host_s)


def _waves_s(
    batch: int,
    m: int,
    n: int,
    k: float,
    rate: float,
    tile: tuple[int, int],
    calibration: Calibration,
) -> float:
    rows, columns = tile
    waves = ceil(batch * ceil(m / rows) * ceil(n / columns) / calibration.units)
    loads = 1 + calibration.tile_loads * (1 / rows + 1 / columns)
    work = 2 * rows * columns * (k + calibration.tile_start) * loads
    return waves * work * calibration.units / rate


def _partial_bytes(results: int, parts: int) -> float:
    """Partial sums are written and read once, in 4 bytes."""
    return 0 if parts == 1 else 8.0 * results * parts


def _stream_s(nbytes: float, chip: Chip, calibration: Calibration) -> float:
    return nbytes / (chip.bytes_per_s * calibration.memory_efficiency)
