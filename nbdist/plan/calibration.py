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
        collective_s: that a collective takes on the device before its first message.
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
    collective_s: float
    link_efficiency: float
    network_efficiency: float
    local_passes: float
