"""`nbdist.place` of an array on a device, against `jax.device_put`, on 8 virtual CPU devices.

The allowed overhead is the larger of 5 % and 20 us, because small arrays take only the time of the
call.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import nbdist
from benchmarks.case import Case, interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.case import Scale

RUNS = 21
MORE_S, MORE = 20e-6, 1.05
ROUND_S = 0.02


def cases(scale: Scale) -> Iterator[Case]:
    jax.config.update("jax_num_cpu_devices", 8)
    here, there = jax.devices()[:2]
    for side in scale.of((8, 2048), (8,)):
        array = np.ones((side, side), np.float32)
        name = f"{array.nbytes:,} bytes"
        yield _case(scale, f"{name} of NumPy", array, there)
        yield _case(scale, f"{name} from another device", jax.device_put(array, here), there)


def _case(scale: Scale, name: str, array: Any, device: jax.Device) -> Case:
    round_s, runs = scale.of((ROUND_S, RUNS), (0.0, 1))
    sides = interleave(
        _timed(lambda: nbdist.place(array, device), round_s),
        _timed(lambda: jax.device_put(array, device), round_s),
        runs,
    )
    ours, peer = map(median, sides)
    target = max(MORE, 1 + MORE_S / peer)
    title = f"`nbdist.place` of {name}, against `jax.device_put`"
    return Case(title, ours, peer, "s", round(target, 3), runs)


def _timed(call: Callable[[], jax.Array], round_s: float) -> Callable[[], float]:
    """Return a function that measures seconds per call with its copy, over calls for `round_s`."""
    call().block_until_ready()
    began = time.perf_counter()
    call().block_until_ready()
    calls = max(1, int(round_s / (time.perf_counter() - began)))

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call().block_until_ready()
        return (time.perf_counter() - began) / calls

    return seconds
