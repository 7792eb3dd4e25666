"""Saves of rank 0 in the order in which they began."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.worker.tensorflow.saving.messages import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.tensorflow.runtime.collective_wait import WaitClock
    from nbdist.worker.tensorflow.saving.messages import AskSave

ALONE_S = 1.0
"""Seconds that rank 0 waits in a collective before another rank continues without its save."""

_NUMBERS = re.compile(r"(\d+)")


@dataclass
class Entry:
    """A save of rank 0.

    Attributes:
        path: path as the user typed it.
        answer: answer for ranks that ask for the save.
    """

    path: str
    answer: Answer


class SaveLedger:
    """Record of saves. Rank 0's main thread writes it and its server thread reads it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cell = 0
        self._entries: list[Entry] = []
        self._known: set[str] = set()

    @contextlib.contextmanager
    def saving(self, cell: int, path: str) -> Iterator[Entry]:
        """Announce a save. The body sets the entry's answer, or clears its path to cancel."""
        entry = Entry(path, Answer(status="pending"))
        with self._lock:
            if cell != self._cell:
                self._cell = cell
                self._entries.clear()
            self._entries.append(entry)
        try:
            yield entry
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            entry.answer = Answer(status="failed", error=text)
            raise
        with self._lock:
            self._known.add(str(Path(path).absolute()))

    def answer(self, asked: AskSave, worker: Worker, clock: WaitClock) -> Answer:
        """Return the state of a save that a rank asks for."""
        with self._lock:
            entries = [*self._entries] if asked.cell == self._cell else []
        same = [entry for entry in entries if entry.path == asked.path]
        if len(same) >= asked.count:
            return same[asked.count - 1].answer
        if _has_left(worker, asked.cell) or _is_own(asked, entries):
            return Answer(status="alone")
        waits = worker.cell == asked.cell and clock.seconds() >= ALONE_S
        return Answer(status="alone" if waits else "pending")

    def in_progress(self, path: str) -> Answer | None:
        """Return the answer for a rank that reads a path. None if no save of it is in progress."""
        with self._lock:
            newest = next((e for e in reversed(self._entries) if e.path == path), None)
        return newest.answer if newest and newest.answer.status == "pending" else None

    def knows(self, path: str) -> bool:
        """Return True if a save wrote this path or a prefix that it extends by a number."""
        whole = str(Path(path).absolute())
        with self._lock:
            return any(known == whole or whole.startswith(f"{known}-") for known in self._known)


def _has_left(worker: Worker, cell: int) -> bool:
    ended = worker.ended
    return worker.cell > cell or (ended is not None and ended.cell >= cell)


def _is_own(asked: AskSave, entries: list[Entry]) -> bool:
    """Return True if a rank's path equals one of rank 0's except for the rank's own number."""
    own = _NUMBERS.split(asked.path)
    for entry in entries:
        theirs = _NUMBERS.split(entry.path)
        if len(theirs) == len(own) and theirs[::2] == own[::2] and theirs != own:
            pairs = {(a, b) for a, b in zip(own[1::2], theirs[1::2], strict=True) if a != b}
            if all(int(a) == asked.rank and int(b) == 0 for a, b in pairs):
                return True
    return False
