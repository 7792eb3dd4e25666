"""Detection of a main thread that waits in a TensorFlow collective.

The innermost Python frames show the op or the function that TensorFlow executes. TensorFlow starts
eager collectives from a thread pool, and the main thread waits for that pool. An op may compute on
its own threads while the main thread waits. A wait therefore counts only if the whole process uses
almost no processor time.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from nbdist.private_api.tensorflow import LIBRARY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_OPS = LIBRARY.path("gen_collective_ops")
_EXECUTE = LIBRARY.path("execute")
_LAUNCHER = LIBRARY.path("cross_device_ops")
_MOST_BUSY = 0.1
"""Maximum load of an idle process, in cores. An idle worker uses 0.01 (measured, 2 cores)."""

_NOISE_S = 0.05
_MOST_BETWEEN_S = 1.0


class WaitClock:
    """Measure an uninterrupted wait of the main thread in a collective.

    Args:
        main: ident of the main thread.
    """

    def __init__(self, main: int) -> None:
        self._main = main
        self._call: object = None
        self._since = self._cpu_s = self._sampled = 0.0

    def seconds(self) -> float:
        """Sample the thread and return its wait in seconds. Samples must be at most 1 s apart."""
        now, cpu_s = time.monotonic(), time.process_time()
        frames = sys._current_frames()
        frame = frames[self._main]
        call = (id(frame), frame.f_lasti) if in_collective(frames, self._main) else None
        idle = cpu_s - self._cpu_s <= _NOISE_S + _MOST_BUSY * (now - self._since)
        continues = call is not None and call == self._call and idle
        if not continues or now - self._sampled > _MOST_BETWEEN_S:
            self._call, self._since, self._cpu_s = call, now, cpu_s
        self._sampled = now
        return now - self._since if call is not None else 0.0


def in_collective(frames: Mapping[int, FrameType], main: int) -> bool:
    """Return True if the main thread executes a collective or waits for a thread that does.

    Args:
        frames: innermost frame of each thread.
        main: ident of the main thread.
    """
    if _executes_collective(frames[main]):
        return True
    stack = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(frames[main]))
    return _LAUNCHER in stack and any(map(_executes_collective, frames.values()))


def _executes_collective(frame: FrameType) -> bool:
    """Return True if an innermost frame executes a collective or a function that contains one."""
    module = frame.f_globals.get("__name__")
    if module == _OPS:
        return True
    if module != _EXECUTE:
        return False
    name = frame.f_locals.get("op_name")
    if isinstance(name, bytes):  # an op that takes TensorFlow's slow path
        name = name.decode()
    return isinstance(name, str) and (name.startswith("Collective") or _has_collective(name))


@functools.lru_cache(maxsize=1024)
def _has_collective(name: str) -> bool:
    """Return True if a function of TensorFlow's context contains a collective, directly or not."""
    from nbdist.private_api.tensorflow import context, errors

    try:
        definition = context.context().get_function_def(name)
    except errors.NotFoundError:  # it is an op
        return False
    return any(
        node.op.startswith("Collective") or any(map(_has_collective, _called(node)))
        for node in definition.node_def
    )


def _called(node: Any) -> set[str]:
    """Return the names of the functions that a node calls."""
    values = list(node.attr.values())
    called = {value.func.name for value in values if value.HasField("func")}
    return called.union(*({each.name for each in value.list.func} for value in values))
