"""Batches made ahead of the step that needs them, on a thread.

The order is the source's own, and so are the numbers; what a source raises is raised at the step
that would have had the batch. Sources of which each rank reads a part are left as they are: ranks
tell each other their rows while they read, in collectives, of which only one may be under way.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from nbdist.records import NoteTopic, StepOptions
    from nbdist.worker.data.batches import Batch, Cut
    from nbdist.worker.data.sources import Source

AUTO_BATCHES = 4
STARVED = 0.10
"""The share of the time that waiting for data may take before `auto` begins."""

WINDOW = 20
"""Steps that `auto` looks at; half of them are enough."""

_END_S = 1.0
"""How long the end of an epoch waits for a thread that may be stuck in the user's own data."""


class _End(msgspec.Struct, frozen=True):
    """Nothing comes any more, because of an error if there is one."""

    error: BaseException | None = None


class Ahead:
    """Takes items from an iterator on a thread, a few at a time.

    Args:
        items: where from; nobody else may take from it afterwards.
        room: how many may wait to be used.
        limit: how many are taken in all; below 0, all that there are.
    """

    def __init__(self, items: Iterator[Any], room: int, limit: int) -> None:
        self._items = items
        self._left = limit
        self._room = threading.Semaphore(room)
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="nbdist-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while not isinstance(item := self._made.get(), _End):
            self._room.release()
            yield item
        if item.error is not None:
            raise item.error

    def close(self) -> None:
        """End the thread; one that waits for the user's own data ends when that comes."""
        self._closed = True
        self._room.release()
        self._thread.join(_END_S)

    def _make(self) -> None:
        self._made.put(self._pass_on())

    def _pass_on(self) -> _End:
        try:
            while self._left and self._room.acquire() and not self._closed:
                self._left -= 1
                self._made.put(next(self._items))
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001 - the boundary: raised again at its step
            return _End(error)
        return _End()


class Feed:
    """The batches of a run, with the time that each was waited for.

    Args:
        source: the data.
        options: of the step.
        note: says a line about the run.
        passed: is told of each batch that is left out: nobody stands still.
    """

    def __init__(
        self,
        source: Source,
        options: StepOptions,
        note: Callable[[NoteTopic, str], None],
        passed: Callable[[], None],
    ) -> None:
        self._source = source
        self._note = note
        self._passed = passed
        self._auto = options.prefetch == "auto"
        self._room = 0 if options.prefetch == "auto" else options.prefetch
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        if options.prefetch and not source.common:
            self._auto, self._room = False, 0
            text = f"--prefetch {options.prefetch}: left out, as ranks read their parts together"
            note("starved", text)

    def epoch(
        self, number: int, cut: Cut, limit: int, first: int = 0
    ) -> Generator[tuple[Batch, float], None, None]:
        """Each batch with the seconds that were waited for it.

        Args:
            number: of the epoch.
            cut: how batches are cut.
            limit: how many are needed; below 0, all.
            first: how many are left out at the beginning.
        """
        batches: Iterator[Batch] = iter(self._source.epoch(number, cut))
        for _ in itertools.islice(batches, first):
            self._passed()
        ahead: Ahead | None = None
        taken = 0
        began = time.perf_counter()
        try:
            while True:
                if self._room and ahead is None:
                    ahead = Ahead(batches, self._room, limit - taken if limit >= 0 else -1)
                    batches = iter(ahead)
                asked = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    return
                now = time.perf_counter()
                taken += 1
                self._judge(now - asked, now - began, first=taken == 1)
                began = now
                yield batch, now - asked
        finally:
            if ahead is not None:
                ahead.close()

    def _judge(self, waited_s: float, step_s: float, *, first: bool) -> None:
        """Begin to make batches ahead if steps wait for them; the first one of an epoch may."""
        if not self._auto or first:
            return
        self._seen.append((waited_s, step_s))
        waited = sum(waited for waited, _ in self._seen)
        total = sum(step for _, step in self._seen)
        if len(self._seen) >= WINDOW // 2 and waited > STARVED * total:
            self._auto, self._room = False, AUTO_BATCHES
            # The same words on all ranks, whose lines are then shown as one.
            waits = f"more than {STARVED:.0%} of the time was waiting for data"
            self._note("starved", f"--prefetch auto: {waits}; from here on it is read ahead")
