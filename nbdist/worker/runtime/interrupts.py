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

OUTSIDE_S = 2.0
"""Time after which an interrupt stops the code between the training loops of a cell (seconds)."""

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
        self._is_outside = False
        self._wait: threading.Timer | None = None
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

    @contextlib.contextmanager
    def deferred_to_step(self) -> Iterator[None]:
        """Defer interrupts during a pass through a training loop of a plain cell, and after it.

        The ranks may have agreed on a step of a later loop, so an interrupt remains deferred after
        the pass. Code outside of loops is interrupted if no loop begins within `OUTSIDE_S`.
        """
        self._end_wait()
        self._defers, self._is_outside = True, False
        try:
            yield
        finally:
            self._is_outside = True
            if self.is_pending:
                self._wait_for_loop()

    def _wait_for_loop(self) -> None:
        """Interrupt the code outside of loops after `OUTSIDE_S`, unless a loop begins."""
        self._end_wait()
        self._wait = threading.Timer(OUTSIDE_S, self._interrupt_outside)
        self._wait.daemon = True
        self._wait.start()

    def _interrupt_outside(self) -> None:
        self._defers = False
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def force_interrupt(self) -> None:
        """Stop deferring interrupts in this cell. Thread-safe."""
        self._defers = False

    def refuse(self) -> None:
        """Ignore interrupts: the user's code is over, even if `admitted` has not exited."""
        self._inside = False
        self._task = None
        self._end_wait()
        self._is_outside = False
        self._defers = False  # a `fit` that raised does not reset it

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.shield.defers():
            return
        now = time.monotonic()
        if not self._inside or now - self._raised_at < AGAIN_S:
            return
        if self._defers:
            self.is_pending = True
            if self._is_outside:
                self._wait_for_loop()
            return
        self._raised_at = now
        task = self._task
        if task is not None and asyncio.current_task(task.get_loop()) is not task:
            task.get_loop().call_soon_threadsafe(task.cancel)  # the task is suspended in an await
        else:
            signal.default_int_handler(number, frame)
