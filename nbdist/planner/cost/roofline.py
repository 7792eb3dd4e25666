"""Time of one operation on one device."""

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
"""Alignment in bytes that tensor cores need: NVIDIA, "Matrix Multiplication Background User's
Guide", section 4.1 (Tensor Core requirements)."""

ATTENTION = 0.75
"""Rate of fused attention over that of large products: 63 to 73 % of the peak of an A100 (Dao,
arXiv:2307.08691, section 4.1), on which large products reach 87 %."""

_EULER = 0.5772156649015329
_SUMMED = 64

_SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which libraries split the inner dimension if there are too few tiles."""


def matmul_s(
    batch: int, m: int, n: int, k: int, dtype: str, chip: Chip, calibration: Calibration
) -> float:
    """Return the seconds of `batch` products of (m, k) by (k, n).

    A roofline (Williams, Waterman and Patterson, CACM 2009) with a quantized compute side. The
    result is divided into tiles, and every unit of the chip works on one tile at a time. A last
    wave that is not full takes as long as a full one (NVIDIA, "Matrix Multiplication Background
    User's Guide", section 3.3). The best kernel of the library is assumed.
    """
    size = ITEM_BYTES[dtype]
    aligned = n * size % _ROW_BYTES == 0 and k * size % _ROW_BYTES == 0
    rate = _peak_rate(dtype, chip, calibration) * (1 if aligned else calibration.unaligned)
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


def attention_s(
    flops: float, nbytes: float, dtype: str, chip: Chip, calibration: Calibration
) -> float:
    """Return the seconds of fused attention, which reads and writes `nbytes`."""
    work_s = flops / (_peak_rate(dtype, chip, calibration) * ATTENTION)
    return calibration.kernel_s + max(work_s, _stream_s(nbytes, chip, calibration))


def memory_s(nbytes: float, chip: Chip, calibration: Calibration) -> float:
    """Return the seconds of an operation that mainly reads and writes `nbytes` in total."""
    return calibration.kernel_s + _stream_s(nbytes, chip, calibration)


def issued_s(
    device_s: float, operations: int, collectives: Mapping[int, int], calibration: Calibration
) -> float:
    """Return the seconds of work that the host issues while the device runs it.

    The host runs ahead (PyTorch, "CUDA semantics: Asynchronous execution"; JAX, "Asynchronous
    dispatch"), so the slower of the two counts. If both are close, they take longer than either: a
    norm of both, between their sum and the larger one.

    Args:
        device_s: seconds of all operations and collectives in sequence.
        operations: number of operations without collectives.
        collectives: number of collectives, by the number of ranks that take part.
        calibration: figures of the chip and the runtime.
    """
    host_s = (
        operations * calibration.dispatch_s
        + sum(collectives.values()) * calibration.collective_dispatch_s
    )
    late_s = sum(times * _late_s(ranks, calibration) for ranks, times in collectives.items())
    busy_s = device_s + _exposed_s(late_s, device_s, host_s)
    slower = max(busy_s, host_s)
    if slower == 0:
        return 0.0
    ratio = min(busy_s, host_s) / slower
    return slower * math.pow(1 + ratio**calibration.overlap, 1 / calibration.overlap)


def _peak_rate(dtype: str, chip: Chip, calibration: Calibration) -> float:
    """Return operations per second of large products; XLA widens types that the chip lacks."""
    known = dtype if dtype in chip.flops else "float32"
    return chip.flops[known] * calibration.matmul_ceiling


def _late_s(ranks: int, calibration: Calibration) -> float:
    """Return the seconds that a rank waits for the last one, on average.

    If delays are memoryless with one mean, the last of n ranks arrives after H(n) means. H(n) is
    the n-th harmonic number. The average rank arrives after one mean.

    Source: Rényi, "On the theory of order statistics", 1953.
    """
    return calibration.straggle_s * (_harmonic(ranks) - 1)


def _harmonic(number: int) -> float:
    """Return 1 + 1/2 + ... + 1/number, from the Euler-Maclaurin expansion if that is exact."""
    if number <= _SUMMED:
        return sum(1 / each for each in range(1, number + 1))
    return math.log(number) + _EULER + 1 / (2 * number) - 1 / (12 * number**2)


def _exposed_s(late_s: float, device_s: float, host_s: float) -> float:
    """Return the waiting time that is not hidden: less, the further hosts are ahead of devices."""
    return min(late_s, host_s) * min(1, host_s / device_s) if device_s else 0.0


def _tilings(
    batch: int, m: int, n: int, rate: float, calibration: Calibration
) -> Iterator[tuple[int, float]]:
    """Yield for each tile size the number of tiles and the seconds of a wave per inner element."""
    for rows, columns in calibration.tiles:
        loads = 1 + calibration.tile_loads * (1 / rows + 1 / columns)
        wave_s = 2 * rows * columns * loads * calibration.units / rate
        yield batch * -(-m // rows) * -(-n // columns), wave_s


def _partial_bytes(results: int, parts: int) -> float:
    """Return the bytes of partial sums, which are written and read once in 4 bytes."""
    return 0 if parts == 1 else 8.0 * results * parts


def _stream_s(nbytes: float, chip: Chip, calibration: Calibration) -> float:
    return nbytes / (chip.bytes_per_s * calibration.memory_efficiency)
