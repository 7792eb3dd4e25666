"""Prefetching: a thread prepares batches before the steps need them.

Order and values are those of the source. An error of a source is raised at the step that needs the
batch. Sources that each rank reads in part are not prefetched. Ranks exchange their row counts in
collectives while they read, and only one collective may be under way.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.records import INPUT_WAIT
from nbdist.worker.runtime.spans import annotated

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from nbdist.records import NoteTopic, StepOptions
    from nbdist.worker.data.batches import Batch, RankRows
    from nbdist.worker.data.sources import Source

AUTO_BATCHES = 4
STARVED = 0.10
"""Share of the time that waiting for data may take before `auto` begins to prefetch."""

WINDOW = 20
"""Number of steps that `auto` measures; half of them are enough to decide."""

_END_S = 1.0
"""Seconds that the end of an epoch waits for a thread that may be blocked in the user's data."""


class _End(msgspec.Struct, frozen=True):
    """End of the items, with the error that caused it if any."""

    error: BaseException | None = None


class PrefetchIterator:
    """Iterates over items on a thread, a few items ahead.

    Args:
        items: iterator that nothing else may use afterwards.
        room: number of items that may wait to be used.
        limit: total number of items to take; below 0, all items.
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
        """End the thread. A thread that waits for the user's data ends when the data arrive."""
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
    """Batches of a run, each with the time that the step waited for it.

    Args:
        source: the data.
        options: options of the step.
        note: reports a line about the run.
        passed: called for each skipped batch, so that the rank does not seem hung.
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
            text = (
                f"--prefetch {options.prefetch}: not used, because ranks read their parts together"
            )
            note("starved", text)

    def epoch(
        self, number: int, rank_rows: RankRows, limit: int, first: int = 0
    ) -> Generator[tuple[Batch, float], None, None]:
        """Yield each batch with the seconds that the step waited for it.

        Args:
            number: number of the epoch.
            rank_rows: rows of this rank in a batch.
            limit: number of batches needed; below 0, all.
            first: number of batches to skip at the beginning.
        """
        read = 0 if self._source.by_number else first  # batches to read and to leave out
        batches: Iterator[Batch] = iter(self._source.epoch(number, rank_rows, first - read))
        for _ in itertools.islice(batches, read):
            self._passed()
        ahead: PrefetchIterator | None = None
        taken = 0
        began = time.perf_counter()
        try:
            while True:
                if self._room and ahead is None:
                    ahead = PrefetchIterator(
                        batches, self._room, limit - taken if limit >= 0 else -1
                    )
                    batches = iter(ahead)
                asked = time.perf_counter()
                with annotated(INPUT_WAIT):
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
        """Begin to prefetch if steps wait for data, the first step of an epoch excepted."""
        if not self._auto or first:
            return
        self._seen.append((waited_s, step_s))
        waited = sum(waited for waited, _ in self._seen)
        total = sum(step for _, step in self._seen)
        if len(self._seen) >= WINDOW // 2 and waited > STARVED * total:
            self._auto, self._room = False, AUTO_BATCHES
            # No measured numbers: the notebook shows equal lines of several ranks once.
            waits = f"more than {STARVED:.0%} of the time was waiting for data"
            self._note("starved", f"--prefetch auto: {waits}; nbdist now prefetches batches")
