"""Detection of collectives in which a rank waits for the others; used by the watchdog thread.

A waiting rank counts as hung only if its process is idle. The notebook decides that over several
answers.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import TYPE_CHECKING

from nbdist.private_api import jax as private_jax
from nbdist.private_api import tensorflow as private_tensorflow
from nbdist.utils.processes import queued_s

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from nbdist.records import StrategyName
    from nbdist.worker.runtime.context import Worker

_CALLBACKS = (
    private_tensorflow.LIBRARY.path("script_ops"),
    private_jax.LIBRARY.path("callbacks"),
)
"""Modules whose frames enclose user functions that a graph calls on other threads."""


def strategy_of(worker: Worker, main: int, *, waits: bool) -> StrategyName | None:
    """Return the strategy in whose collective the main thread waits; None if it waits in none.

    Args:
        worker: the rank.
        main: the main thread's ident.
        waits: True if the main thread waits for a thread outside of Python.
    """
    frames = sys._current_frames()
    if _in_callback(frames):
        return None
    if "mirrored" in worker.strategies:
        from nbdist.worker.tensorflow.runtime.collective_wait import in_collective

        if in_collective(frames, main):
            return "mirrored"
    if "pjrt" in worker.strategies and waits:
        from nbdist.worker.jax import backend as jax_backend

        executes = jax_backend.has_unready() or jax_backend.is_dispatching(frames[main])
        if jax_backend.on_cpus() and executes:
            return "pjrt"
    return None


def under_way(worker: Worker) -> bool:
    """Return True if a computation or collective of this rank still runs after its cell ended."""
    if _in_callback(sys._current_frames()):
        return True
    if "mirrored" in worker.strategies:
        from nbdist.worker.tensorflow import strategy as tensorflow_strategy

        if tensorflow_strategy.collective_state().under_way:
            return True
    if "pjrt" in worker.strategies:
        from nbdist.worker.jax import backend as jax_backend

        return jax_backend.has_unready()
    return False


def processor_seconds(worker: Worker) -> dict[str, float]:
    """Return how long the process computed, and how long its threads waited for a processor.

    Returns:
        The fields of `RankPosition`; empty if a wait for devices also uses processors.
    """
    mirrored = worker.strategies.get("mirrored")
    on_cpus = mirrored is None or all("CPU" in d for d in mirrored.extended.worker_devices)
    if "pjrt" in worker.strategies:
        from nbdist.worker.jax import backend as jax_backend

        on_cpus = on_cpus and jax_backend.on_cpus()
    return {"process_s": time.process_time(), "queued_s": queued_s()} if on_cpus else {}


def _in_callback(frames: Mapping[int, FrameType]) -> bool:
    """Return True if a graph waits for a Python function."""
    return any(
        frame.f_globals.get("__name__") in _CALLBACKS
        for innermost in frames.values()
        for frame, _ in traceback.walk_stack(innermost)
    )
