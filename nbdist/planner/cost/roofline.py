"""How long one operation takes on one device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.planner.hardware.efficiency import Calibration
    from nbdist.records.topology import Chip

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "tensorfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int8": 1,
}
"""Bytes of one element, by type."""

_ROW_BYTES = 16
"""Tensor cores are fed 16 bytes at a time: NVIDIA, "Matrix Multiplication Background User's Guide",
section 4.1 (Tensor Core requirements)."""

_EULER = 0.5772156649015329
_SUMMED = 64

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
    rate = _reached(dtype, chip, calibration) * (1 if aligned else calibration.unaligned)
    operands = batch * size * (m * k + k * n + m * n)
    streams = [
        (parts, _stream_s(operands + _partial_bytes(batch * m * n, parts), chip, calibration))
        for parts in _SPLITS
    ]
    units, start = calibration.units, calibration.tile_start
    return calibration.kernel_s + min(
        max(-(-tiles * parts // units) * wave_s * (k / parts + start), stream_s)
        for tiles, wave_s in _tilings(batch, m, n, rate, calibration)
        for parts, stream_s in streams
    )


def fused_attention_s(
    batch: int,
    length: int,
    width: int,
    dtype: str,
    chip: Chip,
    calibration: Calibration,
    *,
    backward: bool = False,
) -> float:
    """Seconds of causal attention of `batch` heads, whose scores never leave the chip.

    Half of the scores are masked, and their tiles left out. Two products forward, five backward,
    where the scores are made again (Dao, arXiv:2307.08691, sections 2.3 and 3.1).
    """
    products = 5 if backward else 2
    operations = products * batch * length**2 * width
    tensors = 8 if backward else 4
    nbytes = tensors * batch * length * width * ITEM_BYTES[dtype]
    work_s = operations / _reached(dtype, chip, calibration)
    return calibration.kernel_s + max(work_s, _stream_s(nbytes, chip, calibration))


def memory_s(nbytes: float, chip: Chip, calibration: Calibration) -> float:
    """Seconds of an operation that does little but read and write `nbytes` in all."""
    return calibration.kernel_s + _stream_s(nbytes, chip, calibration)


def issued_s(
    device_s: float, operations: int, collectives: Mapping[int, int], calibration: Calibration
) -> float:
    """Seconds of a stretch of work that the host issues while the device does it.

    The host runs ahead (PyTorch, "CUDA semantics: Asynchronous execution"; JAX, "Asynchronous
    dispatch"), so the slower of the two counts; but neither is the slower one all along, so where
    they are alike it takes longer than either: a norm of both, between their sum and the larger.

    Args:
        device_s: of all operations and collectives, one after the other.
        operations: how many there are, collectives apart.
        collectives: how many there are, by the number of ranks that take part.
        calibration: of chip and runtime.
    """
    host_s = (
        operations * calibration.dispatch_s
        + sum(collectives.values()) * calibration.collective_dispatch_s
    )
    late_s = sum(times * _late_s(ranks, calibration) for ranks, times in collectives.items())
    busy_s = device_s + _waited_s(late_s, device_s, host_s)
    slower = max(busy_s, host_s)
    if slower == 0:
        return 0.0
    ratio = min(busy_s, host_s) / slower
    return slower * math.pow(1 + ratio**calibration.overlap, 1 / calibration.overlap)


def _reached(dtype: str, chip: Chip, calibration: Calibration) -> float:
    """Operations a second of the largest products; XLA widens what a chip has no units for."""
    known = dtype if dtype in chip.flops else "float32"
    return chip.flops[known] * calibration.matmul_ceiling


def _late_s(ranks: int, calibration: Calibration) -> float:
    """Seconds that a rank waits for the last one, on average.

    Where delays are memoryless with one mean, the last of n comes after H(n) means, the n-th
    harmonic number, and the average rank after one (Rényi, "On the theory of order statistics",
    1953).
    """
    return calibration.straggle_s * (_harmonic(ranks) - 1)


def _harmonic(number: int) -> float:
    """1 + 1/2 + ... + 1/number, by its expansion (Euler and Maclaurin) where that is exact."""
    if number <= _SUMMED:
        return sum(1 / each for each in range(1, number + 1))
    return math.log(number) + _EULER + 1 / (2 * number) - 1 / (12 * number**2)


def _waited_s(late_s: float, device_s: float, host_s: float) -> float:
    """Less, the further hosts are ahead of devices, and never more than all that a host does."""
    return min(late_s, host_s) * min(1, host_s / device_s) if device_s else 0.0


def _tilings(
    batch: int, m: int, n: int, rate: float, calibration: Calibration
) -> Iterator[tuple[int, float]]:
    """How many tiles of each size, and the seconds of a wave for each of the inner dimension."""
    for rows, columns in calibration.tiles:
        loads = 1 + calibration.tile_loads * (1 / rows + 1 / columns)
        wave_s = 2 * rows * columns * loads * calibration.units / rate
        yield batch * -(-m // rows) * -(-n // columns), wave_s


def _partial_bytes(results: int, parts: int) -> float:
    """Partial sums are written and read once, in 4 bytes."""
    return 0 if parts == 1 else 8.0 * results * parts


def _stream_s(nbytes: float, chip: Chip, calibration: Calibration) -> float:
    return nbytes / (chip.bytes_per_s * calibration.memory_efficiency)
