"""What chips are taken to reach, where nothing was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.planner.hardware.efficiency import PYTORCH_A100, Calibration

if TYPE_CHECKING:
    from nbdist.records import Chip

_COMPILED = msgspec.structs.replace(
    PYTORCH_A100, dispatch_s=4e-6, collective_dispatch_s=10e-6, straggle_s=10e-6
)
"""The same where XLA has compiled the step: the host issues kernels from a list. Assumed."""

_GPUS = {"V100": (80, 0.85), "A100": (108, 0.869), "H100": (132, 0.6), "H200": (132, 0.6)}
_GPUS |= {"GB200": (148, 0.55), "B200": (148, 0.55)}
"""Multiprocessors, and what the best products reach all the time.

Of A100s the source is that of `PYTORCH_A100`, of V100s it is assumed. Later ones reach more only
until the power limit slows them: B200s 0.776 for a moment, and 0.55 in steps of Llama 3, on which
it is fitted (benchmarks/planner_llama.py); H100s 0.803, and about 0.5 at 500 W (by
pytorch/torchtitan's benchmarks), so that 0.6 is assumed.
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
"""A program on the device: no host issues operations. Matrix units are 128 x 128, and filled and
emptied along their diagonal ("How to Scale Your Model", jax-ml/scaling-book). Efficiencies are
assumed."""

_TPUS = {"TPU v4": 8, "TPU v5p": 8, "TPU v5e": 4, "TPU v6e": 8}
"""Matrix units of a chip, of 128 x 128 (v6e has two of 256 x 256): cloud.google.com/tpu/docs."""

_PLAIN = msgspec.structs.replace(_TPU, units=1, tiles=((16, 16),), tile_start=0.0, kernel_s=10e-6)
"""A chip nobody knows, whose figures are what was reached on it. Assumed."""


def calibration_of(chip: Chip) -> Calibration:
    """The constants of the chip's family under XLA, until they are measured."""
    for name, (units, ceiling) in _GPUS.items():
        if chip.name.startswith(name):
            return msgspec.structs.replace(_COMPILED, units=units, matmul_ceiling=ceiling)
    for name, units in _TPUS.items():
        if chip.name.startswith(name):
            return msgspec.structs.replace(_TPU, units=units)
    return _PLAIN
