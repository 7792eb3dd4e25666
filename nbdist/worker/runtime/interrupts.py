"""SIGINT on an engine: it stops the user's code, and nothing else of the process.

One handler for the engine's whole life. A handler that is set and reset around a cell would be
left in place by a signal that arrives while it is being reset, and the next one would end the
engine.
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
"""A second interrupt within this time is the first one's: what cleans up after it may do so."""


class Shield:
    """Within it, an interrupt waits for its end.

    One that is raised where a lock has just been taken leaves it taken, for all other threads. Any
    thread may enter; only the main thread is interrupted.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._delayed = False

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
            if self._delayed and not self._depth:
                self._delayed = False
                signal.raise_signal(signal.SIGINT)

    def delays(self) -> bool:
        """Whether the interrupt that is handled now comes again later. On the main thread."""
        self._delayed |= self._depth > 0
        return self._depth > 0


class Interrupts:
    """Raises KeyboardInterrupt while the user's code runs; installed as the handler of SIGINT.

    Attributes:
        noted: there was an interrupt that has been put off.
        shield: for what the user's code calls and must not be left half done.
    """

    def __init__(self) -> None:
        self.noted = False
        self._puts_off = False
        self._inside = False
        self._task: asyncio.Task[None] | None = None
        self._raised_at = -AGAIN_S
        self.shield = Shield()

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._handle)

    @contextlib.contextmanager
    def admitted(self, task: asyncio.Task[None] | None = None) -> Iterator[None]:
        """Within it, the user's code runs; in `task`, where it may await."""
        self._task = task
        self._inside = True
        try:
            yield
        finally:
            self.refuse()

    @contextlib.contextmanager
    def put_off(self, *, noted: bool = False) -> Iterator[None]:
        """Defer interrupts. A deferred one is raised after `force_interrupt`.

        When it was sent is not to be known: one that comes while the main thread waits in a
        collective is handled at its end, seconds later perhaps.

        Args:
            noted: there was one before this rank began.
        """
        self.noted = noted
        self._puts_off = True
        try:
            yield
        finally:
            self._puts_off = False

    def force_interrupt(self) -> None:
        """From here on, nothing of this cell puts an interrupt off. Any thread."""
        self._puts_off = False

    def refuse(self) -> None:
        """From here on the user's code is over, whatever became of `admitted`."""
        self._inside = False
        self._task = None
        self._puts_off = False  # of a `fit` that raised, nothing else says that it is over

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.shield.delays():
            return
        now = time.monotonic()
        if not self._inside or now - self._raised_at < AGAIN_S:
            return
        if self._puts_off:
            self.noted = True
            return
        self._raised_at = now
        task = self._task
        if task is not None and asyncio.current_task(task.get_loop()) is not task:
            task.get_loop().call_soon_threadsafe(task.cancel)  # it awaits
        else:
            signal.default_int_handler(number, frame)
