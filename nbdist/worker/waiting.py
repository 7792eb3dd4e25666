"""Whether a rank waits in a collective that the others have to join; for the watchdog's thread.

Only an idle process counts as one that waits, which the notebook decides over several answers.
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from nbdist.records import StrategyName
    from nbdist.worker.runtime.context import Worker

_CALLBACKS = ("tensorflow.python.ops.script_ops", "jax._src.callback")
"""Modules whose frames are around the user's functions that a graph calls on other threads."""


def strategy_of(worker: Worker, main: int, *, waits: bool) -> StrategyName | None:
    """The strategy in whose collective the main thread waits.

    Args:
        worker: the rank.
        main: the main thread's ident.
        waits: the main thread waits for a thread that is not Python's.
    """
    frames = sys._current_frames()
    if _in_callback(frames):
        return None
    if "mirrored" in worker.strategies:
        from nbdist.worker.tensorflow.collective_wait import in_collective

        if in_collective(frames, main):
            return "mirrored"
    if "pjrt" in worker.strategies and waits:
        from nbdist.worker.jax import backend as jax_backend

        if jax_backend.on_cpus() and jax_backend.has_unready():
            return "pjrt"
    return None


def under_way(worker: Worker) -> bool:
    """Whether this rank still computes, or makes a collective, after its cell has ended."""
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


def _in_callback(frames: Mapping[int, FrameType]) -> bool:
    """Whether a graph waits for a Python function."""
    return any(
        frame.f_globals.get("__name__") in _CALLBACKS
        for innermost in frames.values()
        for frame, _ in traceback.walk_stack(innermost)
    )
