"""SIGINT on an engine: it stops the user's code, and nothing else in the process.

One handler serves for the engine's whole life. If nbdist set and reset a handler around each cell,
a signal during the reset would leave the wrong handler in place. The next signal would then end
the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

AGAIN_S = 0.2
"""Ignore a second interrupt within this time (seconds): the first one's cleanup may still run."""


class Shield:
    """Context that defers an interrupt to its end.

    An interrupt raised just after a lock was taken would leave it locked for all threads. Any
    thread may enter the context; only the main thread is interrupted.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_deferred = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._is_deferred and not self._depth:
                self._is_deferred = False
                signal.raise_signal(signal.SIGINT)

    def defers(self) -> bool:
        """Return True if to defer the current interrupt, and remember it. Main thread only."""
        self._is_deferred |= self._depth > 0
        return self._depth > 0


class Interrupts:
    """Handler of SIGINT that raises KeyboardInterrupt only while the user's code runs.

    Attributes:
        is_pending: True after a deferred interrupt.
        shield: context for calls from the user's code that must not stop half-way.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._defers = False
        self._inside = False
        self._task: asyncio.Task[None] | None = None
        self._raised_at = -AGAIN_S
        self.shield = Shield()

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._handle)

    @contextlib.contextmanager
    def admitted(self, task: asyncio.Task[None] | None = None) -> Iterator[None]:
        """Admit interrupts: the user's code runs, in `task` if it may await."""
        self._task = task
        self._inside = True
        try:
            yield
        finally:
            self.refuse()

    @contextlib.contextmanager
    def deferred(self, *, is_pending: bool = False) -> Iterator[None]:
        """Defer interrupts. A deferred one is raised after `force_interrupt`.

        The time of the signal is unknown: Python handles a signal that arrives in a collective
        only after the collective, perhaps seconds later.

        Args:
            is_pending: True if an interrupt arrived before this rank began.
        """
        self.is_pending = is_pending
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def force_interrupt(self) -> None:
        """Stop deferring interrupts in this cell. Thread-safe."""
        self._defers = False

    def refuse(self) -> None:
        """Ignore interrupts: the user's code is over, even if `admitted` has not exited."""
        self._inside = False
        self._task = None
        self._defers = False  # a `fit` that raised does not reset it

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.shield.defers():
            return
        now = time.monotonic()
        if not self._inside or now - self._raised_at < AGAIN_S:
            return
        if self._defers:
            self.is_pending = True
            return
        self._raised_at = now
        task = self._task
        if task is not None and asyncio.current_task(task.get_loop()) is not task:
            task.get_loop().call_soon_threadsafe(task.cancel)  # the task is suspended in an await
        else:
            signal.default_int_handler(number, frame)
