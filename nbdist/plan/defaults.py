"""What chips are taken to reach, where nothing was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.plan.calibration import Calibration

if TYPE_CHECKING:
    from nbdist.records import Chip


def calibration_of(chip: Chip) -> Calibration:
    """The constants of a chip's family."""
    return Calibration(
        matmul_ceiling=0.85,
        units=108 if chip.platform == "gpu" else 1,
        tiles=((128, 128), (256, 128), (64, 64)),
        tile_loads=8.0,
        tile_start=32.0,
        unaligned=0.5,
        memory_efficiency=0.85,
        kernel_s=4e-6,
        dispatch_s=0.0,
        collective_dispatch_s=0.0,
        collective_s=1e-5,
        link_efficiency=0.75,
        network_efficiency=0.8,
        local_passes=1.0,
    )
